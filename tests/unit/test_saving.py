"""What members decide about saves: each one's part in a save, by hypothesis in any order; and when the next one begins.

With real threads and files: test_saver.py. In whole jobs: tests/simulation/saving.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rule import Edit, holds, rule
from shoal.core.saving import (
    BUSY,
    RECENT_SAVES,
    CompleteSave,
    SaveAct,
    SaveChoice,
    SavePart,
    SavePartVote,
    SaveStatus,
    SaveVote,
    Saving,
    SharedSave,
    WithdrawSave,
    WriteSave,
)
from shoal_protos.checkpoint import SaveOutcome
from shoal_protos.plan import Member, Plan, Reason, Share
from shoal_protos.runs import Runs

STEP = 12
WRITERS = tuple(Member(f"w{number}", f"i{number}", f"host{number}:1") for number in range(4))
IDLE, WRITING, WRITTEN, FAILED = SaveStatus


class Members:
    """The writers of one save and their disk; member 0 leads. Acts are carried out when the test says so."""

    def __init__(self, count: int = 3) -> None:
        save = SharedSave(STEP, 1, WRITERS[:count])
        self.parts = [SavePart(save, member) for member in save.writers]
        self.acts: dict[int, SaveAct] = dict.fromkeys(range(count), WriteSave())
        self.disk: set[int] = set()
        self.whole = False
        self.present = set(range(count))

    def carry_out(self, *numbers: int, works: bool = True) -> None:
        for number in numbers:
            part, act = self.parts[number], self.acts.pop(number, None)
            following: SaveAct | None = None
            match act:
                case WriteSave() if works:
                    self.disk.add(number)
                    following = part.on_written()
                case CompleteSave() if works and len(self.disk) == len(self.parts):
                    self.whole = True
                    part.on_completed()
                case WithdrawSave(everything):
                    self.disk -= set() if self.whole else set(range(len(self.parts))) if everything else {number}
                    part.on_withdrawn()
                case WriteSave() | CompleteSave():
                    following = part.on_failure("the disk is full")
            self._then(number, following)

    def _then(self, number: int, act: SaveAct | None) -> None:
        if act is not None:
            assert number not in self.acts, "two acts at a time"
            self.acts[number] = act

    def vote(self, planned: bool = False, sound: bool | None = True, torn: int | None = None) -> list[SaveStatus]:
        """Of those who are present. `torn`: only this one passes it."""
        statuses = {f"i{number}": str(self.parts[number].status) for number in self.present}
        knows = any(self.parts[number].is_over and not self.parts[number].failure for number in self.present)
        vote = SavePartVote(statuses, planned, sound, saved=STEP if knows else -1)
        for number in self.present if torn is None else {torn}:
            act = self.parts[number].on_vote(vote)
            if isinstance(act, WithdrawSave) and act.everything:
                assert WRITING not in [self.parts[other].status for other in self.present if other]
            self._then(number, act)
        return [part.status for part in self.parts]

    def come_to_an_end(self) -> None:
        """Whatever can be written is, and a few votes pass."""
        for _ in range(3):
            while self.acts:
                self.carry_out(*self.present & self.acts.keys())
                self.acts = {number: act for number, act in self.acts.items() if number in self.present}
            self.vote()


def events(count: int) -> st.SearchStrategy[list[tuple[str, int]]]:
    numbers = st.integers(0, count - 1)
    return st.lists(st.tuples(st.sampled_from(["works", "fails", "vote", "torn", "dies"]), numbers), max_size=12)


@rule(
    "A failed save removes what it wrote; a save that finds no room first deletes what older failed saves left",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit("shoal.checkpoint.saver", "                    self._withdraw(save, outcome, act)\n", ""),
        Edit(
            "shoal.core.saving",
            "        if self._decision is not None or SaveStatus.WRITING in present.values() or sound is None:\n",
            "        waits = SaveStatus.WRITING in present.values() and SaveStatus.FAILED not in present.values()\n"
            "        if self._decision is not None or waits or sound is None:\n",
        ),
        Edit(
            "shoal.core.saving",
            "self._dead = frozenset(others.keys() - present.keys())",
            "pass",
            by="test_the_part_of_a_member_that_died_is_not_waited_for",
        ),
        Edit(
            "shoal.core.saving",
            "CompleteSave(frozenset(others) - present.keys() - self._dead, sound)",
            "CompleteSave(frozenset[str](), sound)",
            by="test_the_part_of_a_member_that_left_by_a_planned_change_is_waited_for",
        ),
        Edit(
            "shoal.core.saving",
            "CompleteSave(frozenset(writer.incarnation for writer in self.save.writers[1:]), False)",
            "CompleteSave(frozenset(), False)",
            by="test_at_the_end_of_a_job_the_leader_waits_for_those_who_still_write",
        ),
    ],
)
@holds("A member that missed the vote in which a save's leader")
@given(st.integers(1, 4).flatmap(lambda count: st.tuples(st.just(count), events(count))))
def test_whatever_happens_a_save_comes_to_one_end_for_all_that_live(given: tuple[int, list[tuple[str, int]]]) -> None:
    count, happened = given
    members = Members(count)
    for event, number in happened:
        if event == "vote":
            members.vote()
        elif event == "dies":
            members.present.discard(number)
        elif event == "torn" and number in members.present:
            members.vote(torn=number)
        elif number in members.present:
            members.carry_out(number, works=event == "works")
    members.come_to_an_end()
    living = [members.parts[number] for number in members.present]
    assert all(part.is_over and part.status not in BUSY for part in living)
    if 0 in members.present:
        assert {bool(part.failure) for part in living} == {not members.whole}
    if members.whole:
        assert len(members.disk) == count, "nothing of a whole checkpoint is deleted"
    elif len(living) == count:
        assert members.disk == set(), "nothing is left of a save that failed"


def test_the_leader_waits_for_those_who_have_left_by_a_planned_change_and_for_no_dead() -> None:
    for planned, gone in ((True, {"i1"}), (False, set())):
        members = Members()
        members.carry_out(0, 2)
        members.present = {0, 2}
        members.vote(planned)
        assert members.acts[0] == CompleteSave(frozenset(gone), verified=True)


def test_a_writer_that_died_is_not_waited_for_though_a_planned_change_comes_before_the_decision() -> None:
    members = Members()
    members.carry_out(0)
    members.present = {0, 2}
    members.vote(planned=False)
    assert 0 not in members.acts, "the other one is still writing"
    members.carry_out(2)
    members.vote(planned=True)
    assert members.acts[0] == CompleteSave(frozenset(), verified=True)


def test_nothing_is_decided_while_copies_are_compared() -> None:
    members = Members()
    members.carry_out(0, 1, 2)
    members.vote(sound=None)
    assert 0 not in members.acts
    members.vote(sound=False)
    assert members.acts[0] == CompleteSave(frozenset(), verified=False)


def test_what_is_decided_before_the_leader_has_written_waits_for_its_file() -> None:
    members = Members()
    members.carry_out(1, 2)
    assert members.vote() == [WRITING, WRITTEN, WRITTEN]
    assert members.acts == {0: WriteSave()}
    members.carry_out(0)
    assert members.acts == {0: CompleteSave(frozenset(), verified=True)}


def test_at_the_end_of_a_process_its_leader_completes_what_the_others_still_write() -> None:
    members = Members()
    assert members.parts[0].close() is None, "its own file is not there"
    members.carry_out(0)
    assert members.acts[0] == CompleteSave(frozenset({"i1", "i2"}), verified=False)
    assert members.parts[1].close() is None
    assert members.parts[0].close() is None, "once"


def test_a_save_that_the_leader_cannot_begin_fails_for_all_and_leaves_nothing() -> None:
    members = Members()
    del members.acts[0]
    members.parts[0].refuse("a state cannot be encoded")
    members.carry_out(1, 2)
    members.vote()
    assert [part.failure for part in members.parts] == [
        "a state cannot be encoded",
        "w0, which was to lead it, did not begin",
        "w0, which was to lead it, did not begin",
    ]
    members.carry_out(1, 2)
    assert members.disk == set()
    assert [part.status for part in members.parts] == [FAILED, IDLE, IDLE]


@rule(
    "A member that missed the vote in which a save's leader wrote learns of the save by its step: it calls no "
    "completed save a failed one, and deletes nothing of it",
    "Not marked in the design, but needed as much",
    broken_by=Edit("shoal.core.saving", "        if vote.saved >= self.save.step:\n            return None\n", ""),
)
def test_a_member_that_missed_the_vote_in_which_the_leader_wrote_learns_of_the_save_by_its_step() -> None:
    members = Members()
    members.carry_out(0, 1, 2)
    members.vote(torn=0)
    members.carry_out(0)
    assert members.vote() == [IDLE, IDLE, IDLE]
    assert members.whole
    assert [part.failure for part in members.parts] == ["", "", ""]
    assert members.acts == {}, "nothing of it is withdrawn"


@pytest.mark.parametrize(("leader", "act"), [(IDLE, None), (FAILED, WithdrawSave(everything=False))])
def test_a_member_that_did_not_hear_how_a_save_went_before_all_went_back_withdraws_nothing_that_may_be_whole(
    leader: SaveStatus, act: SaveAct | None
) -> None:
    save = SharedSave(STEP, 1, WRITERS[:2])
    part = SavePart(save, WRITERS[1])
    part.on_written()
    statuses = {"i0": str(leader), "i1": str(WRITTEN)}
    assert part.on_vote(SavePartVote(statuses, saved=STEP - 5, given_up=True)) == act
    assert part.is_over and part.failure and part.status is IDLE


def test_rank_0_writes_whatever_it_owns_and_every_owner() -> None:
    shares = (Share(), Share(owned=Runs(((0, 4),))), Share(mirrored=Runs(((0, 4),))))
    plan = Plan(3, 0, Reason.START, 4, 4, WRITERS[:3], shares, (), fill_blocks_per_step=1, builder=0, steps=True)
    assert SharedSave.of(STEP, plan).writers == WRITERS[:2]


def test_the_first_member_at_each_coordinate_writes_whatever_it_owns() -> None:
    members = tuple(replace(member, coordinate=rank % 2) for rank, member in enumerate(WRITERS[:3]))
    homes = Runs(((0, 2),)), Runs(((2, 4),))
    shares = (Share(), Share(), Share(owned=homes[0]))
    plan = Plan(
        3, 0, Reason.START, 4, 4, members, shares, (), fill_blocks_per_step=1, builder=0, steps=True, homes=homes
    )
    save = SharedSave.of(STEP, plan)
    assert save.writers == members
    assert [save.is_first_there(member) for member in members] == [True, True, False]


# ---- when one begins


def vote(**fields: object) -> SaveVote:
    """By default one that commits step 12, at which nothing is saved and nobody writes."""
    return replace(SaveVote(0, STEP, -1, {"i0": "", "i1": ""}, asked=(), stepped=True), **fields)  # type: ignore[arg-type]


WRITES = {"i0": "", "i1": str(WRITTEN)}


@pytest.mark.parametrize(
    "passed, choice",
    [
        (vote(), SaveChoice.BEGIN),
        (vote(step=13), SaveChoice.NOTHING),
        (vote(step=13, scheduled=True), SaveChoice.BEGIN),
        (vote(step=13, asked=(12, 13)), SaveChoice.BEGIN),
        (vote(step=13, asked=(10,), saved=11), SaveChoice.NOTHING),
        (vote(stepped=False), SaveChoice.NOTHING),
        (vote(stepped=False, asked=(12,)), SaveChoice.BEGIN),
        (vote(saved=12), SaveChoice.SAVED),
        (vote(step=13, saved=13, asked=(14,)), SaveChoice.NOTHING),
        (vote(statuses={"i0": str(FAILED), "i1": ""}), SaveChoice.BEGIN),
        (vote(statuses=WRITES), SaveChoice.SKIP),
        (vote(statuses=WRITES, owed=True), SaveChoice.POSTPONE),
        (vote(step=13, statuses=WRITES, asked=(13,)), SaveChoice.NOTHING),
    ],
)
def test_a_save_begins_where_it_is_due_or_asked_for_and_none_is_under_way(passed: SaveVote, choice: SaveChoice) -> None:
    for rank in range(2):
        assert Saving(every_steps=4).on_vote(replace(passed, rank=rank)) is choice


def test_a_request_stays_until_a_save_of_its_step_or_a_later_one_is_there() -> None:
    saving = Saving(every_steps=None)
    saving.ask(STEP, over=False)
    for passed in (vote(), vote(step=13, statuses=WRITES), vote(step=14, saved=12)):
        saving.on_vote(passed)
        assert saving.asked_at == 13
    saving.on_vote(vote(step=15, saved=13))
    assert saving.asked_at is None


def test_after_the_last_step_a_request_is_fulfilled_by_a_save_of_it() -> None:
    saving = Saving(every_steps=None)
    saving.ask(STEP, over=True)
    saving.on_vote(vote(stepped=False, saved=STEP))
    assert saving.asked_at is None


def test_after_going_back_a_request_is_fulfilled_by_the_step_after() -> None:
    saving = Saving(every_steps=None)
    saving.ask(STEP, over=False)
    saving.on_return_to(5)
    assert (saving.saved, saving.asked_at) == (5, 6)


def test_a_save_that_began_before_all_went_back_fulfils_no_request_that_came_after() -> None:
    saving = Saving(every_steps=4)
    assert saving.on_vote(vote()) is SaveChoice.BEGIN
    saving.on_return_to(5)
    saving.ask(7, over=False)
    saving.on_over(over(0), over(0).report, rank=0, generation=2)
    assert saving.saved == 5
    assert saving.on_vote(vote(step=8, saved=saving.saved, asked=(8,))) is SaveChoice.BEGIN
    assert saving.asked_at == 8
    saving.on_over(over(0), over(0).report, rank=0, generation=2)
    assert saving.saved == STEP


def test_a_save_that_is_skipped_is_told_by_rank_0_and_one_that_is_owed_is_asked_for_by_it() -> None:
    first, second = Saving(every_steps=4), Saving(every_steps=4)
    for rank, saving in enumerate((first, second)):
        saving.on_vote(vote(rank=rank, statuses=WRITES))
        saving.on_vote(vote(rank=rank, statuses=WRITES, owed=True))
    assert [(one.step, one.outcome) for one in first.recent] == [(STEP, SaveOutcome.SKIPPED)]
    assert (first.asked_at, second.asked_at, second.recent) == (13, None, ())


def over(number: int, failure: str = "") -> SavePart:
    """Member `number`'s part in a save of generation 1 that is over."""
    part = SavePart(SharedSave(STEP, 1, WRITERS[:2]), WRITERS[number])
    part.status, part.failure, part.is_over = IDLE, failure, True
    return part


