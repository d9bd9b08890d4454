"""What DeepSpeed's optimizer says of the loss scale, said by the engine's. Called once, when an engine is made.

The object stays the script's own; its class gets the names, as far as it has none of them itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.training.state import TrainingState


def say_scale(state: TrainingState) -> None:
    """`cur_scale`, `loss_scale`: by what losses are multiplied; `overflow`: whether the last step overflowed."""
    says: dict[str, Callable[[Any], object]] = {
        "cur_scale": lambda _: state.scale,
        "loss_scale": lambda _: state.scale,
        "overflow": lambda _: state.record is not None and bool(state.record.overflow),
    }
    optimizer = state.optimizer
    kind, new = type(optimizer), {name: property(of) for name, of in says.items() if not hasattr(optimizer, name)}
    optimizer.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **new})
