"""`zero_to_fp32.py`, the script that DeepSpeed leaves beside checkpoints: here it hands over to `shoal export`.

`deepspeed.initialize` leaves it in `shoal.checkpoint.path`; run there it writes float32 weights of a checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from shoal_protos.errors import NotFound, ShoalError, UserError
from shoal_protos.messages import WRONG_USE
from shoal_protos.training_log import get_logger, say

from shoal.checkpoint.__main__ import main as command
from shoal.checkpoint.catalogue import saves
from shoal.checkpoint.storage import open_storage
from shoal.core.checkpoint_errors import StorageFailed
from shoal.deepspeed.deepspeed_engine import saved_in

NAME, WEIGHTS = "zero_to_fp32.py", "model.safetensors"
SCRIPT = b"""# python zero_to_fp32.py CHECKPOINTS OUTPUT: float32 weights of the newest checkpoint, by `shoal export`.
import sys

from shoal.deepspeed.zero_to_fp32 import main

sys.exit(main())
"""

log = get_logger("shoal.checkpoint")


def leave_script(place: str) -> None:
    """Puts it beside the checkpoints, where there is none."""
    try:
        storage = open_storage(place)
        storage.prepare()
        if NAME not in storage.list():
            storage.publish(NAME, SCRIPT)
    except StorageFailed as error:  # checkpoints say themselves what they cannot do there
        log.warning("no_zero_to_fp32", path=place, reason=str(error))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog=NAME, description="Float32 weights of a checkpoint, as safetensors.")
    parser.add_argument("checkpoint_dir", help="folder of checkpoints, of which the newest is taken")
    parser.add_argument("output_dir", type=Path, help=f"folder, in which {WEIGHTS} is written, or a file of that kind")
    parser.add_argument("-t", "--tag", help="what engine.save_checkpoint called the checkpoint")
    parser.add_argument("--safe_serialization", action="store_true", help="changes nothing")
    given = parser.parse_args(arguments)
    try:
        path = given.checkpoint_dir if given.tag is None else _tagged(given.checkpoint_dir, given.tag)
        return command(["export", path, str(_file(given.output_dir)), "--dtype", "float32"])
    except ShoalError as error:
        say(str(error))
        return WRONG_USE


def _file(output: Path) -> Path:
    if output.suffix in (".bin", ".pt", ".pth"):
        raise UserError(f"{output} would be a pickle; weights are written as safetensors. Name a folder.")
    return output if output.suffix == ".safetensors" else output / WEIGHTS


def _tagged(place: str, tag: str) -> str:
    """The newest checkpoint that was saved with this tag."""
    paths = [f"{place.rstrip('/')}/{name.folder}" for name in saves(open_storage(place))]
    found = next((path for path in paths if saved_in(path).tag == tag), None)
    if found is None:
        raise NotFound(f'no checkpoint in {place} was saved as "{tag}".')
    return found


if __name__ == "__main__":
    sys.exit(main())
