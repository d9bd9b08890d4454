"""What a Trainer remembers of its job: saved with every elastic checkpoint, and given to workers that join.

Its log, its best metric, what its callbacks have counted, and sums of losses since the last log. It is kept as JSON,
the form that the Trainer itself writes.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState

NAME = "transformers"
"""Under which it is registered."""
OWN = ("is_local_process_zero", "is_world_process_zero")
"""Fields that every worker has for itself."""


class KeptState:
    """An object with `state_dict` and `load_state_dict`, over a Trainer's attributes."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.next_rate = 0.0
        """The learning rate of the step at hand."""
        self.saved: list[int] = []
        """Steps whose model was saved."""

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        state = {name: value for name, value in dataclasses.asdict(trainer.state).items() if name not in OWN}
        state["stateful_callbacks"] = exported(trainer)
        return {
            "state": json.dumps(state),
            "loss_since_log": float(trainer._tr_loss),
            "loss_before": float(trainer._total_loss_scalar),
            "last_logged": int(trainer._globalstep_last_logged),
            "operations": float(trainer.current_flos),
            "next_rate": float(self.next_rate),
            "saved": list(self.saved),
        }

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        trainer = self._trainer
        own = {name: getattr(trainer.state, name) for name in OWN}
        trainer.state = TrainerState(**{**json.loads(kept["state"]), **own})
        trainer._tr_loss = torch.tensor(kept["loss_since_log"], dtype=torch.float64)
        trainer._total_loss_scalar = kept["loss_before"]
        trainer._globalstep_last_logged = kept["last_logged"]
        trainer.current_flos = kept["operations"]
        self.next_rate, self.saved = kept["next_rate"], list(kept["saved"])
        take_over(trainer)


def exported(trainer: Any) -> dict[str, Any]:
    """States of the callbacks that have one, by class: a list where there are several of a class."""
    found: dict[str, Any] = {}
    for callback in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(callback, ExportableState):
            found.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: states[0] if len(states) == 1 else states for name, states in found.items()}


def take_over(trainer: Any) -> None:
    """Puts the callbacks into the states that `trainer.state` has of them. They stay the same objects."""
    states = {
        name: list(kept) if isinstance(kept, list) else [kept]
        for name, kept in trainer.state.stateful_callbacks.items()
    }
    for callback in trainer.callback_handler.callbacks:
        waiting = states.get(type(callback).__name__)
        if isinstance(callback, ExportableState) and waiting:
            state = waiting.pop(0)
            for name, value in {**state.get("args", {}), **state.get("attributes", {})}.items():
                setattr(callback, name, value)
    control = states.get("TrainerControl")
    if control:
        trainer.control = TrainerControl.from_state(control[0])
