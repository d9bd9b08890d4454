"""What becomes of each argument of a DataLoader: it is honoured, said to be left alone, or refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import shoal
import torch
from shoal.core.sampler import Sampler
from shoal.data.data_workers import Reading
from shoal.data.fetch import Fetcher
from shoal.data.given_data import GivenData, batch_size_of, check_batch_size, data_of
from shoal.data.source import NumberedSamples
from shoal_protos.errors import UserError
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

DATASET = [torch.tensor([float(number)]) for number in range(40)]


def note(_: int) -> None:
    """A `worker_init_fn`."""


HONOURED: dict[str, tuple[dict[str, Any], Callable[[GivenData], bool]]] = {
    "dataset": ({}, lambda data: data.dataset is DATASET),
    "shuffle": ({"shuffle": True}, lambda data: data.dataset is DATASET),
    "collate_fn": ({"collate_fn": list}, lambda data: data.collate_fn is list),
    "num_workers": ({"num_workers": 2}, lambda data: data.reading.processes == 2),
    "prefetch_factor": ({"num_workers": 1, "prefetch_factor": 5}, lambda data: data.reading.ahead == 5),
    "pin_memory": ({"pin_memory": True}, lambda data: data.reading.pinned),
    "timeout": ({"num_workers": 1, "timeout": 7}, lambda data: data.reading.timeout_seconds == 7),
    "worker_init_fn": ({"num_workers": 1, "worker_init_fn": note}, lambda data: data.reading.init is note),
    "multiprocessing_context": (
        {"num_workers": 1, "multiprocessing_context": "spawn"}, lambda data: data.reading.start_method == "spawn"
    ),
    "persistent_workers": ({"num_workers": 1, "persistent_workers": True}, lambda data: data.reading.processes == 1),
}  # fmt: skip
SAID: dict[str, dict[str, Any]] = {
    "drop_last": {"drop_last": True},
    "generator": {"generator": torch.Generator()},
    "in_order": {"num_workers": 1, "in_order": False},
    "pin_memory_device": {"pin_memory_device": "cuda"},
}
REFUSED: dict[str, dict[str, Any]] = {
    "shuffle": {"shuffle": False},
    "sampler": {"shuffle": None, "sampler": SequentialSampler(DATASET)},
    "batch_sampler": {"shuffle": None, "batch_sampler": BatchSampler(RandomSampler(DATASET), 2, False)},
}


def loader(**arguments: Any) -> DataLoader[Any]:
    return DataLoader(DATASET, **{"shuffle": True, **arguments})


def test_every_argument_of_a_dataloader_is_in_one_of_the_tables() -> None:
    known = set(inspect.signature(DataLoader.__init__).parameters) - {"self", "batch_size"}
    assert known == HONOURED.keys() | SAID.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", HONOURED)
def test_what_is_honoured_is_in_what_reads(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, is_there = HONOURED[name]
    assert is_there(data_of(loader(**arguments), None))
    assert "left alone" not in capsys.readouterr().err
    if name != "dataset" and name not in ("shuffle", "persistent_workers"):
        assert not is_there(data_of(loader(), None)), "it is no other argument's doing"


def test_the_batch_size_is_that_of_micro_batches_or_refused() -> None:
    assert batch_size_of(loader(batch_size=4)) == 4
    check_batch_size(loader(batch_size=4), 4, 8)
    check_batch_size(loader(batch_size=4), 2, 4)
    with pytest.raises(UserError, match=r"batch_size is 4, and micro-batches have 2 samples .* or the 8 of a step"):
        check_batch_size(loader(batch_size=4), 2, 8)


POINTS = TensorDataset(torch.randn(32, 2, generator=torch.Generator().manual_seed(1)))


def trained(dataset: Any, schedule: Callable[[Optimizer], LRScheduler] | None = None, **config: Any) -> str:
    """The fingerprint at the end."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = schedule(optimizer) if schedule is not None else None
    given = {"train_batch_size": 8, "shoal": {"lanes": 4, "epochs": 2}, **config}
    engine = shoal.initialize(model, given, dataset, optimizer, scheduler)
    for (points,) in engine:
        assert len(points) == 2
        engine.backward(engine.module(points).square().mean())
        engine.step()
    return str(engine.fingerprint())


