"""Paths as a configuration writes them: `$HOME/runs` means what a shell would make of it.

Used by load.py, which reads them at the edge; nothing behind it looks at the environment.
"""

from __future__ import annotations

import os
import re

VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))", re.ASCII)


def expanded(path: str) -> str:
    """Return the path with the values of the environment's variables."""
    return os.path.expandvars(path)


def unset_variable(path: object) -> str:
    """Return the name of the first variable in a path that the environment lacks; empty where it lacks none."""
    found = VARIABLE.finditer(path) if isinstance(path, str) else ()
    names = (match[1] or match[2] for match in found)
    return next((name for name in names if name not in os.environ), "")
