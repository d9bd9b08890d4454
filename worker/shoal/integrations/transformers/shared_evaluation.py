"""An evaluation of a Trainer by all workers together: each computes the batches of its lanes, and all get all outputs.

The outputs of a batch are a function of the weights and its number, since reading it and drawing for it have a seed of
their own: any worker comes to the same ones. So those that have not come from others, since the world broke meanwhile,
are computed here. The library's own loop then goes over the outputs. Evaluations that all workers make at one boundary
by their arguments are shared; any other is computed whole by the workers that make it. Called by trainer.py and
elastic_run.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import send_to_device
from shoal_protos.activity import StepPhase
from shoal_protos.errors import PeerError, UserError
from shoal_protos.training_log import get_logger
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from shoal.data.opened_stream import is_stream
from shoal.data.seeds import seed_everything
from shoal.data.source import one_thread, read_numbered
from shoal.exchange.packing import exchange_framed
from shoal.exchange.traffic import EVALUATED
from shoal.exchange.world import World
from shoal.group.group import USER_STEPS, WorldChanged
from shoal.state.small_state import packed, unpacked
from shoal.training.engine import Engine

NO_MORE = b""
"""The last word of a member at a boundary."""
Outputs = dict[int, Any]
"""By the number of the batch what `prediction_step` gives, and what the Trainer has counted beside it."""
OUTPUTS = "what prediction_step gives"

log = get_logger("shoal")


class SeededBatches(Dataset[Any]):
    """The batches of a loader that reads its dataset in order, by number."""

    def __init__(self, loader: Any, seed: int, step: int) -> None:
        self._dataset, self._collate, self._seed, self._step = loader.dataset, loader.collate_fn, seed, step
        self._size, self._count = loader.batch_sampler.batch_size, len(loader.batch_sampler)

    @property
    def shape(self) -> list[int]:
        """What the same evaluation has alike on all workers."""
        return [len(self._dataset), self._size, self._count]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Any:
        self.seed(number)
        first = number * self._size
        samples = list(range(first, min(first + self._size, len(self._dataset))))
        with one_thread():
            return self._collate(read_numbered(self._dataset, samples))

    def seed(self, number: int) -> None:
        """Random numbers are those of this batch, in every world."""
        seed_everything(self._seed, self._step, 0, number, purpose="evaluation")


class InPlace(Dataset[dict[str, Tensor]]):
    """As many samples as another dataset has, of which only the number counts."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"sample": torch.tensor(index)}


