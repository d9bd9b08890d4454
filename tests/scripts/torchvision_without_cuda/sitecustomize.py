"""Lets torchvision be imported beside a PyTorch without CUDA, where its operators were built for one with CUDA.

The package index has only that build of torchvision. Its library of operators then cannot be loaded, and the import
ends at those that it describes. Models and transforms need none of them, so they are declared, without a kernel: who
calls one gets an error. In PYTHONPATH of scripts that need it (table.py); Python imports it when it starts.
"""

from __future__ import annotations

import ctypes
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

DESCRIBED = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class BeforeTorchvision(MetaPathFinder):
    """Declares the operators when torchvision is about to be imported; finds nothing itself."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            found = PathFinder.find_spec(name)
            if found is not None and found.origin is not None:
                declare_where_it_cannot_be_loaded(Path(found.origin).with_name("_C.so"))
        return None


def declare_where_it_cannot_be_loaded(library: Path) -> None:
    import torch

    try:
        ctypes.CDLL(str(library))
    except OSError:
        for name in DESCRIBED:
            torch.library.define(f"torchvision::{name}", SCHEMA)


sys.meta_path.insert(0, BeforeTorchvision())
