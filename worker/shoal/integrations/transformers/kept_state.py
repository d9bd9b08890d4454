"""What a Trainer remembers of its job: saved with every elastic checkpoint, and given to workers that join.

Its log, its best metric, what its callbacks have counted, and sums of losses since the last log. It is kept as JSON,
the form that the Trainer itself writes. How long and how often its own arguments say,
also where they said otherwise when it was saved.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers.trainer_callback import ExportableState, TrainerControl
from transformers.trainer_utils import compare_trainer_and_checkpoint_args
from transformers.utils import logging

from shoal.logs import get_logger

NAME = "transformers"
"""Under which it is registered."""
OF_THE_RUN = (
    "epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history", "best_metric", "best_global_step",
    "best_model_checkpoint", "stateful_callbacks",
)  # fmt: skip
"""Fields of the Trainer's state that say what has been trained: they are taken over."""
OF_THE_ARGUMENTS = (
    "max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "train_batch_size",
    "is_hyper_param_search", "trial_name", "trial_params",
)  # fmt: skip
"""Those that the library makes of the arguments: each process has those of its own."""
TOLD_BY_THE_LIBRARY = ("logging_steps", "eval_steps", "save_steps", "train_batch_size")
OF_THE_WORKER = ("is_local_process_zero", "is_world_process_zero")

log = get_logger("shoal")


class KeptState:
    """An object with `state_dict` and `load_state_dict`, over a Trainer's attributes."""

    def __init__(self, trainer: Any, rate: Callable[[], float]) -> None:
        self._trainer, self._rate = trainer, rate
        self._given = given_to_callbacks(trainer)
        self.next_rate = rate()
        """The learning rate of the step at hand."""
        self.saved: list[int] = []
        """Steps whose model was saved."""

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        state = {name: value for name, value in dataclasses.asdict(trainer.state).items() if name not in OF_THE_WORKER}
        state["stateful_callbacks"] = exported(trainer)
        return {
            "state": json.dumps(state),
            "given": json.dumps(self._given),
            "loss_since_log": float(trainer._tr_loss),
            "loss_before": float(trainer._total_loss_scalar),
            "last_logged": int(trainer._globalstep_last_logged),
            "operations": float(trainer.current_flos),
            "saved": list(self.saved),
        }

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        trainer, state = self._trainer, json.loads(kept["state"])
        for name in OF_THE_RUN:
            setattr(trainer.state, name, state[name])
        _tell_of_other_arguments(trainer.state, state)
        _forget_a_best_model_that_is_gone(trainer.state)
        trainer._tr_loss = torch.tensor(kept["loss_since_log"], dtype=torch.float64)
        trainer._total_loss_scalar = kept["loss_before"]
        trainer._globalstep_last_logged = kept["last_logged"]
        trainer.current_flos = kept["operations"]
        self.next_rate, self.saved = self._rate(), list(kept["saved"])
        take_over(trainer, self._given, json.loads(kept.get("given", "{}")))


def _tell_of_other_arguments(own: Any, saved: Mapping[str, Any]) -> None:
    """Only those of a job that is resumed can be others. Some of them the library has a warning for."""
    now = {name: getattr(own, name) for name in OF_THE_ARGUMENTS}
    compare_trainer_and_checkpoint_args(
        SimpleNamespace(**now, per_device_train_batch_size=own.train_batch_size, n_gpu=1),
        SimpleNamespace(**{**now, **saved}),
    )
    differs = {
        name: f"{saved[name]} then, {value} now"
        for name, value in now.items()
        if name not in TOLD_BY_THE_LIBRARY and saved.get(name, value) != value
    }
    if differs:
        log.warning("resumed_with_other_arguments", **differs, means="the job goes on with those that it has now")


def _forget_a_best_model_that_is_gone(state: Any) -> None:
    best = state.best_model_checkpoint
    if best is not None and not Path(best).is_dir():
        log.warning("best_model_is_gone", folder=best, means="only a better one can be loaded in the end")
        state.best_model_checkpoint = None


def exported(trainer: Any) -> dict[str, Any]:
    """States of the callbacks that have one, by class: a list where there are several of a class."""
    found: dict[str, Any] = {}
    for callback in _exportable(trainer):
        found.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: states[0] if len(states) == 1 else states for name, states in found.items()}


def given_to_callbacks(trainer: Any) -> dict[str, list[Any]]:
    """The arguments that the callbacks were made with, by class, in the form in which it is kept."""
    found: dict[str, list[Any]] = {}
    for callback in _exportable(trainer):
        if not isinstance(callback, TrainerControl):
            found.setdefault(type(callback).__name__, []).append(callback.state().get("args", {}))
    kept: dict[str, list[Any]] = json.loads(json.dumps(found))
    return kept


def _exportable(trainer: Any) -> Iterator[Any]:
    for callback in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(callback, ExportableState):
            yield callback


def take_over(trainer: Any, given: Mapping[str, list[Any]], given_then: Mapping[str, list[Any]]) -> None:
    """Puts the callbacks into the states that `trainer.state` has of them. They stay the same objects.

    `given`, `given_then`: their arguments here, and where the state comes from. Arguments that the script gives
    otherwise than then hold, unless it asks for the saved ones by `restore_callback_states_from_checkpoint`.
    """
    states = {
        name: list(kept) if isinstance(kept, list) else [kept]
        for name, kept in trainer.state.stateful_callbacks.items()
    }
    control = states.pop("TrainerControl", None)
    for callback in trainer.callback_handler.callbacks:
        name = type(callback).__name__
        if not isinstance(callback, ExportableState) or not states.get(name):
            continue
        state = states[name].pop(0)
        alike = given.get(name) == given_then.get(name)
        args = state.get("args", {}) if alike or trainer.args.restore_callback_states_from_checkpoint else {}
        for attribute, value in {**args, **state.get("attributes", {})}.items():
            setattr(callback, attribute, value)
    if missing := [name for name, left in states.items() if left]:
        logging.get_logger("transformers.trainer").warning(
            f"Checkpoint included callbacks not included in current configuration. Ignoring. ({', '.join(missing)})"
        )
    if control:
        trainer.control = TrainerControl.from_state(control[0])