class SharedEvaluations:
    """Those of one training."""

    def __init__(self, trainer: Any, engine: Engine) -> None:
        self._trainer, self._engine = trainer, engine
        self._world: World | None = None
        """The one whose members all expect a word of this one at the boundary at hand."""
        self._words = 0
        self._shares = False
        """Whether the evaluation at hand is one that all make."""
        self._reasons: set[str] = set()

    @contextmanager
    def boundary(self, is_due: bool) -> Iterator[None]:
        """Around what follows a commit. `is_due`: whether all evaluate here, by their arguments. Raises `WorldChanged`
        in the end, when all of it is done here.
        """
        context, self._world = self._engine.context, None
        world = context.world
        if is_due and world is not None and world.group.size > 1 and not self._engine.parts.boundary.is_owed:
            self._world, self._words = world, 0
            world.group.progress.begin_boundary(context.boundaries)
        yield
        if (last := self._expected_in) is not None:
            self._world = None
            self._exchange(last, NO_MORE)

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Around the evaluation that is due."""
        self._shares = True
        try:
            yield
        finally:
            self._shares = False

    @contextmanager
    def predicting(self, loader: Any, name: str, loss_only: bool, ignored_keys: Any) -> Iterator[Any]:
        """Yields the loader that the library's loop is to go over: the outputs of each batch are known.

        `name`: of this evaluation.
        """
        trainer, context = self._trainer, self._engine.context
        seed, step = context.config.seed, context.state.step
        reason = self._whole_because(loader)
        if reason:
            self._say_once(reason)
            seed_everything(seed, step, 0, 0, purpose="evaluation")
            yield loader
            return
        batches, outputs = SeededBatches(loader, seed, step), Outputs()
        predict, look = trainer.prediction_step, trainer.preprocess_logits_for_metrics

        def compute(numbers: Sequence[int]) -> None:
            for number, batch in zip(numbers, _read(loader, batches, numbers), strict=True):
                batches.seed(number)
                inputs = send_to_device(batch, trainer.args.device)
                loss, logits, labels = predict(trainer.model, inputs, loss_only, ignore_keys=ignored_keys)
                if look is not None and logits is not None:
                    logits = look(logits, labels)
                outputs[number] = send_to_device((loss, logits, labels), "cpu"), trainer._take_counts()
                context.step_on()

        def known_step(*_: Any, **__: Any) -> Any:
            output, counts = outputs.pop(next(known))
            trainer._add_counts(counts)
            return send_to_device(output, trainer.args.device)

        self._gather(batches, name, outputs, compute)
        known = iter(range(len(batches)))
        trainer.prediction_step, trainer.preprocess_logits_for_metrics = known_step, None
        try:
            sampler = loader.batch_sampler
            in_place = DataLoader(InPlace(loader.dataset), sampler.batch_size, drop_last=sampler.drop_last)
            yield trainer.accelerator.prepare_data_loader(in_place)
        finally:
            del trainer.prediction_step
            trainer.preprocess_logits_for_metrics = look

    def _whole_because(self, loader: Any) -> str:
        """Why the library's loop computes all by itself; empty: it does not."""
        of = getattr(loader, "batch_sampler", None)
        in_order = type(of) is BatchSampler and type(of.sampler) is SequentialSampler and of.batch_size
        if not in_order or is_stream(loader.dataset):
            return "its samples are not read by number, one after the other"
        if "inputs" in self._trainer.args.include_for_metrics:
            return "compute_metrics wants the inputs, which only the worker has that has read them"
        return ""

    def _say_once(self, reason: str) -> None:
        if reason not in self._reasons:
            self._reasons.add(reason)
            log.info("evaluation_is_whole", reason=reason, means="every worker evaluates all of it")

    # ---- what the others have computed

    @property
    def _expected_in(self) -> World | None:
        """None: no other waits for a word of this member, or its world is over."""
        return self._world if self._world is self._engine.context.world else None

    def _gather(
        self, batches: SeededBatches, name: str, outputs: Outputs, compute: Callable[[Sequence[int]], None]
    ) -> None:
        """All outputs are here afterwards: those of this member's lanes, of the others', and what is lacking then."""
        if self._shares and (world := self._expected_in) is not None:
            lanes = self._engine.context.config.lanes
            compute([number for number in range(len(batches)) if number % lanes in world.lanes])
            if self._expected_in is not None:  # else it has changed under a forward
                outputs.update(self._of_others(world, [name, *batches.shape], outputs))
        compute([number for number in range(len(batches)) if number not in outputs])

    def _of_others(self, world: World, key: list[Any], mine: Outputs) -> Outputs:
        try:
            content = packed([key, mine], OUTPUTS)
        except UserError as error:
            self._say_once(str(error))
            content = packed([key, {}], OUTPUTS)
        try:
            words = self._exchange(world, content)
        except WorldChanged:  # found again by the next exchange, when what follows this step is done
            words = [NO_MORE]
        if NO_MORE in words:
            self._world = None
        found = Outputs()
        for word in filter(None, words):
            match unpacked(word, OUTPUTS):
                case [of, dict(outputs)]:
                    found |= outputs if of == key else {}
                case other:
                    raise PeerError(f"{OUTPUTS} that another worker sent is a {type(other).__name__}")
        return found

    def _exchange(self, world: World, content: bytes) -> list[bytes]:
        """What all members say, each one word. Raises `WorldChanged`."""
        group, self._words = world.group, self._words + 1
        group.progress.reach(StepPhase.LANES, self._words * USER_STEPS)
        return list(exchange_framed(group, EVALUATED, content).values())


def _read(loader: Any, batches: SeededBatches, numbers: Sequence[int]) -> Iterator[Any]:
    """These batches, as the loader reads."""
    if not numbers:
        return iter(())
    named = ("num_workers", "prefetch_factor", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    how = {name: getattr(loader, name) for name in named}
    return iter(DataLoader(batches, batch_size=None, sampler=numbers, collate_fn=_as_it_is, **how))


def _as_it_is(batch: Any) -> Any:
    return batch
