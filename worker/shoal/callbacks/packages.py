"""Whether the package of a tracker can be imported on this worker.

Called on every worker before training starts, because each of them may become rank 0 and write the numbers.
"""

from __future__ import annotations

from importlib import import_module

THROUGH = {"tensorboard": "torch.utils.tensorboard"}
"""Modules of torch through which packages are used."""


def why_unusable(package: str) -> str:
    """Return the end of a sentence about the package; empty if it can be imported."""
    try:
        import_module(package)
        import_module(THROUGH.get(package, package))
    except Exception as error:  # a package may raise anything at import
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            return f"is not installed: pip install {package}"
        return f"cannot be imported ({type(error).__name__}: {error}): mend it"
    return ""
