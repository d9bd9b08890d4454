"""Whether a checkpoint is of this job's model, and what of it is used where it is not.

The same layout: blocks are read as they are, training goes on. Another one is an error that names the first parameter
that differs, unless `checkpoint.allow` names the difference: then parameters and buffers that match by name are taken,
all others keep their initial values, and training begins at step 0 with a fresh optimizer (fine-tuning).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from shoal_protos.errors import UserError

from shoal.checkpoint.manifest import Manifest
from shoal.core.layout import Layout, Slot

ALLOWED = ("new", "missing")
"""`new`: of the model, unknown to the checkpoint. `missing`: of the checkpoint, unknown to the model."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """Tensors by name: what is taken from the checkpoint, what keeps its initial value, what is left behind."""

    taken: tuple[str, ...]
    new: tuple[str, ...]
    missing: tuple[str, ...]
    has_optimizer: bool = False
    """Whether optimizer states are taken too."""

    def __str__(self) -> str:
        parts = [f"{len(self.taken)} tensors are taken by name"]
        if self.new:
            parts.append(f"{_listed(self.new)} keep their initial values")
        if self.missing:
            parts.append(f"{_listed(self.missing)} of the checkpoint are left out")
        optimizer = "the optimizer states that came with them" if self.has_optimizer else "a fresh optimizer"
        return f"{'; '.join(parts)}; training begins at step 0 with {optimizer}."


def _listed(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(f'"{name}"' for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def difference(manifest: Manifest, layout: Layout, optimizer: str) -> str | None:
    """What keeps blocks from being read as they are, one sentence; None where nothing does."""
    if manifest.kind == "model":
        return "it holds a model without a training state."
    theirs, ours = _slots(manifest.blocks), _slots(layout)
    for found, wanted in zip_longest(theirs, ours):
        sentence = _parameters_differ(found, wanted)
        if sentence:
            return sentence
    if manifest.blocks.text() != layout.text():
        return _blocks_differ(manifest.blocks, layout)
    if manifest.optimizer != optimizer:
        return f"its optimizer is {manifest.optimizer}, this job's is {optimizer}."
    return None


def _slots(layout: Layout) -> list[Slot]:
    return [slot for bucket in layout.buckets for slot in bucket.slots]


def _blocks_differ(theirs: Layout, ours: Layout) -> str:
    mine, other = ({bucket.slots[0].parameter.name for bucket in one.buckets if bucket.slots} for one in (ours, theirs))
    for whose, only in (("the checkpoint", other - mine), ("the model", mine - other)):
        if only:
            return (
                f'it was written with other units: only in {whose} a bucket begins with parameter "{min(only)}". '
                "Give `shoal.units` as it was."
            )
    return "its parameters lie in other blocks: it was written by another version of Shoal."


def _parameters_differ(found: Slot | None, wanted: Slot | None) -> str | None:
    if found is None or wanted is None:
        only = found or wanted
        assert only is not None
        whose = "the checkpoint" if wanted is None else "the model"
        return f'only {whose} has parameter "{only.parameter.name}".'
    mine, theirs = wanted.parameter, found.parameter
    if mine.name != theirs.name:
        return f'parameter "{mine.name}" of the model is where the checkpoint has "{theirs.name}".'
    for kind in ("shape", "dtype"):
        if getattr(mine, kind) != getattr(theirs, kind):
            return (
                f'parameter "{mine.name}" has {kind} {getattr(mine, kind)}, the checkpoint\'s {getattr(theirs, kind)}.'
            )
    if mine.group != theirs.group:
        return f'parameter "{mine.name}" is in optimizer group {mine.group}, the checkpoint\'s in {theirs.group}.'
    return None


def match(theirs: Mapping[str, Shape], ours: Mapping[str, Shape], allow: Sequence[str], where: str) -> Match:
    """What is taken by name: same name and same shape (another dtype is converted).

    Raises `UserError` naming the first tensor that only one side has, or has in another shape, where `allow` does not
    name that difference. One of another shape is both new and missing.
    """
    taken = tuple(name for name, shape in ours.items() if theirs.get(name) == shape)
    new = tuple(name for name in ours if name not in taken)
    missing = tuple(name for name in theirs if name not in taken)
    needed = [kind for kind, names in (("new", new), ("missing", missing)) if names]
    for kind, names, whose in (("new", new, "the model"), ("missing", missing, "the checkpoint")):
        if names and kind not in allow:
            raise UserError(
                f"{where} does not fit: {_why(names[0], theirs, ours, whose)} To begin at step 0 with what matches "
                f"by name, set `shoal.checkpoint.allow: {json.dumps(needed)}`."
            )
    return Match(taken, new, missing)


def _why(name: str, theirs: Mapping[str, Shape], ours: Mapping[str, Shape], whose: str) -> str:
    if name in theirs and name in ours:
        return f'"{name}" has shape {ours[name]}, the checkpoint\'s {theirs[name]}.'
    return f'only {whose} has "{name}".'
