"""Streams: one for each lane, which goes on where it stood, whoever trains the lane.

What a process reads is compared with a plain loop over the stream; whole jobs are in one process, with kills, joins,
drains and checkpoints (crew.py).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from crew import Crew, Task, undisturbed
from crew_saves import saved
from integration.scripts import Samples
from matrices import shortened
from rule import Edit, holds, rule
from shoal.core.stream_position import Bookmark, StreamOrder, StreamPositions
from shoal.data.data_workers import HERE, Reading
from shoal.data.fetch import Fetcher
from shoal.data.stream_source import STATE_EVERY, StreamSamples
from shoal_protos.acts import DrainWorker
from shoal_protos.errors import UserError
from tiers import check
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

pytestmark = [pytest.mark.xdist_group("streams"), check("serves REST on real ports")]

LANES, MICRO = 4, 2
ORDER = StreamOrder(LANES, MICRO, 1)


class Numbers(IterableDataset[int]):
    """Counts, and says how much of it was read."""

    read = 0

    def __init__(self, count: int = 37) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            Numbers.read += 1
            yield number


class Shares(Numbers):
    """Deals itself out, as PyTorch's documentation shows it."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        return islice(super().__iter__(), info.id, None, info.num_workers)


class Shuffles(Shares):
    """Through a buffer, with the numbers of `random`: what it gives depends on all that was drawn before."""

    def __iter__(self) -> Iterator[int]:
        buffer: list[int] = []
        for number in super().__iter__():
            buffer.append(number)
            if len(buffer) == 4:
                yield buffer.pop(random.randrange(4))
        random.shuffle(buffer)
        yield from buffer


class Remembers(Shares):
    """Has a state of its own."""

    def __init__(self, count: int = 37) -> None:
        super().__init__(count)
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        for number in range(info.id + self.at * info.num_workers, self.count, info.num_workers):
            Numbers.read += 1
            self.at += 1
            yield number
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def samples(dataset: Any, reading: Reading = HERE) -> StreamSamples:
    return StreamSamples(dataset, list, ORDER, 5, reading)


def expected(lane: int, count: int) -> list[list[int]]:
    """A lane's first micro-batches, by a plain loop."""
    numbers = cycle(range(lane, 37, LANES))
    return [list(islice(numbers, MICRO)) for _ in range(count)]


# ---- what a lane reads


@rule(
    "A stream is shared by lane, never by worker: a lane's samples follow from the lane and the number of lanes alone",
    "Data, evaluations and the doors",
    broken_by=[
        Edit("shoal.data.opened_stream", "offset % self._lanes == self._lane", "offset % self._lanes == 0"),
        Edit("shoal.data.opened_stream", "        return self._lane\n", "        return 0 * self._lane\n"),
        Edit("shoal.data.opened_stream", "rank=lane, world_size=lanes", "rank=0, world_size=lanes"),
    ],
)
@pytest.mark.parametrize("kind", [Numbers, Shares, Remembers])
def test_a_lane_reads_its_part_of_the_stream_again_and_again(kind: type[Numbers]) -> None:
    source = samples(kind())
    for lane in range(LANES):
        assert [source.read((step, lane, 0)).batch for step in range(12)] == expected(lane, 12)


@rule(
    "A lane of a stream goes on elsewhere with the same samples: a micro-batch is read under its own seed, a "
    "pass begins under its own, and what lies between a bookmark and the micro-batch is read through",
    "Data, evaluations and the doors",
    broken_by=[
        Edit(
            "shoal.data.stream_source",
            "        seed_everything(self._seed, step, lane, micro)\n        return step",
            "        return step",
        ),
        Edit("shoal.data.stream_source", "        self._source.seed_pass(self._lane, self._passes)\n", ""),
        Edit(
            "shoal.data.stream_source",
            "            self._read_samples(self._size - self._taken % self._size)\n",
            "            self._size += 0\n",
        ),
        Edit(
            "shoal.data.stream_source",
            "        while self._taken < number * self._size:\n",
            "        while self._taken < 0:\n",
        ),
        Edit(
            "shoal.data.stream_source",
            "        if self._stream is None or is_ahead or",
            "        if self._stream is None or",
        ),
        Edit("shoal.core.stream_position", "found is not None and found.batches <= batches", "found is not None"),
        Edit(
            "shoal.data.opened_stream",
            "and not _is_lossy(own)\n",
            "\n",
            by="test_a_stream_of_hugging_face_goes_on_elsewhere_with_the_same_samples",
        ),
    ],
)
@pytest.mark.parametrize("kind", [Numbers, Shares, Shuffles, Remembers])
@pytest.mark.parametrize("lane", [0, 3])
def test_a_lane_goes_on_elsewhere_with_the_same_samples_from_any_bookmark(kind: type[Numbers], lane: int) -> None:
    source = samples(kind())
    reads = [source.read((step, lane, 0)) for step in range(24)]
    marks = [None, *(read.bookmark for read in reads)]
    for step, mark in product(range(24), marks):
        if mark is None or mark.batches <= step:
            assert samples(kind()).read((step, lane, 0), mark).batch == reads[step].batch, (step, mark)


