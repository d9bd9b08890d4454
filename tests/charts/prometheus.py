"""Prometheus and promtool of Debian's package, which `make packages` unpacks into this Python's environment."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "prometheus" / "usr" / "bin"
MISSING = "needs promtool of Debian's package prometheus, which `make packages` unpacks as root"


def program(name: str) -> str | None:
    """Where the program is; None where it is missing."""
    unpacked = FOLDER / name
    return str(unpacked) if unpacked.exists() else shutil.which(name)
