"""From `shoal.initialize` on the engine calls optimizer and scheduler: what a script must not do with them any more.

Both objects stay the place where hyper-parameters are read and set. What would change parameters beside the blocks,
move the schedule once per lane, or read and write state that lies in the blocks of all workers, is one sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from shoal_protos.errors import UserError
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

STEP = "the engine calls the optimizer; remove optimizer.step() from the loop and call engine.step()."
ADD_GROUP = (
    "optimizer.add_param_group was called after shoal.initialize; give the optimizer all its parameters before, "
    "the layout is fixed from then on."
)
HOOK_ADVICE = (
    "it would never be called, because the engine steps blocks of the optimizer. Put its work in the loop after "
    "engine.step(), or in a callback (engine.on_step)."
)
HOOK = f"a step hook was registered on the optimizer after shoal.initialize; {HOOK_ADVICE}"
STATE_DICT = (
    "the optimizer's state lies in blocks on all workers, not in this object. Save with engine.save_checkpoint() and "
    "`shoal.checkpoint.path`; any number of workers can resume from that."
)
LOAD_STATE_DICT = (
    "optimizer.load_state_dict was called in the loop, where the optimizer's state lies in blocks on all workers. "
    "Call it before shoal.initialize, or resume by `shoal.checkpoint.resume`."
)
SCHEDULE = (
    "the engine calls the scheduler once per optimizer step; remove scheduler.step() from the loop, where it would run "
    "once per micro-batch."
)


def take_over(optimizer: Optimizer, scheduler: LRScheduler | None, in_loop: Callable[[], bool]) -> None:
    """Called once by `shoal.initialize`. `in_loop`: whether state lies in blocks already."""
    step = _refusing(STEP)
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
    optimizer._opt_called = True  # type: ignore[attr-defined]
    optimizer.add_param_group = _refusing(ADD_GROUP)  # type: ignore[method-assign]
    optimizer.register_step_pre_hook = _refusing(HOOK)  # type: ignore[method-assign]
    optimizer.register_step_post_hook = _refusing(HOOK)  # type: ignore[method-assign]
    optimizer.state_dict = _refusing(STATE_DICT)  # type: ignore[method-assign]
    load = optimizer.load_state_dict

    def load_state_dict(*args: Any, **kwargs: Any) -> None:
        if in_loop():
            raise UserError(LOAD_STATE_DICT)
        load(*args, **kwargs)

    optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]
    if scheduler is not None and not isinstance(scheduler, _Taken):
        kind = type(scheduler)
        # not on the object: a scheduler's attributes are its state_dict
        scheduler.__class__ = type(kind.__name__, (_Taken, kind), {"__module__": kind.__module__})


def _refusing(sentence: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise UserError(sentence)

    return refuse


class _Taken:
    """Stands before a scheduler's own class."""

    def step(self, *_: object, **__: object) -> NoReturn:
        raise UserError(SCHEDULE)


def advance(scheduler: LRScheduler, loss: float | None) -> None:
    """One step of the schedule, by the engine. `loss`: of the step, for schedulers that look at it."""
    own: Any = super(_Taken, scheduler) if isinstance(scheduler, _Taken) else scheduler
    if isinstance(scheduler, ReduceLROnPlateau):
        own.step(loss if loss is not None else 0.0)
    else:
        own.step()
