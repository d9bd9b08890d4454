"""Several members' savers, fed with ballots as a vote would: who completes a save, who gives it up, who hears of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checkpoints import origin, trained
from rule import holds
from shoal.checkpoint import saver as module
from shoal.checkpoint.catalogue import Keep, Ours, SaveName, look_into, saves
from shoal.checkpoint.fingerprint import verify
from shoal.checkpoint.manifest import MANIFEST
from shoal.checkpoint.saver import Lead, Saver, SaveTask
from shoal.checkpoint.snapshot import take_snapshot
from shoal.checkpoint.storage import LocalStorage
from shoal.checkpoint.writer import Author, NoStates, TakenStates, draft_of
from shoal.core.checkpoint_errors import StorageFailed, StorageFull
from shoal.core.saving import SavePart, SavePartVote, SaveStatus, SharedSave
from shoal.state.training_state import TrainingState, frozen_parameters
from shoal_protos.plan import Member
from shoal_protos.runs import Runs

OWNERS = [Runs(((0, 5),)), Runs(((5, 6), (8, 12))), Runs(((6, 8),))]
WRITERS = tuple(Member(f"w{number}", f"i{number}", f"host{number}:1") for number in range(3))


class Gate(LocalStorage):
    """A disk that writes data files once `open` is set, or fails; with `room`, it is full beyond so many files."""

    def __init__(self, root: Path, fails: bool = False) -> None:
        super().__init__(root)
        self.open, self.fails = threading.Event(), fails
        self.room: int | None = None
        self.looked = threading.Event()
        """Somebody has looked into a folder."""

    def list(self, folder: str = "") -> dict[str, int | None]:
        found = super().list(folder)
        if folder:
            self.looked.set()
        return found

    def write(self, name: str, chunks: Iterable[memoryview]) -> int:
        if name.endswith(".safetensors"):
            assert self.open.wait(100)
            if self.fails:
                raise StorageFailed("the disk is full")
        if self.room is not None and len(files(self._root)) >= self.room:
            raise StorageFull(f"no room for {name}")
        return super().write(name, chunks)


class World:
    """Three members of one save; `vote` is a vote of those present."""

    def __init__(self, root: Path, state: TrainingState, failing: int = -1) -> None:
        self.gates = [Gate(root, fails=number == failing) for number in range(3)]
        self.savers = [Saver(gate, Keep(2, None)) for gate in self.gates]
        self.state = state

    def begin(self) -> SaveName:
        state = self.state
        name = SaveName.of(state.step, 1, state.step, WRITERS[0].incarnation)
        draft, beside = draft_of(state, origin(state), 1, {})
        lead = Lead(draft, frozen_parameters(state), in_use="")
        for number, saver in enumerate(self.savers):
            tensors = {} if number else beside
            snapshot = take_snapshot(state.layout, state.weights, state.held, OWNERS[number], tensors, saver.arena)
            part = SavePart(SharedSave(state.step, 1, WRITERS), WRITERS[number])
            saver.begin(SaveTask(part, name, snapshot, None if number else lead), copy_seconds=0.0)
        self.savers[0].states = TakenStates.of({})
        return name

    def write(self, *numbers: int) -> None:
        """Lets these members write, and waits until they have."""
        for number in numbers:
            self.gates[number].open.set()
            self.savers[number].join()

    def until_the_leader_looks(self, call: Callable[[], object]) -> None:
        """Until it has looked, because of `call`, into the folder of the save."""
        looked = self.gates[0].looked
        looked.clear()
        call()
        assert looked.wait(100)

    def vote(self, *present: int, sound: bool = False, planned: bool = True) -> list[SaveStatus]:
        """Returns what all say then; the leader, before it carries out what it decides."""
        leader, here = self.savers[0].status, present or range(3)
        ballots = {WRITERS[number].incarnation: str(self.savers[number].status) for number in here}
        for number in here:
            self.savers[number].on_vote(SavePartVote(ballots, planned, sound))
        return [leader, *(saver.status for saver in self.savers[1:])]

    def finish(self) -> None:
        """Until the leader has done what it can."""
        thread = self.savers[0]._thread
        if thread is not None:
            thread.join(100)
            assert not thread.is_alive()


@contextmanager
def world(root: Path, failing: int = -1) -> Iterator[World]:
    made = World(root, trained(2), failing)
    try:
        yield made
    finally:
        made.write(0, 1, 2)
        for saver in made.savers:
            saver.close(60.0)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.2)


def files(root: Path) -> list[str]:
    """All but the frozen parameters, which the next save writes no more."""
    return sorted(path.name for path in root.rglob("*") if path.is_file() and not path.name.startswith("frozen-"))


def whole(root: Path) -> list[int]:
    storage = LocalStorage(root)
    found = [name for name in saves(storage) if MANIFEST in storage.list(name.folder)]
    for name in found:
        verify(look_into(storage, name).reader())
    return [name.step for name in found]


W, R, F, FREE = SaveStatus.WRITING, SaveStatus.WRITTEN, SaveStatus.FAILED, SaveStatus.IDLE


def test_the_leader_completes_a_save_once_nobody_is_writing(tmp_path: Path) -> None:
    with world(tmp_path) as three:
        three.begin()
        assert three.vote() == [W, W, W]
        three.write(0, 1)
        assert three.vote() == [W, R, W]
        assert whole(tmp_path) == []
        three.write(2)
        assert three.vote() == [W, R, R]
        three.finish()
        assert three.vote() == [FREE, FREE, FREE]
        assert whole(tmp_path) == [2]
        outcome = three.savers[0].outcome
        assert outcome and outcome.manifest and outcome.seconds.keys() == {"copy", "write", "commit"}


def test_a_member_that_cannot_write_makes_it_a_failed_save_for_all(tmp_path: Path) -> None:
    with world(tmp_path, failing=1) as three:
        three.begin()
        three.write(0, 1, 2)
        assert three.vote() == [W, F, R]
        three.finish()
        assert three.savers[0].status is F
        three.vote()
        assert [saver.outcome and saver.outcome.part.failure for saver in three.savers] == [
            "the save was given up: w1 could not write; the log of each says why.",
            "the disk is full",
            "w0, which led it, says that it failed",
        ]
        assert [saver.status for saver in three.savers] == [F, FREE, FREE]
        assert whole(tmp_path) == []


def test_a_leader_that_cannot_write_makes_it_a_failed_save_for_all(tmp_path: Path) -> None:
    with world(tmp_path, failing=0) as three:
        three.begin()
        three.write(0, 1, 2)
        three.vote()
        three.finish()
        assert three.vote() == [F, FREE, FREE]
        assert whole(tmp_path) == []


def test_after_a_failed_save_the_next_one_is_as_good_as_any(tmp_path: Path) -> None:
    with world(tmp_path, failing=1) as three:
        three.begin()
        three.write(0, 1, 2)
        three.vote()
        three.finish()
        three.vote()
        three.gates[1].fails = False
        three.state = trained(3)
        three.begin()
        three.write(0, 1, 2)
        three.vote()
        three.finish()
        assert three.vote() == [FREE, FREE, FREE]
        assert whole(tmp_path) == [3]


def test_a_member_that_has_left_with_its_part_written_is_not_missed(tmp_path: Path) -> None:
    with world(tmp_path) as three:
        three.begin()
        three.write(0, 1, 2)
        three.vote(0, 2)  # w1 died after it had written
        three.finish()
        assert three.vote(0, 2)[::2] == [FREE, FREE]
        assert whole(tmp_path) == [2]


@holds("A failed save removes what it wrote")
def test_the_part_of_a_member_that_left_by_a_planned_change_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process writes on until it is done."""
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 20)
    with world(tmp_path) as three:
        three.begin()
        three.write(0, 2)
        three.until_the_leader_looks(lambda: three.vote(0, 2))
        three.write(1)
        three.finish()
        assert whole(tmp_path) == [2]


