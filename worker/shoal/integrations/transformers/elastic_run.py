"""One training of a Trainer over an engine: its loop's body, and what it does after each committed step.

The body runs on the workers that hold lanes, once for each micro-batch. What follows a step (callbacks, logging,
evaluation, saving) runs on every worker, with the same numbers, so that each of them can become rank 0; what is shown
and written is rank 0's. Made by trainer.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from shoal_protos.errors import UserError
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import IntervalStrategy
from transformers.utils import logging

from shoal.exchange.ballot import HALT
from shoal.integrations.transformers.honourable import check_callbacks
from shoal.integrations.transformers.kept_state import NAME, KeptState
from shoal.integrations.transformers.shared_evaluation import SharedEvaluations
from shoal.integrations.transformers.step_reader import StepReader
from shoal.training.engine import Engine


class ElasticRun:
    """`engine` trains what `trainer` describes."""

    def __init__(self, trainer: Any, engine: Engine, reader: StepReader, ignored_keys: list[str] | None) -> None:
        self._trainer, self.engine, self.reader, self._ignored_keys = trainer, engine, reader, ignored_keys
        self.kept, self.evaluations = KeptState(trainer, self._rate), SharedEvaluations(trainer, engine)
        self.start_time = time.time()
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
            self.start_time, learning_rate=self.kept.next_rate,
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
