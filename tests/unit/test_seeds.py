"""Random numbers and micro-batches: the same whoever trains the lane and whatever ran before."""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict, namedtuple
from typing import Any

import numpy
import pytest
import torch
from rule import Edit, holds, rule
from shoal.core.sampler import Sampler
from shoal.data.fetch import Fetcher, to_device
from shoal.data.seeds import RandomState, seed_everything
from shoal.data.source import NumberedSamples, samples_of
from shoal_protos.errors import UserError


@pytest.fixture(autouse=True)
def generators_are_left_as_they_were() -> Any:
    before = RandomState.save()
    yield
    before.restore()


def drawn() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(numpy.random.rand())


def test_a_place_always_has_the_same_numbers() -> None:
    seed_everything(0, 3, 1, 2)
    first = drawn()
    drawn()
    seed_everything(0, 3, 1, 2)
    assert drawn() == first


def test_the_numbers_never_change() -> None:
    """A change of these changes every user's run."""
    seed_everything(7, 5, 3, 1)
    assert torch.randint(10**9, (2,)).tolist() == [305449644, 276753061]
    assert [random.getrandbits(32) for _ in range(2)] == [3305519254, 2998755957]
    assert numpy.random.randint(10**9, size=2).tolist() == [177114746, 265472972]


def test_neighbours_have_nothing_in_common() -> None:
    seen = set()
    for place in ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 11, 1, 0), (0, 1, 11, 0)):
        seed_everything(*place)
        seen.update(drawn())
    assert len(seen) == 21


@rule(
    "… and so are CUDA's generators",
    "Arithmetic and layout",
    needs="CUDA",
    after="What activation checkpointing makes again",
)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_has_the_same_numbers_too() -> None:
    seed_everything(0, 3, 1, 2)
    first = torch.rand(4, device="cuda")
    state = RandomState.save()
    second = torch.rand(4, device="cuda")
    seed_everything(0, 3, 1, 2)
    assert torch.equal(torch.rand(4, device="cuda"), first)
    state.restore()
    assert torch.equal(torch.rand(4, device="cuda"), second) and not torch.equal(first, second)


def test_a_saved_state_comes_back() -> None:
    seed_everything(1, 2, 3, 4)
    drawn()
    state = RandomState.save()
    ahead = drawn()
    seed_everything(5, 6, 7, 8)
    state.restore()
    assert drawn() == ahead
    state.restore()
    assert drawn() == ahead


class Noisy:
    """Draws from every generator while it reads."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "noise": torch.tensor(drawn())}


def fetcher(dataset: Any, collate: Any = None) -> Fetcher:
    return Fetcher(NumberedSamples(dataset, collate, Sampler(len(dataset), 4, 2, 2, 0), 0), collate, 0, "cpu")


@holds("torch, `random` and numpy are")
def test_a_micro_batch_is_the_same_whatever_came_before() -> None:
    one, other = fetcher(Noisy()), fetcher(Noisy())
    other.micro_batch(1, 3, 0)
    drawn()
    mine, its = one.micro_batch(0, 1, 1), other.micro_batch(0, 1, 1)
    assert mine["index"].tolist() == Sampler(40, 4, 2, 2, 0).indices(0, 1, 1)
    assert torch.equal(mine["index"], its["index"]) and torch.equal(mine["noise"], its["noise"])


@holds("torch, `random` and numpy are")
def test_the_model_starts_from_the_seed_however_much_reading_drew() -> None:
    fetcher(Noisy()).micro_batch(2, 1, 0)
    after_reading = drawn()
    seed_everything(0, 2, 1, 0)
    assert drawn() == after_reading


@rule(
    "torch, `random` and numpy are seeded by (seed, step, lane, micro-batch) before a batch is read and "
    "collated, and again before the loop gets it",
    "Arithmetic and layout",
    broken_by=Edit(
        "shoal.data.fetch",
        "        moved = self._moved(read.batch)\n        seed_everything(self._seed, *place)\n",
        "        moved = self._moved(read.batch)\n",
    ),
)
def test_collating_runs_under_the_lanes_seed() -> None:
    def collate(items: list[Any]) -> tuple[float, float, float]:
        return drawn()

    assert fetcher(Noisy(), collate).micro_batch(2, 1, 0) == fetcher(Noisy(), collate).micro_batch(2, 1, 0)
    assert fetcher(Noisy(), collate).micro_batch(2, 1, 0) != fetcher(Noisy(), collate).micro_batch(2, 2, 0)


class AtOnce:
    """Reads several samples with one call, as Hugging Face's datasets do."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        raise AssertionError("one by one")

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [10 * index for index in indices]


def test_a_dataset_that_reads_several_at_once_is_asked_once() -> None:
    wanted = [10 * index for index in Sampler(40, 4, 2, 2, 0).indices(0, 0, 0)]
    assert fetcher(AtOnce()).micro_batch(0, 0, 0).tolist() == wanted


class Broken(Noisy):
    def __getitem__(self, index: int) -> dict[str, Any]:
        raise FileNotFoundError("shard-3.bin")


def test_the_datasets_own_error_goes_through_untouched() -> None:
    with pytest.raises(FileNotFoundError, match=r"^shard-3\.bin\nshoal: read for step 1, lane 0"):
        fetcher(Broken()).micro_batch(0, 0, 0)


class Endless:
    def __getitem__(self, index: int) -> int:
        return index


def test_a_dataset_of_another_kind_is_refused() -> None:
    assert samples_of(Noisy()) == 40
    with pytest.raises(UserError, match="dataset dict is a dict of train, test; give one of them"):
        samples_of({"train": Noisy(), "test": Noisy()})
    with pytest.raises(UserError, match="dataset Endless has no length"):
        samples_of(Endless())
    with pytest.raises(UserError, match="dataset set has no numbered samples"):
        samples_of({1, 2})


@dataclasses.dataclass(frozen=True)
class Pair:
    left: torch.Tensor
    right: str


Point = namedtuple("Point", "x y")


class Moves:
    """Something of the user's with its own `.to`."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def to(self, device: torch.device) -> Moves:
        return Moves(str(device))


def test_batches_of_every_shape_are_moved() -> None:
    here = torch.ones(1)
    batch = {
        "list": [here, "text", 3, None],
        "tuple": (here,),
        "named": Point(here, 2),
        "class": Pair(here, "right"),
        "ordered": OrderedDict(a=here),
        "own": Moves(),
    }
    there = to_device(batch, torch.device("meta"))
    assert there["list"][0].is_meta and there["list"][1:] == ["text", 3, None]
    assert there["tuple"][0].is_meta and type(there["tuple"]) is tuple
    assert there["named"].x.is_meta and there["named"].y == 2
    assert there["class"].left.is_meta and there["class"].right == "right"
    assert there["ordered"]["a"].is_meta and type(there["ordered"]) is OrderedDict
    assert there["own"].device == "meta"
    assert not here.is_meta and batch["list"][0] is here, "the batch itself is left as it was"