@holds("A failed save removes what it wrote")
def test_the_part_of_a_member_that_died_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 30)
    with world(tmp_path) as three:
        three.begin()
        three.write(0, 2)
        three.vote(0, 2, planned=False)
        three.finish()
        assert whole(tmp_path) == []


@holds("A failed save removes what it wrote")
def test_at_the_end_of_a_job_the_leader_waits_for_those_who_still_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 20)
    with world(tmp_path) as three:
        three.begin()
        three.write(0, 2)
        closing = threading.Thread(target=three.savers[0].close, args=(60.0,))
        three.until_the_leader_looks(closing.start)
        three.write(1)
        closing.join(100)
        assert whole(tmp_path) == [2]


def test_memory_for_the_next_save_is_not_taken_while_one_is_being_written(tmp_path: Path) -> None:
    with world(tmp_path) as three:
        three.begin()
        writing = three.savers[0]._thread
        three.savers[0].reserve(100)
        assert three.savers[0]._thread is writing


def test_a_member_that_died_while_it_wrote_makes_it_a_failed_save(tmp_path: Path) -> None:
    with world(tmp_path) as three:
        three.begin()
        three.write(0, 2)
        three.vote(0, 2)  # w1 died, and its file is not there
        three.finish()
        assert three.vote(0, 2)[::2] == [F, FREE]
        outcome = three.savers[0].outcome
        assert outcome and "its writer did not finish" in outcome.part.failure
        assert whole(tmp_path) == []


