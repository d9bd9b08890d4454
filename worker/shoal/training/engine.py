"""The engine: what a script uses, and nothing else. Each method hands on to the part that does it (parts.py).

`for batch in engine`, `engine.backward(loss)`, `engine.step()`. How the loop is served is in training_loop.py, one
optimizer step in step.py, a change of the world in resize.py. Its base class `Habits` supports habits of other
libraries: `len(engine)`, `tqdm(engine)`, `engine(inputs)`, and names that are missing, whose error says what takes
their place.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn

from shoal.cells.hub import CellHub
from shoal.checkpoint.named import check_cuts
from shoal.config.training import TrainingConfig
from shoal.data.fetch import Fetcher
from shoal.exchange.ballot import AVERAGES_TO, Request
from shoal.exchange.buffer_joins import Join
from shoal.guards.loop_guards import OF_LOSSES, OF_SCHEDULES
from shoal.optim.hyper import set_turn
from shoal.process.faults import Faults
from shoal.session.link import Link
from shoal.state.training_state import TrainingState
from shoal.training.checkpoint_saving import SAVE
from shoal.training.context import TrainingContext
from shoal.training.evaluation import reported_numbers
from shoal.training.gathered_rows import refuse_metric
from shoal.training.lane_loop import LaneLoop
from shoal.training.monitoring import AttachedCallback
from shoal.training.parts import Parts
from shoal.training.pipeline import Evaluated
from shoal.training.requests import FINGERPRINT
from shoal.training.telemetry import StepTimes
from shoal.training.training_loop import ScriptEnd, TrainingLoop

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


PUBLIC = {
    "averaged", "backward", "buffer", "device", "evaluating", "export", "fingerprint", "gather", "gathered", "gathers",
    "generation", "global_step", "lanes", "loss", "loss_fn", "micro_batches", "module", "on_commit", "on_evaluation",
    "on_step", "rank", "register_state", "report", "reports", "run", "save_checkpoint", "shard", "skip", "step", "stop",
    "turn", "warming_up", "world_size",
}  # fmt: skip
"""What scripts may use; all else is between the parts of this package."""


class Engine(Habits):
    """A worker's engine, created by `shoal.initialize`. docs/api.md and `dir(engine)` list its public names."""

    NAMES = frozenset(PUBLIC)

    def __init__(
        self,
        config: TrainingConfig,
        state: TrainingState,
        link: Link,
        fetcher: Fetcher,
        faults: Faults,
        hub: CellHub | None = None,
    ) -> None:
        """`hub`: of this process's cell, where that has several."""
        state.stream_positions = fetcher.positions
        if hub is not None:
            hub.rest()
        calls = OF_SCHEDULES if config.cell.pipeline > 1 else OF_LOSSES
        expert = (0, 1) if hub is None else (hub.index("expert"), hub.shape.expert)
        loop = LaneLoop(config.lanes, config.micro_batches_per_lane, fetcher, calls, expert)
        self.context = context = TrainingContext(config, state, link, loop, faults, hub)
        self.parts = Parts.of(context)
        self.training = TrainingLoop(context, self.parts)
        self.script_end = ScriptEnd(context, self.parts, self.training)
        self.times = StepTimes(config.monitoring.times)
        self.micro_batches = config.micro_batches_per_call
        """Micro-batches of one call of a pipeline's schedule; 1 without a pipeline."""
        self.loss_fn = self.training.pipeline.loss_fn
        """Returns the loss function for a pipeline's schedule, of one that gives a micro-batch's mean loss."""
        self.module: nn.Module = state.module
        self.device = state.device.kind
        faults.abort = context.abort_group
        link.before_building = lambda: faults.at("group", max(0, state.step))

    def __dir__(self) -> list[str]:
        return sorted(PUBLIC)

    # ---- what a script reads

    @property
    def world_size(self) -> int:
        """Number of members of the world, including standbys."""
        return self.context.world.plan.world_size if self.context.world else 1

    @property
    def rank(self) -> int:
        """This worker's number in the world; -1 while it is in none (before the loop), and in a warm-up."""
        return -1 if self.warming_up else self.context.rank

    @property
    def warming_up(self) -> bool:
        """Whether the loop's body runs for a warm-up, whose result is discarded and whose requests are ignored."""
        return self.context.loop.is_warming_up

    @property
    def generation(self) -> int:
        """The number of the world; 0 while the worker is in none."""
        return self.context.generation

    @property
    def global_step(self) -> int:
        """Committed steps of the job; before the loop, those that it resumes from."""
        return self.context.global_step

    @property
    def lanes(self) -> list[int]:
        """Numbers of the lanes that this worker trains."""
        return list(self.context.lanes)

    @property
    def loss(self) -> float:
        """The last step's canonical loss: the mean over all lanes; nan before the first step."""
        return loss if (loss := self.context.loss) is not None else math.nan

    @property
    def reports(self) -> dict[str, float]:
        """The last step's reported numbers, reduced like the loss, and those of evaluations after it, by name.

        Numbers of an evaluation are means over the lanes that arrived.
        """
        return reported_numbers(self.context, self.parts.evaluation)

    @property
    def gathers(self) -> dict[str, Tensor]:
        """The rows of the last evaluation, by name, in the order of the samples; the same on all workers.

        `gathers["sample"]` has the numbers of the samples. Empty before the first evaluation.
        """
        return self.parts.evaluation.rows.all

    # ---- the loop

    def __iter__(self) -> Iterator[Any]:
        return self.times.reading(self.training.batches())

    def backward(self, loss: Tensor, more: bool = False) -> None:
        """Accumulate the gradient of this micro-batch's mean loss.

        `loss`: a scalar tensor of `engine.module`'s graph. `more`: another loss of this micro-batch follows; the
        micro-batch's loss is their sum.
        """
        with self.times.measure("backward"):
            self.training.backward(loss, more)

    def run(self, call: Callable[..., Any], *inputs: Any, **named: Any) -> Evaluated | None:
        """Train a lane by a pipeline's schedule, in place of forward and `backward`; in `evaluating()`, evaluate.

        `call`: the method `step` of a `ScheduleGPipe`, `Schedule1F1B` or `ScheduleInterleaved1F1B` of torch, made with
        `engine.micro_batches`, `loss_fn=engine.loss_fn(function)` and `scale_grads=False`; in an evaluation its method
        `eval`. `inputs`, `named`: what it is called with: the whole batch of the loop, or of `shard`. In a warm-up it
        is called where the process knows what its stages get. Returns None, and of an evaluation `loss`, the mean over
        the batch on all stages, and `output`, of the last one. Raises `UserError` for other schedules.
        """
        pipeline, evaluation = self.training.pipeline, self.parts.evaluation
        if evaluation.active:
            return pipeline.evaluate(call, inputs, named, len(evaluation.samples))
        with self.times.measure("backward"):
            self.training.backward(pipeline.prepared(call, inputs, named))
        return None

    def step(self) -> bool:
        """End a micro-batch; after the last one of this worker's last lane, make the optimizer step.

        Returns whether an optimizer step was committed.
        """
        with self.times.measure("step"):
            return self.training.end_micro_batch()

    def skip(self) -> bool:
        """Give up this micro-batch for good, in place of `backward` and `step`, equally in every world.

        Its gradient is zero; the step's gradient stays the mean over all lanes × micro-batches, `engine.loss` is the
        mean over those not skipped. A step in which all are skipped updates nothing. Returns the same as `step`.
        Raises `UserError` after `backward`.
        """
        return self.training.skip()

    def turn(self, *names: str) -> None:
        """Update only these from this step on: groups of the optimizer (by their key `name`), or optimizers by name.

        The other groups keep parameters and state. Call it at the top of the loop's body, from `engine.global_step`
        alone, as you would set a learning rate.
        """
        set_turn(self.context.state.optimizer, names)
        self.context.has_saved_turn = False

    # ---- what a script asks for

    def report(self, **numbers: float | Tensor) -> None:
        """Report numbers of this micro-batch, reduced like the loss; within `evaluating()`, those of the evaluation."""
        values = {name: _number(name, value) for name, value in numbers.items()}
        if self.parts.evaluation.active:
            self.parts.evaluation.report(values)
        else:
            self.context.loop.numbers.report(values)

    def gather(self, **rows: Tensor) -> None:
        """Collect a row per sample of the micro-batch in an evaluation, such as a score.

        All workers get the rows of all lanes in `engine.gathers` after the next step (at once after the loop). Raises
        `UserError` for other shapes.
        """
        self.parts.evaluation.gather(rows)

    def on_step(self, callback: Callable[[Engine], None]) -> None:
        """Call `callback(engine)` once per committed step, on the current rank 0."""
        if not callable(callback) or isinstance(callback, type):
            raise UserError(f"engine.on_step got {callback!r}; expected a function that takes the engine, or an object "
                            "of a class of shoal.callbacks.")  # fmt: skip
        if isinstance(callback, AttachedCallback):
            callback.attach(self)
        else:
            self.parts.boundary.add_callback(lambda: callback(self))

    def on_evaluation(self, callback: Callable[[Engine], None]) -> None:
        """Call `callback(engine)` on every worker once for each evaluation right after a step or after the loop.

        The call comes when `reports` has the evaluation's numbers: at its end; on members without lanes just before
        the next vote.
        """
        if not callable(callback) or isinstance(callback, type | AttachedCallback):
            raise UserError(f"engine.on_evaluation got {callback!r}; expected a function that takes the engine. An "
                            "object of shoal.callbacks goes to engine.on_step, and hears of them too.")  # fmt: skip
        self.parts.evaluation.measured.add_listener(lambda _: callback(self))

    def on_commit(self, function: Callable[[Engine], object]) -> None:
        """Call `function(engine)` on *every* worker, with lanes or without, once for each step that it commits.

        Calls come in the order of the steps, with all parameters present. Register the function's memory with
        `register_state`. Call `on_commit` before the loop.
        """
        self.parts.boundary.commits.add(function, lambda: function(self))

    def evaluating(self) -> AbstractContextManager[None]:
        """A context for an evaluation over `engine.shard(dataset)`: no gradients, eval mode, all restored at its end.

        Use it between two micro-batches, at the top of the loop's body, and after the loop. Raises `UserError` between
        a forward and `step`.
        """
        return self.training.evaluating()

    def gathered(self, *modules: nn.Module) -> AbstractContextManager[None]:
        """A context in which all parameters of these modules (by default, of the whole model) can be read.

        Sharded parameters (ZeRO stage 3) are gathered for it; leave it before `step`. In the other stages it has no
        effect. Writes to the parameters are lost, or refused.
        """
        self.context.first_weights.check("engine.gathered")
        return self.parts.step.parameters.gathered(modules or (self.module,))

    def averaged(self) -> AbstractContextManager[None]:
        """A context without gradients in which the model's parameters are the averages of weights (`shoal.average`).

        Any worker may enter it by itself, around an evaluation or a teacher's forward; modes, buffers and random state
        are restored at its end. Raises `UserError` if the job keeps no averages.
        """
        return self.training.averages.here()

    def shard(self, dataset: Any) -> Iterator[Any]:
        """Yield the micro-batches of a dataset that belong to this worker's lanes; do not wait for other workers."""
        return self.parts.evaluation.shard(dataset)

    def fingerprint(self) -> str | None:
        """Request a fingerprint: return None in the loop; after the loop, block and return the digest."""
        return self.training.ask(FINGERPRINT, "engine.fingerprint")

    def export(self, path: str | Path, averaged: bool = False) -> None:
        """Write the model as safetensors, on rank 0: in the loop after this step, after the loop at once.

        `averaged`: with the averages of weights in the place of the parameters.
        """
        if not isinstance(path, str | os.PathLike) or "\0" in str(path):
            raise UserError(f"engine.export got {path!r}; expected the path of the file to write.")
        check_cuts(self.context.state.layout, "export the model")
        if averaged:
            self.training.averages.check("engine.export(…, averaged=True)")
        self.training.ask(Request("export", AVERAGES_TO * averaged + str(path)), "engine.export")

    def save_checkpoint(self) -> None:
        """Save a checkpoint to `shoal.checkpoint.path`.

        Between a step and the next batch it is one of that step, elsewhere in the loop one of the current step. After
        the loop it is saved at once.
        """
        self.parts.saving.check_configured()
        self.training.ask(SAVE, "engine.save_checkpoint")

    def register_state(self, name: str, of: Any) -> None:
        """Register an object with `state_dict` and `load_state_dict`, before the loop.

        Rank 0's state is saved in checkpoints and given to joiners.
        """
        self.parts.saving.register(name, of)

    def buffer(self, name: str, join: str, modulo: int | None = None, dim: int = 0, pointer: str | None = None) -> None:
        """Declare how the lanes' values of a persistent buffer of the module become the step's, before the loop.

        `join`: "writes", the rows (of `dim`) that each lane has changed in a ring, one lane after the other; "rows",
        where they are; "sum", what all lanes have added, counted `modulo` that number; "mean"; "lane0". `pointer`: the
        buffer, declared as a sum, that counts the rows written; by default, those that changed are counted. Raises
        `UserError`.
        """
        if self.context.loop_has_begun or self.context.world is not None:
            raise UserError(f"engine.buffer({name!r}, …) was called in the loop; call it before.")
        self.context.state.buffers.joins.declare(name, Join(join, modulo, dim, pointer))

    def stop(self) -> None:
        """End the job early, by vote: all members leave their loops after the same step."""
        self.training.ask(Request("stop"), "engine.stop")


def _number(name: str, value: float | Tensor) -> float:
    refuse_metric("engine.report", name, value)
    try:
        tensor = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"engine.report got {name}={value!r}; expected one number.") from None
    if tensor.numel() != 1:
        raise UserError(
            f"engine.report got {name} of shape {tuple(tensor.shape)}; expected one number, such as its mean()."
        )
    return float(tensor)
