"""Checkpoints of jobs in crews, and what `shoal reshape` makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shoal.checkpoint.__main__ import main
from shoal.checkpoint.catalogue import Found, resolve
from shoal.checkpoint.fingerprint import verify
from shoal_protos.shape import Shape
from tensor_parallel import CellTask, crew_of


def found_in(place: Path) -> Found:
    found = resolve(None, str(place), print)
    assert found is not None
    return found


def reshaped(old: Path, new: Path, shape: Shape) -> str:
    """By the command; the fingerprint of what it has made."""
    sizes = ("--tensor", shape.tensor, "--context", shape.context, "--pipeline", shape.pipeline,
             "--expert", shape.expert)  # fmt: skip
    assert main(["reshape", str(old), str(new), *map(str, sizes)]) == 0
    return verify(found_in(new).reader()).fingerprint


def there_and_back(task: CellTask, after: Shape, place: Path) -> None:
    """`task`: saves in its last step."""
    old = {"checkpoint": {"path": str(place / "old"), "every_steps": task.options["max_steps"]}}
    task = replace(task, options=task.options | {"shoal": task.options.get("shoal", {}) | old})
    with crew_of("abcdefgh"[: task.shape.processes], task) as crew:
        fingerprint = crew.finish()
    reshaped(place / "old", place / "new", after)
    assert reshaped(place / "new", place / "back", task.shape) == fingerprint
    old, back = (found_in(place / name).manifest for name in ("old", "back"))
    assert old.layout == back.layout
    same = ("step", "groups", "scheduler", "states", "missed", "record", "data", "last_step", "given", "job", "run")
    assert all(getattr(old, name) == getattr(back, name) for name in same)
