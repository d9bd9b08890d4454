"""Shoal: elastic training for PyTorch. The world changes, the bits do not.

    engine = shoal.initialize(model=model, config="shoal.json", dataset=dataset)
    for batch in engine:
        loss = engine.module(**batch)
        engine.backward(loss)
        engine.step()

The engine and its methods: `help(shoal.Engine)`, and docs/api.md. Importing this package loads no torch: the names
below are loaded when first used. A worker's script loads it anyway, and here before it makes an optimizer.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from shoal_protos.channel import GRPC_VARIABLES
from shoal_protos.errors import JobFailed, PeerError, ShoalError, UserError

if TYPE_CHECKING:
    from shoal.cells.marks import common, sharded, tied
    from shoal.first_values.building import deferred
    from shoal.session.cell_opening import cell
    from shoal.training.engine import Engine
    from shoal.training.start import initialize

for _name, _value in GRPC_VARIABLES.items():  # before gRPC, whichever module of Shoal is imported first
    os.environ.setdefault(_name, _value)


@contextmanager
def _loading() -> Iterator[None]:
    """A context in which modules are loaded: nothing of them is garbage, and to look for it takes a joiner 0.25 s."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


if "torch" in sys.modules or ("SHOAL_CONTROLLER" in os.environ and find_spec("torch") is not None):
    with _loading():
        from shoal.process.compiler import leave_unloaded

        leave_unloaded()
        if "SHOAL_CONTROLLER" in os.environ:
            gc.freeze()  # to look through all of torch once more would take 0.3 s as it ends, beside others that train

_MODULES = ("callbacks", "client", "deepspeed", "integrations")
"""Modules that scripts import by name; all others are between the parts of the package."""

__all__ = [
    "Engine", "JobFailed", "PeerError", "ShoalError", "UserError",
    "cell", "common", "deferred", "initialize", "sharded", "tied",
]  # fmt: skip
_LOADED = {
    "Engine": "shoal.training.engine",
    "cell": "shoal.session.cell_opening",
    "common": "shoal.cells.marks",
    "deferred": "shoal.first_values.building",
    "initialize": "shoal.training.start",
    "sharded": "shoal.cells.marks",
    "tied": "shoal.cells.marks",
}
"""Names that are loaded when first used, and where from."""


def __dir__() -> list[str]:
    special = [name for name in globals() if name.startswith("__")]
    return sorted({*special, *__all__, *(name for name in _MODULES if name in globals())})


def __getattr__(name: str) -> Any:
    if name not in _LOADED:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    try:
        with _loading():
            found = getattr(import_module(_LOADED[name]), name)
        if name == "initialize":
            from shoal.process.compiler import leave_unloaded

            leave_unloaded()
        return found
    except ModuleNotFoundError as error:
        if error.name in ("torch", "numpy", "safetensors", "fsspec"):
            raise ModuleNotFoundError(
                f'{error.name} is not installed: install "shoal[worker]"', name=error.name
            ) from None
        raise