def test_a_bookmark_saves_reading_what_lies_before_its_pass_or_with_a_state_before_itself() -> None:
    def read_from(kind: type[Numbers], step: int) -> int:
        source = samples(kind())
        marks = [source.read((at, 1, 0)).bookmark for at in range(step)]
        mark = next((mark for mark in reversed(marks) if mark is not None), None)
        assert mark is not None
        Numbers.read = 0
        samples(kind()).read((step, 1, 0), Bookmark.from_text(mark.to_text()))
        return Numbers.read

    assert read_from(Shares, 20) <= 37, "lane 1 has 9 samples in a pass, so that the 41st lies in the fifth one"
    assert read_from(Remembers, 3 * STATE_EVERY) == MICRO


@holds("A lane of a stream goes")
def test_a_lane_that_is_run_again_reads_nothing_again_and_gets_unchanged_samples() -> None:
    source = StreamSamples(Numbers(), list, ORDER, 5, Reading(processes=1, ahead=1))
    first = [source.read((step, 0, 0)).batch for step in range(3)]
    copies = [list(batch) for batch in first]
    first[1].clear()
    Numbers.read = 0
    assert [source.read((step, 0, 0)).batch for step in range(3)] == copies and Numbers.read == 0
    source.read((3, 0, 0))
    assert source.read((0, 0, 0)).batch == copies[0], "what lies farther back is read again from the beginning"
    assert Numbers.read > 8


@holds("A lane of a stream goes")
def test_a_lane_that_others_have_trained_meanwhile_is_opened_at_a_state_and_else_read_through() -> None:
    source = samples(Remembers())
    source.read((0, 2, 0))
    other = samples(Remembers())
    marks = [other.read((step, 2, 0)).bookmark for step in range(4 * STATE_EVERY)]
    mark = marks[-1]
    Numbers.read = 0
    place = (4 * STATE_EVERY, 2, 0)
    assert source.read(place, mark).batch == other.read(place).batch and Numbers.read == 2 * MICRO


class CleansUp(Numbers):
    """Has something open while it is read."""

    open = 0

    def __iter__(self) -> Iterator[int]:
        CleansUp.open += 1
        try:
            yield from super().__iter__()
        finally:
            CleansUp.open -= 1


@rule(
    "A stream that is left in its midst is closed at once, on the thread that reads it: where the collector closes a "
    "stream of Hugging Face, on whatever thread it runs, that one can wait for itself for ever",
    "Data, evaluations and the doors",
    broken_by=[
        Edit(
            "shoal.data.stream_source",
            "        self.close()\n        self._stream = self",
            "        self._stream = self",
        ),
        Edit("shoal.data.fetch", "        self._source.close()\n", ""),
    ],
)
def test_a_stream_that_is_left_is_closed_when_its_lane_is_opened_anew_and_when_the_loop_ends() -> None:
    fetcher = Fetcher(samples(CleansUp()), list, 5, "cpu")
    kept = []  # so that none goes by itself
    for place in [(20, 0, 0), (0, 0, 0), (0, 1, 0)]:
        fetcher.micro_batch(*place)
        kept += [reader._stream._iterator for reader in fetcher._source._lanes.values()]  # type: ignore[attr-defined]
        assert CleansUp.open == 1 + (place[1] == 1)
    fetcher.close()
    assert CleansUp.open == 0
    assert fetcher.micro_batch(1, 0, 0) == expected(0, 2)[1]
    fetcher.close()


# ---- what all know


@holds("A lane of a stream goes")
@holds("Where lanes stand in their streams")
def test_votes_carry_the_bookmark_by_which_most_reading_is_saved() -> None:
    positions = StreamPositions()
    mine = [Bookmark(lane, 5, 0, 0, 40) for lane in range(3)]
    for lane in range(3):
        found = positions.most_useful(mine)
        assert found is not None and found.lane == lane
        positions.learn([found.to_text()])
    assert positions.most_useful(mine) is None
    assert positions.before(1, 5) == mine[1] and positions.before(1, 4) is None and positions.before(3, 9) is None
    other = StreamPositions()
    other.replace(positions.to_texts())
    assert other.to_texts() == positions.to_texts()


