"""`python -m shoal.checkpoint verify PATH | export PATH FILE | import FILE PATH | reshape OLD NEW`: what `shoal` runs
of these names.

PATH is a folder of checkpoints (the newest whole one is meant) or one checkpoint's own folder. Exit codes: 0 done, 1 a
checkpoint is damaged or the output cannot be written, 2 wrong use, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from shoal_protos.errors import NotFound, ShoalError
from shoal_protos.shape import Shape
from shoal_protos.text import printable

from shoal.checkpoint.catalogue import Found, SaveName, look_into, resolve, saves
from shoal.checkpoint.export import FLOATS, dtype_named, export, export_dcp
from shoal.checkpoint.fingerprint import verify
from shoal.checkpoint.importing import Imported, import_model
from shoal.checkpoint.manifest import MANIFEST
from shoal.checkpoint.reshaping import reshape
from shoal.checkpoint.storage import open_storage
from shoal.core.checkpoint_errors import CheckpointDamaged

DONE, DAMAGED, UNWRITTEN, WRONG_USE, INTERRUPTED = 0, 1, 1, 2, 130
MOST_NAMES = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    given = _parser().parse_args(arguments)
    try:
        return int(given.run(given))
    except CheckpointDamaged as error:
        _tell(str(error))
        return DAMAGED
    except ShoalError as error:
        _tell(str(error))
        return WRONG_USE
    except _NoOutputError as error:
        if not isinstance(error.why, BrokenPipeError):  # who closes a pipe has read enough
            _tell(f"the output cannot be written: {error.why.strerror}")
        return UNWRITTEN
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shoal", description="Elastic checkpoints on a path or URL.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("verify", help="verify every checksum of a checkpoint, or of all in a folder")
    command.add_argument("path", metavar="PATH")
    command.set_defaults(run=_verify)
    command = commands.add_parser("export", help="export the model of a checkpoint")
    command.add_argument("path", metavar="PATH")
    command.add_argument("file", metavar="FILE", type=Path)
    command.add_argument("--dtype", metavar="DTYPE", help=f"of floating tensors: {', '.join(FLOATS)}")
    command.add_argument("--format", choices=("safetensors", "dcp"), default="safetensors")
    command.add_argument("--averaged", action="store_true", help="averages of weights in the place of parameters")
    command.set_defaults(run=_export)
    command = commands.add_parser("import", help="make a checkpoint of step 0 from a model file or DCP folder")
    command.add_argument("file", metavar="FILE", type=Path)
    command.add_argument("path", metavar="PATH")
    command.add_argument("--model-only", action="store_true", help="leave optimizer states out")
    command.set_defaults(run=_import)
    command = commands.add_parser("reshape", help="make a checkpoint for cells of another shape")
    command.add_argument("old", metavar="OLD")
    command.add_argument("new", metavar="NEW")
    for dimension in ("tensor", "context", "pipeline", "expert"):
        command.add_argument(f"--{dimension}", metavar="N", type=int, default=1, help="processes of a cell in it")
    command.set_defaults(run=_reshape)
    return parser


def _tell(sentence: str) -> None:
    sys.stderr.write(printable(f"shoal: {sentence}\n"))


class _NoOutputError(Exception):
    """Standard output takes no more."""

    def __init__(self, why: OSError) -> None:
        super().__init__(str(why))
        self.why = why


def _print(line: str) -> None:
    try:
        sys.stdout.write(printable(f"{line}\n"))
        sys.stdout.flush()
    except OSError as error:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())  # takes what Python writes as it ends
        os.close(nothing)
        raise _NoOutputError(error) from error


def _verify(given: argparse.Namespace) -> int:
    path, damaged = given.path.rstrip("/"), 0
    parent, _, folder = path.rpartition("/")
    one = SaveName.parse(folder)
    storage = open_storage((parent or "/") if one else path)
    names = [one] if one else saves(storage)
    if not names:
        raise NotFound(f"there is no checkpoint in {path}.")
    for name in names:
        try:
            found = look_into(storage, name)
            seen = verify(found.reader())
            _print(
                f"{found.path}: step {name.step}, {seen.bytes_read:,} bytes in {len(found.manifest.files)} files, "
                f"valid, fingerprint {seen.fingerprint}"
            )
        except CheckpointDamaged as error:
            damaged += bool(one) or MANIFEST in storage.list(name.folder)
            _print(str(error))
    return DAMAGED if damaged else DONE


def _export(given: argparse.Namespace) -> int:
    dtype = dtype_named(given.dtype) if given.dtype else None
    found = _newest(given.path)
    if given.format == "dcp":
        export_dcp(found.reader(), given.file, dtype, given.averaged)
    else:
        export(found.reader(), given.file, dtype, given.averaged)
    averages = ", with averages of weights" if given.averaged else ""
    _print(f"{given.file}: the model of step {found.name.step}{averages}")
    return DONE


def _newest(path: str) -> Found:
    found = resolve(None, path, _tell)
    assert found is not None, "a path is there or an error"
    return found


def _import(given: argparse.Namespace) -> int:
    storage = open_storage(given.path)
    made = import_model(given.file, storage, given.model_only)
    _print(f"{storage.url}/{made.name.folder}: the model of {given.file}{_with_states(made)}, step 0")
    if made.rates:
        rates = f"learning rate{'s' if len(made.rates) > 1 else ''} {', '.join(f'{rate:g}' for rate in made.rates)}"
        _print(f"not taken, as a job has its own config: {rates}")
    if made.left_out:
        more = len(made.left_out) - MOST_NAMES
        rest = f" and {more} more" if more > 0 else ""
        _print(f"left out, neither model nor optimizer state: {', '.join(made.left_out[:MOST_NAMES])}{rest}")
    return DONE


def _reshape(given: argparse.Namespace) -> int:
    shape, storage = Shape(given.tensor, given.pipeline, given.context, given.expert), open_storage(given.new)
    made = reshape(_newest(given.old), storage, shape)
    of = f"cells of {shape.processes} processes ({shape})" if shape.processes > 1 else str(shape)
    _print(f"{storage.url}/{made.name.folder}: step {made.name.step}, {of}, valid, fingerprint {made.fingerprint}")
    return DONE


def _with_states(made: Imported) -> str:
    if not made.states:
        return ""
    counts = [f"{count:,.0f}" for count in made.updates]
    span = " to ".join(dict.fromkeys((counts[0], counts[-1]))) if counts else ""
    after = f" after {span} update{'' if span == '1' else 's'}" if span else ""
    return f" with optimizer states of {made.states} parameters{after}"


if __name__ == "__main__":
    sys.exit(main())