def test_a_save_is_told_by_who_completed_it_and_a_failed_one_by_whoever_is_rank_0_then() -> None:
    for number, failure, rank, tells in (
        (0, "", 1, True),
        (1, "", 0, False),
        (0, "x", 1, False),
        (1, "x", 0, True),
    ):
        saving, part = Saving(every_steps=None), over(number, failure)
        saving.on_over(part, part.report, rank, generation=2)
        assert [one.why for one in saving.recent] == ([failure] if tells else [])
        assert saving.saved == (-1 if failure else STEP)


def test_a_request_fails_with_a_save_of_this_world_and_outlives_one_of_the_world_before() -> None:
    for generation, fails in ((1, True), (2, False)):
        saving, part = Saving(every_steps=None), over(1, "the disk is full")
        saving.ask(STEP - 1, over=False)
        assert saving.on_over(part, part.report, rank=1, generation=generation) is fails
        assert (saving.asked_at is None) is fails


def test_a_request_outlives_the_failure_of_a_save_that_began_before_it() -> None:
    saving, part = Saving(every_steps=None), over(0, "the disk is full")
    saving.ask(STEP, over=False)
    assert not saving.on_over(part, part.report, rank=0, generation=1)
    assert saving.asked_at == STEP + 1


@pytest.mark.parametrize(
    ("passed", "owed"),
    [
        (vote(), True),
        (vote(saved=STEP), False),
        (vote(statuses=WRITES), True),
        (vote(step=13, stepped=False, saved=11), True),
        (vote(step=13, stepped=False, saved=13), False),
        (vote(step=13, saved=12, scheduled=True), True),
        (vote(step=13, saved=12, asked=(13,)), True),
        (vote(step=13, saved=12, asked=(13,), stepped=False, over=True), False),
        (vote(step=3), False),
    ],
    ids=["due", "made", "skipped", "before one was there", "a later one", "by the clock", "asked for",
         "asked for after the loop", "none yet"],
)  # fmt: skip
def test_what_was_due_is_owed_until_it_is_there_or_a_later_one(passed: SaveVote, owed: bool) -> None:
    for rank in range(2):
        saving = Saving(every_steps=4)
        saving.on_vote(replace(passed, rank=rank))
        assert saving.is_owed is owed
        saving.on_vote(vote(rank=rank, step=14, stepped=False, saved=13))
        assert not saving.is_owed