def test_a_leader_that_died_leaves_no_checkpoint_and_the_others_free(tmp_path: Path) -> None:
    with world(tmp_path) as three:
        three.begin()
        three.vote()
        three.write(1)
        assert three.vote(1, 2)[1:] == [FREE, W]  # who still writes is not free yet
        three.write(2)
        assert three.vote(1, 2)[1:] == [FREE, FREE]
        assert [saver.outcome and saver.outcome.part.failure for saver in three.savers[1:]] == 2 * [
            "w0, which led it, is gone"
        ]


def test_a_leader_that_did_not_begin_leaves_no_checkpoint(tmp_path: Path) -> None:
    with world(tmp_path) as three:
        three.begin()
        three.write(1, 2)
        for saver in three.savers[1:]:  # w0 rolled forward past the boundary at which the others began
            statuses = {"i0": "", "i1": str(three.savers[1].status), "i2": str(three.savers[2].status)}
            saver.on_vote(SavePartVote(statuses))
        assert [saver.status for saver in three.savers[1:]] == [FREE, FREE]
        assert three.savers[1].outcome and "did not begin" in three.savers[1].outcome.part.failure


@holds("What a script has registered stands in a checkpoint")
def test_a_save_whose_leader_cannot_have_the_scripts_states_is_a_failed_one(tmp_path: Path) -> None:
    with world(tmp_path) as three:
        three.begin()
        three.savers[0].states = NoStates("the state cannot be kept")
        three.write(0, 1, 2)
        three.vote()
        three.finish()
        assert not files(tmp_path)
        assert three.savers[0].outcome and three.savers[0].outcome.part.failure == "the state cannot be kept"


def test_at_the_end_of_a_job_what_has_begun_is_completed(tmp_path: Path) -> None:
    with world(tmp_path) as three:
        three.begin()
        three.write(0, 1, 2)
        for saver in three.savers[::-1]:
            saver.close(60.0)
        assert whole(tmp_path) == [2]


def test_retention_follows_a_save(tmp_path: Path) -> None:
    with world(tmp_path) as three:
        three.write(0, 1, 2)
        for steps in (2, 3, 4):
            three.state = trained(steps)
            three.begin()
            three.write(0, 1, 2)
            three.vote()
            three.finish()
            three.vote()
        assert whole(tmp_path) == [4, 3]