@holds("Where lanes stand in their streams")
@pytest.mark.parametrize("text", ["", "{}", "[1]", '[0,0,0,0,-1,""]', "[0,0,0,0,0,1]", '[true,0,0,0,0,""]', "[" * 5000])
def test_what_is_no_bookmark_is_refused_and_changes_nothing(text: str) -> None:
    positions = StreamPositions()
    positions.learn([Bookmark(0, 1, 0, 0, 2).to_text()])
    with pytest.raises(ValueError):
        positions.replace([Bookmark(0, 2, 0, 0, 4).to_text(), text])
    assert positions.before(0, 1) == Bookmark(0, 1, 0, 0, 2)


# ---- whole jobs


class Corpus(IterableDataset[dict[str, torch.Tensor]]):
    """A shuffled stream of sequences that ends early: lanes have 9 or 10 samples of 38."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        every = Samples(38)
        for index in Shuffles(38):
            yield every[index]


STEPS = 20
STREAM = Task({"max_steps": STEPS}, data=Corpus)


@pytest.fixture(scope="module")
def alone() -> str:
    return undisturbed(STREAM)


@holds("A stream is shared by lane,")
@pytest.mark.parametrize("workers", shortened(["a", "ab", "abc", "abcd"], "abc"))
def test_worlds_of_any_size_end_with_the_same_bits(workers: str, alone: str) -> None:
    with Crew(workers, STREAM) as crew:
        assert crew.finish() == alone


@holds("A lane of a stream goes")
@pytest.mark.parametrize("instant", shortened(["forward", "backward", "exchange", "vote", "in_vote"], "exchange"))
@pytest.mark.parametrize("stage", shortened([0, 1, 2, 3], 1, 3))
def test_a_kill_at_any_instant_changes_no_bit(instant: str, stage: int, alone: str) -> None:
    task = replace(STREAM, options={**STREAM.options, "stage": stage})
    with Crew("abc", task) as crew:
        crew.train_to(2)
        crew.plant("b", 6, instant)
        assert crew.finish() == alone


@rule(
    "Where lanes stand in their streams is known to all by the votes, given to joiners, and in checkpoints",
    "Data, evaluations and the doors",
    broken_by=[
        Edit("shoal.state.training_state", "        self.stream_positions.learn(record.streams)\n", ""),
        Edit(
            "shoal.core.stream_position",
            "(one.batches - self._batches(one.lane), -one.lane, one)",
            "(one.batches, -one.lane, one)",
        ),
        Edit("shoal.checkpoint.writer", "tuple(state.stream_positions.to_texts())", "()"),
        Edit(
            "shoal.core.stream_position",
            "        found = [Bookmark.from_text(text) for text in texts]\n"
            "        self._known = {one.lane: one for one in found}\n",
            "        self._known = {}\n        self.learn(texts)\n",
        ),
    ],
)
def test_joins_and_drains_change_no_bit_and_a_joiner_does_not_read_from_the_beginning(alone: str) -> None:
    with Crew("ab", replace(STREAM, options={"max_steps": STEPS})) as crew:
        crew.train_to(3)
        crew.add("c")
        crew.train_until("the joiner to be a member", lambda: len(crew.members()) == 3)
        positions = crew.workers["c"].engine.context.state.stream_positions
        assert len(positions.to_texts()) == LANES
        crew.request(DrainWorker(crew.workers["a"].link.worker, 30.0))
        assert crew.finish() == alone


@holds("Where lanes stand in their streams")
def test_positions_are_in_checkpoints_and_another_world_goes_on_from_them(alone: str, tmp_path: Path) -> None:
    options = {"max_steps": STEPS, "shoal": {"checkpoint": {"path": str(tmp_path), "every_steps": 6}}}
    task = replace(STREAM, options=options)
    with Crew("abc", task) as crew:
        crew.train_to(7)
        saved(crew, 6)
    manifest = json.loads(next(tmp_path.glob("step-*6-*/manifest.json")).read_text())
    assert sorted(Bookmark.from_text(text).lane for text in manifest["streams"]) == [0, 1, 2, 3]
    with Crew("ab", task) as crew:
        assert crew.finish() == alone
        assert crew.job.durable.history[0].from_step == 6


def job(dataset: Any, processes: int | None, **options: Any) -> str:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "shoal": {"lanes": LANES, "micro_batches_per_lane": 2, "max_steps": 8},
    }
    if processes is not None:
        dataset = DataLoader(dataset, options.pop("batch_size", MICRO), num_workers=processes, **options)
    engine = shoal.initialize(model=nn.Linear(1, 1), config=config, dataset=dataset)
    for batch in engine:
        engine.backward((engine.module(torch.as_tensor(batch).float().reshape(-1, 1)) ** 2).mean())
        engine.step()
    digest = engine.fingerprint()
    assert digest is not None
    return digest


@holds("A stream is shared by lane,")
@pytest.mark.parametrize("kind", [Numbers, Shuffles, Remembers])
def test_data_workers_read_streams_with_the_same_bits(kind: type[Numbers]) -> None:
    assert job(kind(), None) == job(kind(), 0) == job(kind(), 2) == job(kind(), 1, prefetch_factor=4)


class Batches(Numbers):
    """Gives whole micro-batches."""

    def __iter__(self) -> Iterator[Any]:
        for number in super().__iter__():
            yield torch.tensor([number, number + 1])


def test_a_stream_may_give_whole_micro_batches() -> None:
    assert job(Batches(), 0, batch_size=None) == job(Batches(), 2, batch_size=None)


def test_a_stream_that_says_its_length_can_be_read_for_epochs() -> None:
    assert StreamOrder(LANES, MICRO, 2, 70).last_step(None, 3) == 12
    assert StreamOrder(LANES, MICRO, 2, 70).last_step(5, 3) == 5


def start_at(lane: int) -> None:
    info = get_worker_info()
    assert info is not None and info.id == lane
    info.dataset.count = 10 * (lane + 1)


def test_worker_init_fn_prepares_each_lanes_own_copy() -> None:
    source = samples(Numbers(), Reading(init=start_at))
    assert [source.read((step, 0, 0)).batch for step in range(6)][-1] == [0, 1]
    assert [source.read((step, 1, 0)).batch for step in range(6)][-1] == [10, 11]


# ---- what goes wrong


@pytest.mark.parametrize("processes", [None, 1])
def test_a_stream_that_gives_a_lane_nothing_is_refused(processes: int | None) -> None:
    with pytest.raises(
        UserError, match=r"stream Shares gives lane 3 of 4 no sample in its first pass; every lane needs"
    ):
        job(Shares(3), processes)


@rule(
    "A stream that ends before where it stood, in the pass that a bookmark is of, is refused: a job goes on with "
    "the data that it began with",
    "Data, evaluations and the doors",
    broken_by=Edit("shoal.data.stream_source", "            self._least = bookmark.offset\n", ""),
)
@pytest.mark.parametrize("kind", [Numbers, Shares])
def test_a_stream_that_is_shorter_than_when_it_was_read_is_refused(kind: type[Numbers]) -> None:
    """As where files were deleted between two runs. One that ends later is read on."""
    source = samples(kind(37))
    mark = [source.read((step, 1, 0)).bookmark for step in range(3)][-1]
    assert mark is not None and mark.offset > 5
    assert samples(kind(39)).read((3, 1, 0), mark).batch == source.read((3, 1, 0)).batch
    with pytest.raises(UserError, match=rf"ends after \d samples? in pass 1 of lane 1, and had at least {mark.offset}"):
        samples(kind(6)).read((3, 1, 0), mark)


def test_epochs_of_a_stream_without_a_length_are_refused() -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}, "shoal": {"lanes": 4, "epochs": 2}}
    with pytest.raises(UserError, match=r"`shoal\.epochs` is 2, and the stream does not say how long it is"):
        shoal.initialize(nn.Linear(1, 1), config, Numbers())


def test_a_stream_that_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    dataset = Numbers()
    with (tmp_path / "open").open("w") as file:
        dataset.file = file  # type: ignore[attr-defined]
        with pytest.raises(
            UserError, match=r"stream Numbers cannot be copied, and each lane needs its own: cannot pickle"
        ):
            samples(dataset).read((0, 0, 0))


class Uneven(Numbers):
    def __iter__(self) -> Iterator[Any]:
        for number in range(40):
            yield torch.zeros(3 + (number == 9))


def test_a_batch_of_a_stream_that_cannot_be_collated_is_named() -> None:
    source = StreamSamples(Uneven(), None, ORDER, 5)
    source.read((0, 1, 0))
    with pytest.raises(
        UserError, match="collate_fn failed on the samples of step 2, lane 1: RuntimeError: stack expects"
    ):
        source.read((1, 1, 0))


class Breaks(Numbers):
    def __iter__(self) -> Iterator[int]:
        yield from range(20)
        raise FileNotFoundError("shard-3.bin")


def test_a_streams_own_error_goes_through_with_a_note() -> None:
    source = samples(Breaks())
    with pytest.raises(FileNotFoundError) as found:
        for step in range(5):
            source.read((step, 0, 0))
    assert found.value.__notes__ == ["shoal: read for step 3, lane 0"]


class Large(Remembers):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "much": "x" * 2000}


def test_a_state_that_is_too_large_for_a_vote_is_left_out() -> None:
    source = samples(Large())
    marks = [source.read((step, 0, 0)).bookmark for step in range(STATE_EVERY + 1)]
    assert marks[-1] is not None and marks[-1].state == "" and marks[-1].batches == STATE_EVERY + 1
