"""Parameters that the workers of one host see in each other's memory: what is shown, what stays, what is noticed."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew
from hard_units import and_train, of, task
from reference import reference
from rule import Edit, holds, rule
from shoal.blocks.sharded_memory import ShardedMemory, TorchMemory
from shoal.blocks.shared_weights import NO_KEY, MappedFlats, Part, SeenWeights, SharedWeights, can_lie_in_pages
from shoal.blocks.values import WholeValues
from shoal.core.layout import Bucket, Layout, Slot, Stretch, Trainable
from shoal.exchange.unit_fetch import SeenUnits
from shoal.group.group import GroupProgress, SoloGroup, WorldChanged
from shoal.offload.state_place import StatePlace, held_blocks
from shoal.session.link_choice import has_peers_on_host_alone
from shoal.training.engine import Engine
from shoal.training.sharded_parameters import ShardedParameters
from shoal_protos.runs import Runs
from tiers import check
from torch import Tensor
from weights_bytes import in_a_child, memories, taken_bytes, windows

pytestmark = check("trains many small jobs")

BLOCK = 4_096
MOST_MAPPINGS = Path("/proc/sys/vm/max_map_count")


def layout_of(*blocks: int, dtype: torch.dtype = torch.float32, elements: int = BLOCK) -> Layout:
    """A bucket of one parameter for each number of blocks."""
    parameters = [Trainable(f"p{index}", (count * elements,), dtype, 0) for index, count in enumerate(blocks)]
    buckets = [
        Bucket(index, 0, dtype, (Slot(parameter, 0),), count, count * elements)
        for index, (parameter, count) in enumerate(zip(parameters, blocks, strict=True))
    ]
    return Layout(elements, tuple(buckets))


LAYOUT = layout_of(3, 2)
WHOLE = [LAYOUT.whole(bucket) for bucket in LAYOUT.buckets]


def two_owners() -> tuple[SharedWeights, SharedWeights]:
    """The first holds ones, the other twos; each all but one block of the first bucket."""
    first, other = SharedWeights(LAYOUT), SharedWeights(LAYOUT)
    for bucket in LAYOUT.buckets:
        first.part(LAYOUT.whole(bucket)).fill_(1)
        other.part(LAYOUT.whole(bucket)).fill_(2)
    return first, other


@pytest.fixture
def shared() -> tuple[SharedWeights, SharedWeights]:
    return two_owners()


def parts_of(first: SharedWeights, other: SharedWeights) -> list[Part]:
    """The first bucket from both, the second one from the other."""
    one, two = SeenWeights(first.address), SeenWeights(other.address)
    return [Part(one, Stretch(0, 0, 1)), Part(two, Stretch(0, 1, 3)), Part(two, Stretch(1, 0, 2))]


def test_what_is_not_held_takes_no_memory_and_what_is_given_back_neither() -> None:
    earlier = memories()
    weights = SharedWeights(layout_of(100, 50))
    empty = taken_bytes(earlier)
    assert empty <= 2 * os.sysconf("SC_PAGE_SIZE")
    weights.part(Stretch(0, 10, 30)).fill_(1)
    assert taken_bytes(earlier) - empty == 20 * BLOCK * 4
    weights.give_back([Stretch(0, 10, 25)])
    assert taken_bytes(earlier) - empty == 5 * BLOCK * 4
    assert weights.part(Stretch(0, 24, 26)).view(2, -1)[:, 0].tolist() == [0, 1]


@rule(
    "Parameters that others see in their owner's memory are read as of one vote: the owner says so at its head "
    "until they change, and whoever reads looks there when a unit comes and after what it reads outside of "
    "lanes; a fill changes nothing that others read; what a script writes where others' memory is shown goes to "
    "nobody and is found",
    "Groups",
    broken_by=[
        Edit(
            "shoal.blocks.held",
            "        self._begin_change()\n        take_over_hyper_parameters(mine, users)\n",
            "        take_over_hyper_parameters(mine, users)\n",
        ),
        Edit(
            "shoal.blocks.held",
            "        if kept != self.runs:\n            self.home.keep_only(kept)\n",
            "        self.keep_only(kept)\n",
        ),
        Edit(
            "shoal.exchange.unit_fetch", "            if not one.stand_at(self._key):\n", "            if rank < 0:\n"
        ),
        Edit(
            "shoal.blocks.shared_weights",
            "        flags = mmap.MAP_PRIVATE | MAP_FIXED | (mmap.MAP_ANONYMOUS if descriptor is None else 0)\n",
            "        flags = MAP_FIXED | (mmap.MAP_SHARED if descriptor is not None else mmap.MAP_PRIVATE | "
            "mmap.MAP_ANONYMOUS)\n",
        ),
        Edit("shoal.guards.write_guards", "        if element is not None:\n", "        if element == -1:\n"),
    ],
)
def test_who_sees_them_sees_as_of_which_vote_they_are(shared: tuple[SharedWeights, SharedWeights]) -> None:
    first, _ = shared
    seen = SeenWeights(first.address)
    assert seen.stand_at(NO_KEY)
    first.stand((4, 7))
    assert seen.stand_at((4, 7)) and not seen.stand_at((4, 6))
    first.begin_change()
    assert not seen.stand_at((4, 7))


@holds("Parameters that others see in their owner's memory")
def test_an_update_and_a_release_are_changes_and_a_fill_is_none() -> None:
    parameter = torch.nn.Parameter(torch.ones(5 * BLOCK))
    layout = layout_of(5)
    values = WholeValues(layout, [parameter.data])
    held = held_blocks(StatePlace(), layout, torch.optim.SGD([parameter], lr=0.5), values, {}, keeps_weights=True)
    shared = SharedWeights(layout)
    held.segments.shared = shared
    held.hold(Runs([(0, 4)]))
    seen = SeenWeights(shared.address)

    def is_changed_by(act: Callable[[], object]) -> bool:
        shared.stand((1, 1))
        act()
        return not seen.stand_at((1, 1))

    filled = {Stretch(0, 3, 5): {"weights": torch.full((2 * BLOCK,), 7.0)}}
    assert not is_changed_by(lambda: held.take(filled))
    assert shared.part(Stretch(0, 0, 5)).view(5, -1)[:, 0].tolist() == [1, 1, 1, 7, 7]
    assert is_changed_by(lambda: held.apply(WholeValues(layout, [torch.ones(5 * BLOCK)]), 1.0))
    assert shared.part(Stretch(0, 0, 5)).view(5, -1)[:, 0].tolist() == [0.5, 0.5, 0.5, 6.5, 6.5]
    assert is_changed_by(lambda: held.keep_only(Runs([(1, 3)])))
    assert not is_changed_by(lambda: held.keep_only(Runs([(1, 4)])))
    assert shared.part(Stretch(0, 0, 5)).view(5, -1)[:, 0].tolist() == [0, 0.5, 0.5, 0, 0]


def test_flats_show_each_block_where_its_owner_keeps_it(shared: tuple[SharedWeights, SharedWeights]) -> None:
    mapped = MappedFlats(LAYOUT)
    assert mapped.see(parts_of(*shared))
    assert mapped.flats[0].view(3, -1).mean(1).tolist() == [1, 2, 2]
    assert mapped.flats[1].mean() == 2
    shared[1].part(Stretch(0, 2, 3)).fill_(5)
    assert mapped.flats[0].view(3, -1).mean(1).tolist() == [1, 2, 5]


@holds("Parameters that others see in their owner's memory")
def test_what_is_written_where_others_memory_is_shown_is_seen_by_nobody_else_and_is_found(
    shared: tuple[SharedWeights, SharedWeights],
) -> None:
    mapped = MappedFlats(LAYOUT)
    assert mapped.see(parts_of(*shared))
    assert [mapped.written(bucket) for bucket in (0, 1)] == [[], []]
    mapped.flats[0][2 * BLOCK + 5] = 9
    assert shared[1].part(WHOLE[0])[2 * BLOCK + 5] == 2
    pages = [2 * BLOCK * 4 // mmap.PAGESIZE]
    assert [mapped.written(bucket) for bucket in (0, 1)] == [pages, []]
    assert mapped.changed(0, pages) == 2 * BLOCK + 5
    mapped.flats[0][2 * BLOCK + 5] = 2
    assert mapped.written(0) == pages and mapped.changed(0, pages) is None
    mapped.show(0)
    assert mapped.flats[0][2 * BLOCK + 5] == 2 and mapped.written(0) == []


def test_what_is_kept_stays_as_it_is_until_it_is_shown_again(shared: tuple[SharedWeights, SharedWeights]) -> None:
    mapped = MappedFlats(LAYOUT)
    assert mapped.see(parts_of(*shared))
    mapped.keep([1])
    shared[1].part(WHOLE[1]).fill_(3)
    assert mapped.flats[1].unique().tolist() == [2] and not mapped.is_shown(1)
    mapped.give_back(1)
    mapped.show(1)
    assert mapped.flats[1].unique().tolist() == [3] and mapped.is_shown(1)


def test_memory_of_who_is_gone_is_shown_until_others_is_and_takes_nothing_then() -> None:
    earlier = memories()
    owner = SharedWeights(LAYOUT)
    owner.part(WHOLE[0]).fill_(4)
    owner.part(WHOLE[1]).fill_(4)
    mapped, seen = MappedFlats(LAYOUT), SeenWeights(owner.address)
    assert mapped.see([Part(seen, stretch) for stretch in WHOLE])
    del owner
    assert mapped.flats[0].unique().tolist() == [4]
    mapped.forget()
    assert mapped.flats[0].unique().tolist() == [0]
    del seen
    assert memories().keys() <= earlier.keys()


def test_where_there_are_too_many_mappings_or_no_look_at_pages_units_are_copied(
    shared: tuple[SharedWeights, SharedWeights], monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped = MappedFlats(LAYOUT)
    with monkeypatch.context() as patch:
        patch.setattr("shoal.blocks.shared_weights.MOST_PARTS", 2)
        assert not mapped.see(parts_of(*shared))
    with monkeypatch.context() as patch:
        patch.setattr("shoal.blocks.shared_weights.PAGES", Path("/proc/self/nothing"))
        assert not mapped.see(parts_of(*shared))
    assert not any(mapped.is_shown(bucket) for bucket in (0, 1))
    assert mapped.see(parts_of(*shared))


def test_a_bucket_that_cannot_be_shown_keeps_nothing_of_others_and_is_shown_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    earlier = memories()
    shared = two_owners()
    mapped, map_one, places = MappedFlats(LAYOUT), MappedFlats._map, list[int]()
    assert mapped.see(parts_of(*shared))
    before = windows(earlier)
    mapped.keep([0])
    kept = windows(earlier)

    def refuse_the_second(flats: MappedFlats, place: int, size: int, descriptor: int | None) -> None:
        places.append(place)
        if len(places) == 2:
            raise OSError("Cannot allocate memory")
        map_one(flats, place, size, descriptor)

    monkeypatch.setattr(MappedFlats, "_map", refuse_the_second)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        mapped.show(0)
    assert not mapped.is_shown(0) and windows(earlier) == kept < before
    mapped.show(0)
    assert mapped.flats[0].view(3, -1).mean(1).tolist() == [1, 2, 2]


def test_blocks_that_are_no_whole_pages_and_a_system_without_such_memory_lie_in_torchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert can_lie_in_pages(LAYOUT) and can_lie_in_pages(layout_of(3, dtype=torch.bfloat16))
    odd = layout_of(3, elements=1_000)
    assert not can_lie_in_pages(odd)
    assert isinstance(ShardedMemory(odd, True, False).beneath, TorchMemory)
    assert isinstance(ShardedMemory(LAYOUT, False, False).beneath, TorchMemory)
    assert isinstance(ShardedMemory(LAYOUT, True, False).beneath, MappedFlats)
    monkeypatch.delattr(os, "memfd_create")
    assert isinstance(ShardedMemory(LAYOUT, True, False).beneath, TorchMemory)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, True),
        ({"SHOAL_CONTROLLER": "127.0.0.1:7071", "SHOAL_JOB": "j"}, True),
        ({"SHOAL_CONTROLLER": "127.0.0.1:7071", "SHOAL_JOB": "j", "SHOAL_HOST": "127.0.0.7"}, True),
        ({"SHOAL_CONTROLLER": "127.0.0.1:7071", "SHOAL_JOB": "j", "SHOAL_HOST": "10.0.0.7"}, False),
        ({"SHOAL_CONTROLLER": "127.0.0.1:7071", "SHOAL_JOB": "j", "SHOAL_HOST": "node-3"}, False),
        ({"SHOAL_CONTROLLER": "nowhere"}, False),
    ],
)
def test_only_who_is_reached_by_loopback_has_all_peers_on_its_host(environment: dict[str, str], expected: bool) -> None:
    assert has_peers_on_host_alone(environment) is expected


# ---- workers


def sees(crew: Crew, name: str) -> bool:
    """Whether a worker sees the parameters of all owners."""
    parameters = crew.workers[name].engine.parts.step.parameters
    assert isinstance(parameters, ShardedParameters)
    return parameters.units._owners is not None


def test_workers_of_one_process_see_each_others_parameters_through_a_loss_and_a_join() -> None:
    with Crew("abc", of(task(mirrors=1))) as crew:
        crew.train_to(2)
        assert sees(crew, "a")
        crew.plant("b", 3, "backward")
        crew.add("d")
        assert crew.finish() == reference(of(task(0)))


def test_one_that_others_cannot_see_is_copied_from_and_the_rest_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(address: object) -> int:
        raise PermissionError("Permission denied")

    monkeypatch.setattr("shoal.blocks.shared_weights.open_at", refuse)
    with Crew("abc", of(task(mirrors=1))) as crew:
        crew.train_to(2)
        assert not sees(crew, "a")
        crew.plant("b", 3, "backward")
        assert crew.finish() == reference(of(task(0)))


@holds("Parameters that others see in their owner's memory")
def test_what_is_read_while_an_owner_goes_on_is_not_taken_for_read(shared: tuple[SharedWeights, SharedWeights]) -> None:
    first, other = shared
    key = (3, 5)
    units = SeenUnits(SoloGroup(GroupProgress()), {0: SeenWeights(first.address), 1: SeenWeights(other.address)}, key,
                      MappedFlats(LAYOUT))  # fmt: skip
    first.stand(key)
    other.stand(key)
    units.check()
    other.begin_change()
    with pytest.raises(WorldChanged, match=r"rank 1 has gone on while parameters were read as of \(3, 5\)"):
        units.check()
    other.stand((4, 0))
    with pytest.raises(WorldChanged):
        units.check()


class Gone:
    """An owner that has gone on without this worker."""

    def stand_at(self, _: object) -> bool:
        return False


def lose(crew: Crew, units: SeenUnits, rank: int) -> None:
    """As after a freeze: what is read is garbage, and another world is made."""
    units._owners = {**units._owners, rank: Gone()}  # type: ignore[dict-item]
    crew.workers["c"].killed = True  # wherever it waits now
    crew.changed.notify_all()


def test_a_backward_that_fails_over_what_its_owners_have_changed_runs_again() -> None:
    """A script that looks at its gradients is not blamed for garbage."""
    struck: list[str] = []

    def and_look(engine: Engine, batch: Any) -> None:
        def look(_: Tensor) -> None:
            units = engine.parts.step.parameters.units._fetch  # type: ignore[attr-defined]
            if not struck and isinstance(units, SeenUnits) and units._key[1] == 2 and units._group.rank == 0:
                struck.append("struck")
                lose(crew, units, 1)
                raise ValueError("a gradient is no number")

        loss = engine.module(**batch)
        loss.register_hook(look)
        engine.backward(loss)
        engine.step()

    with Crew("abc", of(task(mirrors=1, body=and_look))) as crew:
        assert crew.finish() == reference(of(task(0)))
    assert struck


def test_a_forward_that_reads_while_its_owners_go_on_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends in garbage, and must not be heard of."""
    struck: list[str] = []
    check = SeenUnits.check

    def strike_once(units: SeenUnits) -> None:
        others = [rank for rank in units._owners if rank != units._group.rank]
        if not struck and units._group.rank == 0 and units._key[1] == 2 and others:
            struck.append("struck")
            lose(crew, units, others[0])
        check(units)

    monkeypatch.setattr(SeenUnits, "check", strike_once)
    with Crew("abc", of(task(mirrors=1, body=and_train))) as crew:
        assert crew.finish() == reference(of(task(0)))
    assert struck


