"""How `verify`, `export` and `import` run: they become `python -m shoal.checkpoint`, which lives with torch.

The controller's side never imports torch; its command only hands over.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import NoReturn


def become(*arguments: str) -> NoReturn:
    """Hand this process over. Raises `ModuleNotFoundError` where the worker's side is not installed."""
    for module in ("torch", "safetensors", "fsspec"):
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
    os.execv(sys.executable, [sys.executable, "-m", "shoal.checkpoint", *arguments])
