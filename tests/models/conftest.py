"""Models of Hugging Face import torchvision where they find it, and fail where it was built for another torch."""

from __future__ import annotations

import contextlib
import sys

try:
    with contextlib.suppress(ModuleNotFoundError):
        import torchvision  # noqa: F401
except (ImportError, RuntimeError):
    sys.modules["torchvision"] = None  # type: ignore[assignment]  # so it is not found
