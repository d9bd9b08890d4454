"""A plain model file, or a folder of `torch.distributed.checkpoint`, as a checkpoint of step 0, which a job begins with
(`resume`).

It holds tensors by name: a job takes them by name for its parameters, frozen parameters and buffers, and converts their
dtype to its own. Optimizer states come along where a folder has them; parameters whose states are alike are in buckets
of their own, for blocks share a state's numbers. All is carried over part by part, whatever its size.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal_protos.errors import UserError
from shoal_protos.release import RELEASE
from torch import Tensor

from shoal.checkpoint.catalogue import SaveName, delete
from shoal.checkpoint.dcp_folder import INDEX
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.model_file import ModelFile, open_model
from shoal.checkpoint.named import Known
from shoal.checkpoint.snapshot import PARAMETERS, Kind, MadeContent, made_content
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.writer import Author, commit, write_content
from shoal.core.checkpoint_errors import StorageFailed
from shoal.core.laying_out import lay_out
from shoal.core.layout import Bucket, Layout, Trainable
from shoal.core.manifest_parts import LayoutEntry

Kept = Mapping[str, Mapping[str, Known]]
"""What an optimizer keeps, by parameter and key."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import has made. `states`: how many parameters have optimizer states."""

    name: SaveName
    states: int
    updates: tuple[float, ...]
    """The optimizer's own counts of its updates, each once."""
    rates: tuple[float, ...]
    """Its learning rates, each once, which stay behind."""
    left_out: tuple[str, ...]


def import_model(file: Path, storage: Storage, model_only: bool = False) -> Imported:
    """Writes the checkpoint. Raises `UserError` for a file that holds no model. `model_only`: without an optimizer."""
    before = _stamps(file)
    model = open_model(file)
    kept: Kept = {} if model_only else model.states
    numbers = _numbers(model, kept, file)
    groups = _groups(model, kept, numbers)
    layout = lay_out([Trainable(name, known.shape, known.dtype, groups[name]) for name, known in model.known.items()])
    author = Author("import", secrets.token_hex(8))
    name = SaveName.of(0, 0, 0, author.incarnation)
    draft = Manifest(
        release=RELEASE, kind="model", job="", step=0, generation=0, last_step=0,
        layout=LayoutEntry.of(layout, dict(model.tied)), optimizer="", groups=[], data=None, scheduler=None,
        scaler=None, states={}, record="", buffers=(), frozen=None, config={}, numerics={}, files=(),
    )  # fmt: skip
    storage.prepare()
    try:
        entry = write_content(storage, name.folder, 0, author, _content(model, layout, kept, numbers))
        if _stamps(file) != before:
            raise UserError(f"{file} was written to while it was read; import it again when its program is done.")
        commit(storage, name.folder, draft, [entry.name])
    except BaseException:
        with suppress(StorageFailed):  # the first error is the one to be told
            delete(storage, name.folder)
        raise
    updates = {float(value) for (_, key), value in numbers.items() if key == "step"}
    rates = model.rates if kept else ()
    return Imported(name, len(kept), tuple(sorted(updates)), tuple(rates), tuple(model.left_out))


def _stamps(file: Path) -> dict[str, tuple[int, int, int]]:
    """When each of the files that hold tensors was written, its size, and which one it is.

    Raises `UserError` where there is nothing, or nothing that may be read.
    """
    try:
        files = [file]
        if file.is_dir():
            files = [one for one in file.iterdir() if one.name == INDEX or one.suffix in (".distcp", ".safetensors")]
        elif not file.is_file() and file.exists():
            raise UserError(f"{file} is neither a file nor a folder; name the model's file, or its folder.")
        found = {one.name: one.stat() for one in files if one.is_file()}
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from None
    return {name: (stat.st_mtime_ns, stat.st_size, stat.st_ino) for name, stat in found.items()}


def _groups(model: ModelFile, kept: Kept, numbers: Mapping[tuple[str, str], Tensor]) -> dict[str, int]:  # each ()
    """A number for each parameter: the same where what the optimizer keeps of two is alike, with the same numbers."""
    numbered: dict[object, int] = {}
    found: dict[str, int] = {}
    for name in model.known:
        kind = tuple(
            (key, one.dtype, float(numbers[name, key]) if (name, key) in numbers else None)
            for key, one in sorted(kept.get(name, {}).items())
        )
        found[name] = numbered.setdefault(kind, len(numbered))
    return found


def _numbers(model: ModelFile, kept: Kept, file: Path) -> dict[tuple[str, str], Tensor]:  # each ()
    """By parameter and key: what is one number for the whole parameter. A parameter of one element does not tell.

    Raises `UserError` for what is no finite number.
    """
    single = {
        (name, key): model.known[name].shape != ()
        for name, keys in kept.items()
        for key, one in keys.items()
        if one.shape == ()
    }
    shared = {key for (_, key), tells in single.items() if tells} | {"step"}
    found = {(name, key): model.state_part(name, key, 0, 1)[0] for name, key in single if key in shared}
    for (name, key), value in found.items():
        if value.is_complex() or not math.isfinite(value):
            raise UserError(
                f'{file} has optimizer state "{key}" of "{name}" that is {value.item()}; expected a finite number. '
                "Import the model alone (--model-only)."
            )
    return found


def _content(
    model: ModelFile,
    layout: Layout,
    kept: Kept,
    numbers: Mapping[tuple[str, str], Tensor],  # each ()
) -> MadeContent:
    """All of a tensor's parts follow each other; what is one number comes last."""

    def part(name: str, key: str, first: int, last: int) -> Tensor:  # (last - first,), or ()
        if key == PARAMETERS:
            return model.part(name, first, last)
        found = model.state_part(name, key, first, last)
        return found.reshape(()) if (name, key) in numbers else found

    def kinds(bucket: Bucket) -> dict[str, Kind]:
        name = bucket.slots[0].parameter.name
        return {key: (one.dtype, (name, key) in numbers) for key, one in kept.get(name, {}).items()}

    return made_content(layout, layout.buckets, kinds, part, {})