def test_of_the_batches_of_a_whole_step_the_micro_batches_are_made() -> None:
    whole = DataLoader(POINTS, batch_size=8, shuffle=True)
    assert trained(whole) == trained(POINTS) == trained(DataLoader(POINTS, batch_size=2, shuffle=True))


def test_a_schedule_over_micro_batches_is_refused_with_the_number_of_steps() -> None:
    """`len(loader)` is right where a loader has whole steps, and says nothing of steps where it has micro-batches."""
    whole, micro = (DataLoader(POINTS, batch_size=size, shuffle=True) for size in (8, 2))

    def over(loader: DataLoader[Any], epochs: int = 2) -> Callable[[Optimizer], LRScheduler]:
        return lambda optimizer: OneCycleLR(optimizer, 0.1, epochs=epochs, steps_per_epoch=len(loader))

    assert trained(whole, over(whole)) == trained(micro, over(whole))
    with pytest.raises(UserError, match=r"total_steps is 32, which is len\(loader\) 16 × 2 epochs: .* 8 steps \(4 in"):
        trained(micro, over(micro))
    with pytest.raises(UserError, match=r"the CosineAnnealingLR's T_max is 32, .* Give it 8, or a loader"):
        trained(micro, lambda optimizer: CosineAnnealingLR(optimizer, 2 * len(micro)))
    with pytest.raises(UserError, match=r"the LambdaLR's num_training_steps is 32, .* Give it 8, or a loader"):
        trained(micro, lambda optimizer: LambdaLR(optimizer, partial(_falling, num_training_steps=2 * len(micro))))
    assert trained(micro, over(micro, epochs=3)), "whatever a script means by that, it is not the epochs of the job"


def _falling(step: int, num_training_steps: int) -> float:
    """As the schedules of transformers are made."""
    return 1 - step / num_training_steps


@pytest.mark.parametrize("name", SAID)
@pytest.mark.filterwarnings("ignore:pin_memory_device is deprecated")
def test_what_is_left_alone_is_said_once(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    data_of(loader(**SAID[name]), None)
    [line] = [line for line in capsys.readouterr().err.splitlines() if "left alone" in line]
    assert f'"{name}": ' in line
    data_of(loader(), None)
    assert "left alone" not in capsys.readouterr().err


@pytest.mark.parametrize("name", REFUSED)
def test_an_order_that_would_be_ignored_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"order is that of a (Sequential|Batch)Sampler"):
        data_of(loader(**REFUSED[name]), None)


def test_samplers_that_shuffle_are_taken_for_the_shuffle() -> None:
    for sampler in (RandomSampler(DATASET), DistributedSampler(DATASET, num_replicas=2, rank=0)):
        assert data_of(loader(shuffle=None, sampler=sampler), None).dataset is DATASET
    for sampler in (RandomSampler(DATASET, replacement=True), RandomSampler(DATASET, num_samples=8)):
        with pytest.raises(UserError, match="whose order is that of a RandomSampler"):
            data_of(loader(shuffle=None, sampler=sampler), None)


def test_without_an_accelerator_pinned_memory_is_said_to_be_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """With one: tests/gpu/test_accelerator.py."""
    source = NumberedSamples(DATASET, None, Sampler(40, 4, 2, 1, 3), 3)
    batch = Fetcher(source, None, 3, "cpu", Reading(pinned=True)).micro_batch(0, 0, 0)
    assert not batch.is_pinned() and batch.device.type == "cpu"
    assert "pin_memory_is_left_alone" in capsys.readouterr().err
