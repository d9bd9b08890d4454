"""Which elastic checkpoint `resume_from_checkpoint` means."""

from __future__ import annotations

import json
from pathlib import Path

from shoal_protos.errors import NotFound, UserError

from shoal.checkpoint.catalogue import resolve
from shoal.integrations.transformers.engine_config import FOLDER
from shoal.logs import get_logger

log = get_logger("shoal")


def checkpoint_of(asked: object, output_folder: str) -> str:
    """A path for `shoal.checkpoint.resume`. `asked`: True, the newest in the Trainer's output folder, or a folder that
    it has saved. Raises `UserError`.
    """
    if asked is True:
        place = Path(output_folder) / FOLDER
        found = resolve(str(place), "latest", _skipped) if place.is_dir() else None
        if found is None:
            raise UserError(f"resume_from_checkpoint is True, and there is no complete checkpoint in {place}.")
        return found.path
    folder = Path(str(asked))
    place = folder.parent / FOLDER
    step = _step_of(folder)
    if not place.is_dir():
        raise UserError(
            f"resume_from_checkpoint is {folder}, and there is no {place} beside it: it was not saved by Shoal's "
            "Trainer, or with save_only_model. Load its model by from_pretrained, and train from there."
        )
    try:
        found = resolve(str(place), step, _skipped)
    except NotFound as error:
        raise UserError(f"resume_from_checkpoint is {folder}: {error}") from None
    assert found is not None
    return found.path


def _step_of(folder: Path) -> int:
    path = folder / "trainer_state.json"
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"resume_from_checkpoint is {folder}, and {path} cannot be read; name a folder that a Trainer has saved."
        ) from None


def _skipped(sentence: str) -> None:
    log.warning("checkpoint_skipped", reason=sentence)
