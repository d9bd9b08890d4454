"""DeepSpeed's engine of a `PipelineModule`: `train_batch` is a step of the job, `eval_batch` an evaluation of as many
samples.

The n-th call of `train_batch` is the job's n-th step, whatever this worker has of it: it trains its lanes, each by one
call of torch's schedule, and returns when the step is committed. Where the job is further already it returns at once,
so a worker that joins goes through its script to where the others are, and all scripts end at the same step. Which
samples a step has says Shoal's order; the iterator that a script gives says of which dataset. Made by initializing.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from shoal_protos.errors import UserError
from torch import Tensor
from torch.utils.data import Subset

from shoal.cells.call import OF_WHOLE_STEPS
from shoal.deepspeed.deepspeed_engine import DeepSpeedEngine
from shoal.deepspeed.elastic_loader import ElasticLoader
from shoal.deepspeed.own_loader import FedLoaders, Feed, watch
from shoal.deepspeed.pipe import PipelineModule
from shoal.guards.arguments import refuse_unknown
from shoal.training.engine import Engine
from shoal.training.evaluation import check_numbered

LOSS = "eval_batch"
"""Under which an evaluation's loss is reported."""
SAME_ITERATOR = (
    "give it iter(loader) of a DataLoader, or deepspeed.utils.RepeatingLoader(loader), made after initialize"
)


USUAL: Mapping[str, tuple[Any, ...]] = {
    "return_logits": (False,), "compute_loss": (True,), "reduce_output": ("avg",), "bcast_loss": (True, False),
    "num_micro_batches": (None,),
}  # fmt: skip
"""Options of `eval_batch`, with the values that leave it as it is."""


class StepLoader(ElasticLoader):
    """The loader of a dataset that `initialize` was given, from which steps are made by calls."""

    def __iter__(self) -> Iterator[Any]:
        return Feed(self, self._refuse)

    def _refuse(self) -> NoReturn:
        raise UserError(
            "the loader of a PipelineModule's engine was gone over; a pipeline trains a whole step at once: call "
            "engine.train_batch() in its place."
        )


