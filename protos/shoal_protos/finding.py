"""What `shoal doctor` finds, and how the process that looks hands it on: a line of JSON for each check.

Looking may hang (a mount that is gone) or end the process (a broken library), so checks run in processes of their own,
`python -m shoal_controller.doctor` and `python -m shoal.doctor`; the command reads their lines with a deadline. For
both sides.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """What a finding means."""

    OK = "ok"
    WARNING = "warning"
    """It works, but something that it is good for may not."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `shoal doctor`."""

    check: str
    verdict: Verdict
    found: str
    expected: str = ""
    todo: str = ""
    """What to do about it; empty where nothing is to be done."""


Given = Mapping[str, Any]
"""What the command was given, as JSON: paths, addresses."""

Check = Callable[[Given], Finding]


def as_line(finding: Finding) -> str:
    return json.dumps(asdict(finding))


def from_line(line: str) -> Finding:
    """The inverse of `as_line`. Raises `ValueError`, `TypeError` or `KeyError` for another line."""
    found = json.loads(line)
    return Finding(**{**found, "verdict": Verdict(found["verdict"])})


def main_of(checks: Mapping[str, Check], arguments: Sequence[str]) -> int:
    """What a process that looks does: `CHECK,CHECK GIVEN`."""
    names, given = arguments
    for finding in _found(checks, names.split(","), json.loads(given)):
        sys.stdout.write(as_line(finding) + "\n")
        sys.stdout.flush()
    return 0


def _found(checks: Mapping[str, Check], names: Sequence[str], given: Given) -> Iterator[Finding]:
    for name in names:
        try:
            yield checks[name](given)
        except Exception as error:  # whatever a foreign library raises is what was found
            yield Finding(name, Verdict.FAILED, f"{type(error).__name__}: {error}", "a check that ends")