def failed_save(three: World, *writers: int) -> None:
    """To the end, whoever may write."""
    three.begin()
    three.write(*writers)
    three.vote()
    three.finish()
    three.vote()
    for saver in three.savers:
        saver.join()


@holds("A failed save removes what it wrote")
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failed_save_leaves_nothing_on_the_disk(tmp_path: Path, failing: int) -> None:
    with world(tmp_path, failing) as three:
        failed_save(three, 0, 1, 2)
        assert three.savers[0].outcome and three.savers[0].outcome.part.failure
        assert files(tmp_path) == []
        assert saves(LocalStorage(tmp_path)) == []


def test_a_save_whose_manifest_finds_no_room_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    with world(tmp_path) as three:
        three.gates[0].room = 6  # three data files and what their writers say of them
        failed_save(three, 0, 1, 2)
        assert three.savers[0].outcome and "no room for" in three.savers[0].outcome.part.failure
        assert files(tmp_path) == []


@holds("A failed save removes what it wrote")
def test_nobody_is_given_up_on_while_another_one_still_writes(tmp_path: Path) -> None:
    with world(tmp_path, failing=1) as three:
        three.begin()
        three.write(0, 1)
        assert three.vote() == [W, F, W]  # what w2 is about to write would be left behind
        three.write(2)
        three.vote()
        three.finish()
        assert three.vote() == [F, FREE, FREE]
        assert files(tmp_path) == []


@holds("A failed save removes what it wrote")
@pytest.mark.parametrize("short_of_room", [0, 1])
def test_a_save_without_room_deletes_what_older_ones_left_and_is_tried_once_more(
    tmp_path: Path, short_of_room: int
) -> None:
    with world(tmp_path) as three:
        rest = tmp_path / SaveName.of(1, 1, 1, "dead").folder
        rest.mkdir()
        for number in range(7):
            (rest / f"{number}.safetensors").write_bytes(b"of a leader that was killed")
        three.gates[short_of_room].room = 7
        three.begin()
        three.write(0, 1, 2)
        three.vote()
        three.finish()
        assert three.vote() == [FREE, FREE, FREE]
        assert whole(tmp_path) == [2]
        assert not rest.exists()


def test_frozen_parameters_that_are_written_at_once_make_room_as_all_else_does(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    gate.open.set()
    rest = tmp_path / SaveName.of(1, 1, 1, "dead").folder
    rest.mkdir()
    (rest / "0.safetensors").write_bytes(b"of a leader that was killed")
    gate.room = 1
    named = {"frozen": torch.ones(3)}
    Saver(gate, Keep(2, None)).write_frozen_now(SaveName.of(2, 1, 2, "i0"), Author("w0", "i0"), Ours(), named, iter)
    assert not rest.exists() and len(list(tmp_path.glob("frozen-*"))) == 1


def test_what_a_leader_that_is_gone_has_completed_stays_whole(tmp_path: Path) -> None:
    with world(tmp_path) as three:
        three.begin()
        three.write(0, 1, 2)
        three.vote()
        three.finish()
        for saver in three.savers[1:]:  # it died after its manifest was there
            statuses = {"i1": str(three.savers[1].status), "i2": str(three.savers[2].status)}
            saver.on_vote(SavePartVote(statuses))
            saver.join()
        assert whole(tmp_path) == [2]


def test_all_members_of_a_save_know_whether_its_copies_agreed(tmp_path: Path) -> None:
    with world(tmp_path) as three:
        three.begin()
        three.vote()
        three.write(0, 1, 2)
        three.vote(sound=True)
        three.finish()
        assert three.vote(sound=True) == [FREE, FREE, FREE]
        assert [saver.outcome and saver.outcome.part.verified for saver in three.savers] == [True, True, True]
