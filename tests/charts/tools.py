"""Scripts of docs/generate as modules, for the tests in this folder: they are no package."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from charts.rendering import ROOT


def generator(name: str) -> ModuleType:
    """The script docs/generate/NAME.py."""
    found = importlib.util.spec_from_file_location(name, ROOT / "docs" / "generate" / f"{name}.py")
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module
