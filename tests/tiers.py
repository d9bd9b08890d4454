"""Which command runs a test: `make test` what every change waits for, `make check` all that must hold before a merge.

`make test` has the pure tests, and of those that start processes or servers one for each promise that README.md and
docs/limits.md make to users. Everything else is `make check`'s: in FOLDERS a test is `make test`'s only where it has
`@promise`, elsewhere only where it or its file has `check`. CONTRIBUTING.md has the table; `tests/conftest.py` calls
`sort_into_tiers`, and `make times` prints what each test takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

FOLDERS = ("tests/integration/", "tests/charts/", "tests/models/")
"""Where tests start processes, servers or browsers, or need what is installed apart."""

PROMISES = {
    "a worker is killed": "no step is lost, in every stage, and the bits are those of an undisturbed run",
    "a cell loses a process": "its other processes go on with a spare, and the bits are those of any number of cells",
    "a worker freezes": "others go on without it, and it changes nothing when it thaws",
    "a worker joins": "the job is scaled up while it trains",
    "a worker is drained": "it hands over and goes; SIGTERM is such a wish",
    "a worker is lost in the midst of a change": "a change is finished or given up, never half done",
    "all workers are lost": "the job goes on from its checkpoint, on any number of workers",
    "no copy of a block lives": "the job begins anew, or fails by a sentence",
    "the job is paused": "it commits nothing until it is resumed",
    "stage 0": "every world has the same bits",
    "stage 1": "every world has the same bits",
    "stage 2": "every world has the same bits",
    "stage 3": "every world has the same bits",
    "float32": "training is what a plain loop does",
    "bfloat16": "every world has the same bits",
    "float16": "every world has the same bits",
    "state on the host or in files": "every world has the same bits",
    "an optimizer and a scheduler": "every world has the same bits",
    "the controller is lost": "training goes on without it, and it comes back",
    "a store of etcd": "nothing is lost or written twice",
    "several controllers": "another one leads when the leader dies",
    "a pod": "a job of pods outlives its nodes",
    "the page": "it shows what REST says",
    "the command": "a job is run, described and changed by `shoal`",
    "a script alone": "it trains without a controller to the same bits",
    "a script that fails": "its job fails with its last words",
    "a worker that differs": "it is refused by the first difference",
    "a session without a right": "nobody without a token commands anything",
    "a launcher": "a worker that died is replaced",
    "a script for DeepSpeed": "it trains with one import changed",
    "an export": "the model is there at the end, or the job fails",
}
"""What users are promised, each held by a test of `make test` that has its name."""

check = pytest.mark.check
"""A test, or with `pytestmark = check(reason)` a file of tests, that `make check` runs and `make test` does not."""


def promise(name: str, *only: str) -> Callable[[Any], Any]:
    """Marks a test that holds a promise, and so is `make test`'s; of a test with parameters the ids `only`, or all."""
    assert name in PROMISES, f"{name!r} is none of PROMISES"
    return pytest.mark.promise(name, *only)


def sort_into_tiers(items: list[pytest.Item]) -> None:
    """Marks all of FOLDERS that hold no promise as `make check`'s."""
    for item in items:
        if item.nodeid.startswith(FOLDERS) and not any(_holds(item, mark) for mark in item.iter_markers("promise")):
            item.add_marker(check)


def _holds(item: pytest.Item, mark: pytest.Mark) -> bool:
    only, case = mark.args[1:], getattr(item, "callspec", None)
    return not only or (case is not None and case.id in only)