def test_what_was_due_after_the_step_that_all_went_back_to_is_owed_by_nobody() -> None:
    saving = Saving(every_steps=4)
    saving.on_vote(vote())
    saving.on_return_to(5)
    assert not saving.is_owed
    saving.on_vote(vote(step=8))
    assert saving.is_owed


def test_a_save_that_was_lost_with_its_world_is_asked_for_again_by_rank_0_alone() -> None:
    for number, rank in ((0, 0), (1, 0), (1, 1)):
        saving, part = Saving(every_steps=4), over(number, "w1 is gone")
        assert not saving.on_over(part, part.report, rank, generation=2)
        assert saving.asked_at == (STEP if rank == 0 else None)
    asked, part = Saving(every_steps=4), over(0, "w1 is gone")
    asked.ask(STEP + 3, over=False)
    asked.on_over(part, part.report, rank=0, generation=2)
    assert asked.asked_at == STEP + 4, "a later one that somebody waits for is not forgotten for it"


def test_what_was_saved_before_all_went_back_is_asked_for_by_nobody() -> None:
    saving, part = Saving(every_steps=4), over(0, "w1 is gone")
    saving.on_return_to(5)
    saving.on_over(part, part.report, rank=0, generation=2)
    assert saving.asked_at is None


def test_the_last_few_saves_are_told_each_with_a_number_of_its_own() -> None:
    saving = Saving(every_steps=None)
    for _ in range(RECENT_SAVES + 2):
        saving.on_over(over(0), over(0).report, rank=0, generation=1)
    assert [one.number for one in saving.recent] == list(range(3, RECENT_SAVES + 3))
