"""What the script does with each committed step, on every member (`engine.on_commit`).

A member without lanes runs no body, so what a body counts or averages would lag behind on it. These functions are
called wherever a step is committed, once in a process for each, in order, before anything of the step is saved or given
to a joiner. Which step they were called for last is part of the training state (`TrainingState.followed`): it travels
with the registered states, and says what they are as of. Called by boundary.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from shoal_protos.errors import UserError

from shoal.data.seeds import RandomState, seed_everything
from shoal.training.context import TrainingContext
from shoal.training.evaluation import Evaluation


class CommitCalls:
    """The script's functions, in the order in which it has given them."""

    def __init__(self, context: TrainingContext, evaluation: Evaluation) -> None:
        self._context, self._evaluation = context, evaluation
        self._functions: list[Any] = []
        self._calls: list[Callable[[], object]] = []
        self._failed = False
        """One of them has raised an error."""
        self.all_here: Callable[[], AbstractContextManager[None]] = nullcontext
        """A context in which all parameters are here. Raises `WorldChanged`."""

    def add(self, function: Any, call: Callable[[], object]) -> None:
        """`call` calls it. Raises `UserError` for what is no function, comes too late or is there."""
        if not callable(function) or isinstance(function, type):
            raise UserError(f"engine.on_commit got {function!r}; expected a function that takes the engine.")
        if self._context.loop_has_begun:
            raise UserError("engine.on_commit was called in the loop, some steps too late; call it before.")
        if function in self._functions:
            raise UserError(
                f"engine.on_commit got {function!r} twice, which would count each step twice; give each function once."
            )
        self._functions.append(function)
        self._calls.append(call)

    def call(self) -> None:
        """A step is committed, here or in the world before. Raises `WorldChanged` before any function is called."""
        state = self._context.state
        if self._calls and state.followed < state.step:
            if self._failed:
                raise UserError(
                    f"a function of engine.on_commit has raised an error at step {state.followed + 1}, and the script "
                    "went on; what it keeps lacks that step. Let such an error end the script."
                )
            with self.all_here(), self._evaluation.anywhere(), self._apart():
                self._call_all()
        state.followed = state.step

    def _call_all(self) -> None:
        world = self._context.world
        if world is not None:
            world.group.progress.begin_boundary(self._context.boundaries)
        self._failed = True
        for call in self._calls:
            call()
        self._failed = False

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """A boundary that was owed may be settled within a forward: what is computed and drawn is the same there."""
        context, random = self._context, RandomState.save()
        seed_everything(context.config.seed, context.state.step, 0, 0, purpose="commit")
        try:
            with torch.no_grad(), torch.autocast(context.state.device.kind.type, enabled=False):
                yield
        finally:
            random.restore()