def without_mappings(left: int) -> mmap.mmap:
    """This process can make about so many more. Returns what takes the others."""
    most, made = int(MOST_MAPPINGS.read_text()), len(Path("/proc/self/maps").read_text().splitlines())
    count = most - made - left
    taken = mmap.mmap(-1, (count + 2) * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = torch.frombuffer(taken, dtype=torch.uint8).data_ptr()
    for page in range(0, count, 2):
        protect(start + page * mmap.PAGESIZE, mmap.PAGESIZE, mmap.PROT_READ)
    return taken


@pytest.mark.skipif(
    int(MOST_MAPPINGS.read_text()) > 1 << 21, reason="a process here may have more than a test can make"
)
def test_who_runs_out_of_mappings_in_the_midst_copies_units() -> None:
    layout = layout_of(*[2] * 12)
    owners = [SharedWeights(layout), SharedWeights(layout)]
    for owner in owners:
        for bucket in layout.buckets:
            owner.part(layout.whole(bucket)).fill_(1)

    def look(left: int) -> bool:
        mapped, seen = MappedFlats(layout), [SeenWeights(one.address) for one in owners]
        parts = [Part(seen[at], Stretch(bucket.index, at, at + 1)) for bucket in layout.buckets for at in (0, 1)]
        mapped.flats[0].fill_(3)
        taken = without_mappings(left)
        found = mapped.see(parts)
        taken.close()
        return found or any(mapped.is_shown(bucket.index) for bucket in layout.buckets)

    for left in range(6, 22, 3):
        assert in_a_child(lambda left=left: look(left)) == "False"
