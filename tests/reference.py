"""What a job must end with, however it is disturbed: trained once in a process for all tests that ask for the same.

Not for a test that alters what the training depends on, nor for a task that is to leave something behind: crew.py's
`undisturbed` trains whenever it is called.
"""

from __future__ import annotations

import json

from crew import Task, undisturbed

_references: dict[tuple[object, ...], str] = {}


def reference(task: Task) -> str:
    """The fingerprint of a world of one. Tasks are the same if their options are equal and their functions the same."""
    parts = vars(task)
    key = (json.dumps(parts["options"], sort_keys=True), *(parts[name] for name in parts if name != "options"))
    if key not in _references:
        _references[key] = undisturbed(task)
    return _references[key]
