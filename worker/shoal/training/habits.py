"""Support for habits of other libraries: `len(engine)`, `tqdm(engine)`, `engine(inputs)`, and names that are missing.

A base class of `Engine`. The error for a missing name says what takes its place.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from shoal.training.context import TrainingContext

MEANT: Mapping[str, str] = {
    "train": "engine.module.train() sets the mode; it is as the script leaves it, evaluations put it back",
    "eval": "evaluate within `with engine.evaluating():`",
    "zero_grad": "engine.step() begins each step with gradients of zero; leave the line out",
    "save": 'engine.export("model.safetensors") writes the model, engine.save_checkpoint() what a job goes on from',
    "save_pretrained": "engine.export(path) writes the weights, and the model's own save_pretrained all else",
    "load_checkpoint": "a job resumes by itself; `shoal.checkpoint.resume` names another checkpoint",
    "load_state_dict": "a job resumes by itself; load first weights into the model before shoal.initialize",
    "optimizer": "the optimizer is the one that was given; one that the config names has no other name here",
    "lr_scheduler": "the scheduler is the one that was given; engine.step() steps it",
    "scheduler": "the scheduler is the one that was given; engine.step() steps it",
    "clip_grad_norm_": "set `gradient_clipping` in the config",
    "no_sync": "set `shoal.micro_batches_per_lane`: a lane adds up its micro-batches before anything is exchanged",
    "accumulate": "set `shoal.micro_batches_per_lane`: a lane adds up its micro-batches before anything is exchanged",
    "prepare": "shoal.initialize has done it",
    "to": "the model is on the device on which it was given",
    "local_rank": "a process has one device, engine.device",
    "log": "engine.report(name=value), or a callback by engine.on_step",
}
"""Names of other libraries, and their replacements."""


class Habits:
    """Length, call and missing names of an engine."""

    NAMES: ClassVar[frozenset[str]]
    """Public names of the engine."""
    context: TrainingContext
    module: nn.Module

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        """Return the number of batches that the loop still yields here: for the remaining steps, of the lanes held now,
        or of all lanes outside a world. Raises `TypeError` if the job has no last step.
        """
        context, last = self.context, self.context.state.last_step
        if last <= 0:
            raise TypeError("len(engine) is not known: the job has no last step")
        lanes = len(context.lanes) if context.world is not None else context.config.lanes
        return max(0, last - context.global_step) * lanes * context.config.micro_batches_per_lane

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the model's forward."""
        return self.module(*inputs, **named)

    def __getattr__(self, name: str) -> NoReturn:
        """Raise an `AttributeError` that names the replacement of a missing name."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"an engine has no `{name}`: {_meant(name, self.NAMES, vars(self).get('module'))}")


def _meant(name: str, names: frozenset[str], module: nn.Module | None) -> str:
    if name in MEANT:
        return MEANT[name]
    if module is not None and hasattr(module, name):
        return f"the model has it, engine.module.{name}"
    near = difflib.get_close_matches(name, sorted(names), 1)
    return f"did you mean engine.{near[0]}?" if near else f"it has {', '.join(sorted(names))}"