class PipelineEngine(DeepSpeedEngine):
    """Trains by `train_batch`, and evaluates by `eval_batch`."""

    loader_of = StepLoader

    def __init__(self, elastic: Engine) -> None:
        super().__init__(elastic)
        self._loaders = FedLoaders(elastic, self.training_dataloader)
        watch(self._loaders)
        module = elastic.module
        assert isinstance(module, PipelineModule), "initialize makes no other"
        self._model = module
        self._calls = 0
        """How many steps the script has asked for, those of a checkpoint that it has loaded among them."""
        self._feed: Feed | None = None
        """Where the script wants its samples from."""
        self._end = math.inf
        """The last call for which that has samples."""
        self._batch_fn: Callable[[Any], Any] = _as_it_is
        self._labels: Any = None
        self._schedule = self._made_schedule() if module.num_stages > 1 else None
        if (hub := elastic.context.hub) is not None:
            hub.words = OF_WHOLE_STEPS

    # ---- a step

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:  # () float32
        """Makes the next step of the job, on `train_batch_size()` samples, and returns its mean loss, the same on all
        workers. Returns the last loss that is known where the job has made that step already, or is over.

        `data_iter`: an iterator over the DataLoader to train on; None: the one before, or the dataset that `initialize`
        was given. Raises `StopIteration` where it has come to the end of an epoch, `UserError` for any other iterator.
        """
        if not torch.is_grad_enabled():
            raise UserError("engine.train_batch was called without gradients; to evaluate, call engine.eval_batch.")
        self._take(data_iter)
        if self._calls >= self._end:
            raise StopIteration(
                f"engine.train_batch was given an iterator that is at the end of its epoch, step {self._calls}; make "
                "one for each epoch by iter(loader), or give it deepspeed.utils.RepeatingLoader(loader)"
            )
        elastic = self.elastic
        elastic.module.train()
        self._calls += 1
        for batch in elastic.times.reading(elastic.training.batches_to(self._calls)):
            self._train(batch)
            super().step()
        self.training_dataloader.is_behind = elastic.global_step > self._calls
        return torch.tensor(elastic.loss)

    def _train(self, batch: Any) -> None:
        """One lane; without a pipeline one of its micro-batches."""
        inputs, self._labels = self._parts_of(batch)
        if self._schedule is None:
            self.elastic.backward(self._loss(self._model(*inputs), None))
        else:
            self.elastic.run(self._schedule.step, *self._given(inputs), **self._target(inputs))

    def _given(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return inputs if self.is_first_stage() else ()

    def _target(self, inputs: tuple[Tensor, ...]) -> dict[str, Any]:
        """What a schedule divides among micro-batches for the loss: the rows of the labels, which may be several."""
        rows = torch.arange(len(inputs[0])) if self.is_last_stage() else None
        return {"target": rows, "return_outputs": False}

    def _loss(self, output: Any, rows: Tensor | None) -> Any:
        """Of a micro-batch. `rows`: which of the batch at hand it has; None: all."""
        if self._model.loss_fn is None:
            if not isinstance(output, Tensor) or output.numel() != 1:
                raise UserError(
                    "the PipelineModule has no loss_fn, and its last layer's output is "
                    f"{_shape_of(output)}; give it loss_fn, or a last layer that makes the mean loss."
                )
            return output
        labels = self._labels
        if rows is not None:
            labels = tuple(one[rows] for one in labels) if isinstance(labels, tuple | list) else labels[rows]
        return self._model.loss_fn(output, labels)

    def _parts_of(self, batch: Any) -> tuple[tuple[Tensor, ...], Any]:
        """The inputs of the first layer and the labels. Raises `UserError`."""
        batch = self._batch_fn(batch)
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise UserError(
                f"engine.train_batch got a batch that is {_shape_of(batch)}; expected a pair of inputs and "
                "labels, each a tensor or a tuple of tensors; engine.set_batch_fn takes a function that makes it."
            )
        inputs = tuple(batch[0]) if isinstance(batch[0], tuple | list) else (batch[0],)
        if not inputs or not all(isinstance(one, Tensor) for one in inputs):
            raise UserError(
                f"engine.train_batch got a batch whose inputs are {batch[0]!r:.60}; expected a tensor or several."
            )
        return inputs, batch[1]

    def _made_schedule(self) -> Any:
        """Torch's 1F1B, or GPipe where there are fewer micro-batches than stages."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe  # slow

        module, elastic = self._model, self.elastic
        stage = PipelineStage(
            module[str(module.stage_id)], module.stage_id, module.num_stages, torch.device("cpu"),
            group=module.cell.group("pipeline"),
        )  # fmt: skip
        kind = Schedule1F1B if elastic.micro_batches >= module.num_stages else ScheduleGPipe
        return kind(stage, elastic.micro_batches, loss_fn=elastic.loss_fn(self._loss), scale_grads=False)

    # ---- an evaluation

    def eval_batch(self, data_iter: Iterator[Any], **options: Any) -> Tensor:  # () float32
        """Returns the mean loss over the next `train_batch_size()` samples of the iterator's dataset, in the order of
        their numbers, the same on all workers. nan where this worker's script is behind the job, or the job over, and
        where a cell that broke has left no lane's.

        Raises `StopIteration` at the dataset's end, `UserError` before the first `train_batch` and for `options` that
        ask for another loss.
        """
        refuse_unknown("engine.eval_batch", [name for name in options if name not in USUAL], ("data_iter", *USUAL))
        usual = {**USUAL, "num_micro_batches": (None, self.elastic.micro_batches)}
        odd = [f"{name}={value!r:.60}" for name, value in options.items() if value not in usual[name]]
        if odd:
            raise UserError(
                f"engine.eval_batch got {', '.join(odd)}; expected the iterator alone: which samples a worker "
                "evaluates changes with the world, and the mean loss is of all. Rows are for engine.elastic.gather."
            )
        elastic = self.elastic
        if not self._calls:
            raise UserError("engine.eval_batch was called before the first engine.train_batch, in which workers meet.")
        part = self._next_part(data_iter)
        if elastic.global_step != self._calls or elastic.context.world is None:
            return torch.tensor(math.nan)
        measured = elastic.parts.evaluation.measured
        before = len(measured.numbers)
        with elastic.evaluating():
            for batch in elastic.shard(part):
                elastic.report(**{LOSS: self._evaluated(batch)})
        new = measured.numbers[before:]
        return torch.tensor(new[-1].get(LOSS, math.nan) if new else math.nan)

    def _evaluated(self, batch: Any) -> Tensor:  # ()
        inputs, self._labels = self._parts_of(batch)
        if self._schedule is None:
            loss: Tensor = self._loss(self._model(*inputs), None)
            return loss
        found = self.elastic.run(self._schedule.eval, *self._given(inputs), **self._target(inputs))
        assert found is not None, "it is an evaluation"
        return found.loss

    def _next_part(self, data_iter: Any) -> Any:
        """The next samples of an iterator's dataset; all where it has fewer. Raises `StopIteration`, `UserError`."""
        feed = _checked("engine.eval_batch", data_iter)
        dataset = getattr(feed.loader, "dataset", feed.loader)
        check_numbered(dataset)
        size, at = min(self.train_batch_size(), len(dataset)), feed.evaluated
        if at + size > len(dataset):
            if not feed.repeats:
                raise StopIteration
            at = 0
        feed.evaluated = at + size
        return Subset(dataset, range(at, at + size))

    # ---- data

    def take_own_loaders(self) -> None:
        """It trains on the dataset of the DataLoader that the script gives to `train_batch` first."""
        self._own_loaders = self._loaders

    def _take(self, data_iter: Any) -> None:
        """The samples are to come from there. Raises `UserError` where they cannot."""
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        elif self._feed is None:
            if self._own_loaders is not None:
                raise UserError(
                    "engine.train_batch got no data_iter, and deepspeed.initialize no training_data; give one of them."
                )
            self._feed = Feed(self.training_dataloader, _nothing)
            self._feed.repeats = True

    def set_dataiterator(self, iterator: Any) -> None:
        """Trains on what this iterator is over from now on. Raises `UserError` for another dataset than before."""
        feed, loader = _checked("engine.train_batch", iterator), self.training_dataloader
        if feed is self._feed:
            return
        own = self._own_loaders
        if own is None:
            is_right = feed.loader is loader
            wanted = "the loader that deepspeed.initialize has returned, or leave data_iter out"
        else:
            is_right = hasattr(feed.loader, "dataset") and own.take(feed.loader)
            wanted = "an iterator over the DataLoader of the first call: a job trains on one dataset"
        if not is_right:
            raise UserError(f"engine.train_batch got an iterator over another dataset; give it {wanted}.")
        self._feed, steps = feed, loader.steps
        self._end = (self._calls // steps + 1) * steps if steps and not feed.repeats else math.inf

    def set_dataloader(self, loader: Any) -> None:
        """Trains on this loader from now on."""
        self.set_dataiterator(iter(loader))

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """From now on `fn(batch)` is the pair of inputs and labels, of all samples of a lane."""
        self._batch_fn = fn

    # ---- the pipeline

    def is_first_stage(self) -> bool:
        """Whether this process has the first layers."""
        return bool(self._model.stage_id == 0)

    def is_last_stage(self) -> bool:
        """Whether this process has the last layers, and makes the loss."""
        return bool(self._model.stage_id == self._model.num_stages - 1)

    # ---- checkpoints

    def load_checkpoint(self, *given: Any, **named: Any) -> tuple[str | None, dict[str, Any]]:
        """As `DeepSpeedEngine.load_checkpoint`: the next `train_batch` is the step after the checkpoint's."""
        found = super().load_checkpoint(*given, **named)
        if found[0] is not None:
            self._calls = self.global_steps
        return found

    # ---- what a pipeline does not have

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise _only_whole_steps("engine(…)")

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        raise _only_whole_steps("engine.forward")

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        raise _only_whole_steps("engine.backward")

    def step(self, *_: Any, **__: Any) -> NoReturn:
        raise _only_whole_steps("engine.step")


def _only_whole_steps(call: str) -> UserError:
    return UserError(
        f"{call} was called of a PipelineModule's engine, which trains whole steps; call engine.train_batch."
    )


def _checked(call: str, given: Any) -> Feed:
    """Raises `UserError` for an iterator that does not tell its loader."""
    if not isinstance(given, Feed):
        raise UserError(
            f"{call} got a {type(given).__name__}, whose samples would be others in every world; {SAME_ITERATOR}."
        )
    return given


def _shape_of(given: Any) -> str:
    many = f" of {len(given)}" if isinstance(given, tuple | list | dict) else ""
    return f"of shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}{many}"


def _as_it_is(batch: Any) -> Any:
    return batch


def _nothing() -> Iterator[Any]:
    return iter(())
