"""One training of a Trainer over an engine: its loop's body, what follows each committed step, and the state it keeps.

The body runs on the workers that hold lanes, once for each micro-batch. What follows a step (callbacks, logging,
evaluation, saving) runs on every worker, with the same numbers, so that each of them can become rank 0; rank 0 alone
shows and writes. Made by trainer.py.

`KeptState` is saved with every elastic checkpoint and given to joiners: the Trainer's log, its best metric, what its
callbacks have counted, and sums of losses since the last log, as JSON, the form that the Trainer itself writes. How
long it trains and how often it logs or saves is up to its arguments, also where they were others at the save.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from shoal_protos.errors import UserError
from shoal_protos.training_log import get_logger
from transformers.trainer_callback import ExportableState, ProgressCallback, TrainerControl
from transformers.trainer_utils import IntervalStrategy, compare_trainer_and_checkpoint_args
from transformers.utils import logging

from shoal.exchange.ballot import HALT
from shoal.integrations.transformers.engine_config import check_callbacks
from shoal.integrations.transformers.shared_evaluation import SharedEvaluations
from shoal.integrations.transformers.step_reader import StepReader
from shoal.training.engine import Engine

log = get_logger("shoal")


class ElasticRun:
    """`engine` trains what `trainer` describes."""

    def __init__(self, trainer: Any, engine: Engine, reader: StepReader, ignored_keys: list[str] | None) -> None:
        self._trainer, self.engine, self.reader, self._ignored_keys = trainer, engine, reader, ignored_keys
        self.kept, self.evaluations = KeptState(trainer, self._rate), SharedEvaluations(trainer, engine)
        self._begun = False
        self._lane_step = -1
        """The step whose first micro-batch this worker has begun."""

    def prepare(self, announced: Mapping[str, int]) -> None:
        """Before the loop. `announced`: what the log says of it when it begins."""
        trainer, self._announced = self._trainer, announced
        trainer._tr_loss = torch.tensor(0.0, dtype=torch.float64)
        trainer._total_loss_scalar, trainer._globalstep_last_logged, trainer.current_flos = 0.0, 0, 0.0
        trainer._initial_num_input_tokens_seen = trainer._initial_global_step = 0
        self.engine.register_state(NAME, self.kept)
        self.engine.parts.boundary.add_keeper(self.on_commit)

    def train(self) -> None:
        """The loop, to the job's end. What is saved at the end has the weights of the last step."""
        trainer, engine = self._trainer, self.engine
        for inputs in engine:
            if engine.parts.requests.asks(HALT) and not engine.warming_up:
                engine.skip()  # the vote of this step commits nothing
                continue
            facts = self.reader.facts(max(0, engine.context.state.step))
            if not engine.warming_up:
                self._begin_step()
            trainer.current_gradient_accumulation_steps = facts.batches
            trainer.training_step(engine.module, inputs, facts.items)
            if not engine.step() and not engine.warming_up:
                trainer.control = trainer.callback_handler.on_substep_end(trainer.args, trainer.state, trainer.control)
        self._begin()

    def backward(self, loss: torch.Tensor, **_: Any) -> None:
        """In place of the accelerator's. `loss`: this micro-batch's part of the step's loss, which is their sum; the
        engine's is the mean over them.
        """
        self.engine.backward(loss * self.reader.order.micro_batches)

    # ---- around steps

    def _begin_step(self) -> None:
        """Before the first micro-batch of a step here."""
        trainer, step = self._trainer, self.engine.global_step
        self._begin()
        if self._lane_step != step:
            self._lane_step = step
            trainer.control = trainer.callback_handler.on_step_begin(trainer.args, trainer.state, trainer.control)

    def _begin(self) -> None:
        """Once this worker is in the job, which may be at any step."""
        trainer = self._trainer
        self.look_who_is_first()
        if self._begun:
            return
        self._begun = True
        if self.engine.rank == 0:
            self._announce()
        handler, args = trainer.callback_handler, trainer.args
        trainer.control = handler.on_train_begin(args, trainer.state, trainer.control)
        if args.eval_on_start and trainer.state.global_step == 0:
            trainer._evaluate(None, self._ignored_keys, skip_scheduler=True)
        trainer.control = handler.on_epoch_begin(args, trainer.state, trainer.control)

    def _announce(self) -> None:
        """As the library does."""
        library, state = logging.get_logger("transformers.trainer"), self._trainer.state
        library.info("***** Running training *****")
        for name, number in self._announced.items():
            library.info(f"  {name} = {number:,}")
        if state.global_step:
            library.info(f"  Resuming training from checkpoint with epoch {int(state.epoch or 0)} and global step "
                         f"{state.global_step}")  # fmt: skip

    def look_who_is_first(self) -> None:
        """Rank 0 is whoever is it now: the callbacks ask the state."""
        trainer, is_first = self._trainer, self.engine.rank == 0
        was = trainer.state.is_world_process_zero
        trainer.state.is_world_process_zero = trainer.state.is_local_process_zero = is_first
        if is_first and not was and self._begun:
            for callback in trainer.callback_handler.callbacks:
                if isinstance(callback, ProgressCallback) and callback.training_bar is None:
                    callback.on_train_begin(trainer.args, trainer.state, trainer.control)

    def on_commit(self) -> None:
        """After a step's commit, on every worker alike; a change of the world may call it again for the same step."""
        trainer, state = self._trainer, self.engine.context.state
        if trainer.state.global_step >= state.step:
            return
        self._begin()
        with self.evaluations.boundary(self._evaluates_at(state.step)):
            self._follow_commit()

    def _evaluates_at(self, step: int) -> bool:
        """Whether all workers may evaluate then, as far as their arguments say."""
        trainer = self._trainer
        match trainer.args.eval_strategy:
            case IntervalStrategy.STEPS:
                return step % trainer.state.eval_steps == 0 or self.engine.context.is_over
            case IntervalStrategy.EPOCH:
                return step % self._steps_per_epoch == 0 or self.engine.context.is_over
        return False

    def _follow_commit(self) -> None:
        trainer, state = self._trainer, self.engine.context.state
        handler, args, record = trainer.callback_handler, trainer.args, state.record
        facts = self.reader.facts(state.step - 1)
        trainer.current_flos += facts.operations
        trainer.state.num_input_tokens_seen += facts.tokens
        self._add_loss(self.engine.loss)
        check_callbacks(handler.callbacks)  # one may have come meanwhile
        trainer.control = handler.on_optimizer_step(args, trainer.state, trainer.control)
        trainer.state.global_step = state.step
        epoch, in_epoch = divmod(state.step, self._steps_per_epoch)
        trainer.state.epoch = epoch + self._part_of_epoch(in_epoch)
        trainer.control = handler.on_step_end(args, trainer.state, trainer.control)
        norm = record.norm if record is not None else None
        self._log_save_evaluate(norm)
        if in_epoch == 0 or trainer.control.should_training_stop or self.engine.context.is_over:
            trainer.control = handler.on_epoch_end(args, trainer.state, trainer.control)
            self._log_save_evaluate(norm)
        self.kept.next_rate = self._rate()
        self._heed_control()
        trainer.control._new_step()  # here, since only who has lanes begins a step
        if in_epoch == 0 and not (trainer.control.should_training_stop or self.engine.context.is_over):
            trainer.control = handler.on_epoch_begin(args, trainer.state, trainer.control)

    @property
    def _steps_per_epoch(self) -> int:
        return self.engine.context.loop.steps_per_epoch

    def _part_of_epoch(self, in_epoch: int) -> float:
        """As the Trainer counts: by batches."""
        order = self.reader.order
        return float(in_epoch * order.micro_batches / max(1, order.batches_per_epoch))

    def _add_loss(self, loss: float) -> None:
        trainer = self._trainer
        if trainer.args.logging_nan_inf_filter and not torch.isfinite(torch.tensor(loss)):
            since = 1 + trainer.state.global_step - trainer._globalstep_last_logged
            loss = float(trainer._tr_loss) / since
        trainer._tr_loss += loss

    def _log_save_evaluate(self, norm: float | None) -> None:
        trainer = self._trainer
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss, norm, self.engine.module, None, trainer.state.epoch, self._ignored_keys,
            self.kept.start_time, learning_rate=self.kept.next_rate,
        )  # fmt: skip

    def _heed_control(self) -> None:
        """What callbacks have asked for. Raises `UserError` for what no job can do."""
        control = self._trainer.control
        if control.should_epoch_stop:
            raise UserError(
                "a callback set control.should_epoch_stop, which cannot be honoured: which samples a step reads is "
                "fixed. End the job by control.should_training_stop."
            )
        if control.should_training_stop and not self.engine.context.is_over:
            self.engine.training.ask(HALT, "control.should_training_stop")

    def _rate(self) -> float:
        return float(self.engine.context.state.optimizer.param_groups[0]["lr"])


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


class KeptState:
    """An object with `state_dict` and `load_state_dict`, over a Trainer's attributes."""

    def __init__(self, trainer: Any, rate: Callable[[], float]) -> None:
        self._trainer, self._rate = trainer, rate
        self._given = given_to_callbacks(trainer)
        self.next_rate = rate()
        """The learning rate of the step at hand."""
        self.saved: list[int] = []
        """Steps whose model was saved."""
        self.start_time = time.time()
        """From which figures per second count: what was trained before this worker was there took its time, too."""

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
            "seconds": time.time() - self.start_time,
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
        self.start_time = time.time() - kept.get("seconds", 0.0)
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
