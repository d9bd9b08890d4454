"""Which elastic checkpoint `resume_from_checkpoint` means.

Scripts give it the newest folder `checkpoint-N` whenever they start: also where they replace a worker of a job under
way, and where the save of step N was skipped or cut short.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from shoal_protos.errors import UserError
from transformers.trainer_utils import get_last_checkpoint

from shoal.checkpoint.catalogue import Found, SaveName, checkpoints, latest, saves
from shoal.checkpoint.errors import NoneReadable
from shoal.checkpoint.lineage import Lineage
from shoal.checkpoint.storage import Storage, open_storage
from shoal.integrations.transformers.engine_config import FOLDER
from shoal.logs import get_logger

RUNS = "shoal_runs.json"
"""In each folder `checkpoint-N`."""
log = get_logger("shoal")


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where training is to begin, and a sentence about it."""

    resume: str | bool
    """For `shoal.checkpoint.resume`."""
    warning: str = ""
    refusal: UserError | None = None

    def on_welcome(self, is_under_way: bool) -> None:
        """It is known now whether the job is under way: it goes on where it is then, and the argument means nothing.
        Else this warns, or raises `UserError`.
        """
        if is_under_way:
            return
        if self.refusal is not None:
            raise self.refusal
        if self.warning:
            log.warning("older_checkpoint", means=self.warning)


def resume_point(asked: object, output_folder: str, has_controller: bool) -> ResumePoint:
    """`asked`: as `train` was given it. Raises `UserError` for a script alone, which no job can take along."""
    usual = "latest" if has_controller else False
    if asked is None or asked is False:
        return ResumePoint(usual)
    try:
        path, warning = _checkpoint_of(asked, output_folder)
    except UserError as error:
        if not has_controller:
            raise
        return ResumePoint(usual, refusal=error)
    return ResumePoint(path or usual, warning)


def _checkpoint_of(asked: object, output_folder: str) -> tuple[str, str]:
    """Its path, empty for step 0, and a warning where it is not the one of that step. Raises `UserError`.

    `asked`: True, the newest in the Trainer's output folder, or a folder that it has saved. Where the elastic part of
    that step is not there, the newest one of the same run before it is meant.
    """
    opening = f"resume_from_checkpoint is {asked}"
    if asked is not True:
        return _of_folder(Path(str(asked)), opening)
    storage = _saves_in(Path(output_folder), opening)
    newest = _latest(storage, opening)
    if newest is not None:
        return newest.path, ""
    folder = get_last_checkpoint(output_folder)
    if folder is None:
        raise UserError(f"{opening}, and there is no complete checkpoint in {storage.url}.")
    return _of_folder(Path(folder), opening)


def _of_folder(folder: Path, opening: str) -> tuple[str, str]:
    step, runs = _step_of(folder, opening), _runs_of(folder)
    storage = _saves_in(folder.parent, opening)
    for one in checkpoints(storage, _skipped):
        if one.name.step == step and _is_of(one.name, runs):
            return one.path, ""
    before = _latest(storage, opening, lambda one: one.name.step < step and _is_of(one.name, runs))
    missing = f"{opening}, and {storage.url} has no complete checkpoint of step {step}"
    if before is not None:
        return before.path, f"{missing}; training goes on from step {before.name.step}"
    steps = sorted({name.step for name in saves(storage) if _is_of(name, runs)})
    if not steps or steps[-1] > step or len(runs or ()) != 1:
        raise UserError(f"{missing} or before; there are {steps or 'none'}. Name another folder, or begin without one.")
    return "", f"{missing}: the first save of its run was cut short; training begins at step 0"


def _saves_in(folder: Path, opening: str) -> Storage:
    place = folder / FOLDER
    if not place.is_dir():
        raise UserError(
            f"{opening}, and there is no {place}: nothing was saved there by Shoal's Trainer, or with save_only_model. "
            "Load a model that was saved by from_pretrained, and train from there."
        )
    return open_storage(str(place))


def _latest(storage: Storage, opening: str, is_meant: Callable[[Found], bool] = lambda _: True) -> Found | None:
    try:
        return latest(storage, _skipped, is_meant=is_meant)
    except NoneReadable as error:
        raise UserError(f"{opening}: {error}") from None


def mark_runs(folder: Path, run: str, lineage: Lineage) -> None:
    """Leaves in a folder `checkpoint-N` which run has saved it, and which ones that run has continued: a Trainer that
    began anew in an output folder that was used before does not go on from the checkpoints of another one there.
    """
    runs = {run, *(branch.run for branch in lineage)}
    (folder / RUNS).write_text(json.dumps({"runs": sorted(runs)}), encoding="utf-8")


def _is_of(name: SaveName, runs: Collection[str] | None) -> bool:
    return runs is None or name.is_of(runs)


def _runs_of(folder: Path) -> list[str] | None:
    """None where the folder does not tell."""
    try:
        return [str(run) for run in json.loads((folder / RUNS).read_text(encoding="utf-8"))["runs"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _step_of(folder: Path, opening: str) -> int:
    path = folder / "trainer_state.json"
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{opening}, and {path} cannot be read; name a folder that a Trainer has saved.") from None


def _skipped(sentence: str) -> None:
    log.warning("checkpoint_skipped", reason=sentence)
