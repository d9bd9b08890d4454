"""Silent corruption: one flipped bit is seen by comparing copies, told, and undone by going back to a sound checkpoint.

Real engines and the real job machine in one process (crew.py); a bit is flipped in the memory of a living worker.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, Task, Worker, undisturbed
from crew_saves import ask_for_save, rests, saved
from matrices import shortened
from reference import reference
from rule import Edit, holds, rule
from shoal.checkpoint.catalogue import checkpoints
from shoal.checkpoint.storage import LocalStorage
from shoal.training import corruption_watch
from shoal.training.corruption_watch import MOST_REPORTED, CorruptionWatch, block_checksums
from shoal_protos.acts import DrainWorker, Pause, Resume
from shoal_protos.corruption import CorruptBlock
from shoal_protos.runs import NO_BLOCKS, Runs
from tiers import check
from torch import Tensor

pytestmark = check("trains many small jobs")

STEPS = 24
PLAIN = Task({"max_steps": STEPS})
SOON = 4
"""Steps within which all blocks of these jobs are compared."""


def task(place: Path | None = None, **shoal: Any) -> Task:
    checkpoint = {"checkpoint": {"path": str(place), "keep": 9}} if place is not None else {}
    return Task({"max_steps": STEPS, "shoal": {"corruption_steps": SOON, **checkpoint, **shoal}})


def memory_of(worker: Worker, tensor: str, owned: bool) -> tuple[Tensor, int]:
    """A tensor of a block that a worker owns, or mirrors, and the block's number."""
    engine = worker.engine
    assert engine.context.world is not None
    share = engine.context.world.plan.shares[engine.context.world.rank]
    block = next(iter(share.owned if owned else share.mirrored))
    return memory_at(worker, tensor, block), block


def memory_at(worker: Worker, tensor: str, block: int) -> Tensor:
    state, one = worker.engine.context.state, Runs(((block, block + 1),))
    if tensor == "parameters":
        (stretch,) = state.layout.stretches(one)
        return state.weights.flats[stretch.bucket][slice(*state.layout.elements(stretch))]
    (values,) = state.held.home.states(one).values()
    return values[tensor]


def flip(values: Tensor, bit: int = 12) -> None:
    """One bit of the first number, behind the back of PyTorch."""
    memory = values.detach().reshape(-1)[:1].view(torch.uint8).numpy()
    memory[bit // 8] ^= 1 << bit % 8


def seen(crew: Crew, kind: str = "corrupt_block") -> list[str]:
    return [message for one, message in crew.events if one == kind]


def strike(crew: Crew, name: str, tensor: str = "exp_avg", owned: bool = True, bit: int = 12) -> int:
    """Flips a bit in that worker's memory in the middle of its next step; returns the block."""
    struck: list[int] = []

    def watch(worker: Worker, point: str, step: int) -> None:
        if worker.name == name and point == "exchange" and not struck:
            values, block = memory_of(worker, tensor, owned)
            flip(values, bit)
            struck.append(block)

    with crew.changed:
        crew.watchers.append(watch)
        return memory_of(crew.workers[name], tensor, owned)[1]


def owners(crew: Crew) -> list[str]:
    world = crew.job.durable.current
    assert world is not None
    return [member.worker for member, share in zip(world.members, world.shares, strict=True) if share.owned]


def save(crew: Crew, step: int) -> None:
    """A checkpoint of that step, whole and known to the controller."""
    crew.train_to(step - 1)
    ask_for_save(crew)
    crew.train_to(step)
    saved(crew, step)


# ---- what is compared


@pytest.mark.parametrize("tensor", shortened(["exp_avg", "exp_avg_sq", "step", "parameters"], "exp_avg", "parameters"))
def test_a_checksum_changes_with_any_bit_of_its_block_and_with_nothing_else(tensor: str) -> None:
    with Crew("ab", task()) as crew:
        crew.train_to(2)
        with crew.changed:
            state = crew.workers["a"].engine.context.state
            held = state.held.runs
            before = block_checksums(state, held)
            assert torch.equal(before, block_checksums(state, held))
            values, block = memory_of(crew.workers["a"], tensor, owned=True)
            for bit in (0, 12, 31):
                flip(values, bit)
                changed = (block_checksums(state, held) != before).nonzero().flatten().tolist()
                assert [*held].index(block) in changed and (values.dim() == 0 or len(changed) == 1)
                flip(values, bit)
            values, _ = memory_of(crew.workers["a"], "exp_avg", owned=True)
            values[[0, 4000]] = values[[4000, 0]]
            assert (block_checksums(state, held) != before).sum() == 1, "two numbers that have changed places"


# ---- one flipped bit


@rule(
    "The copies of every block are compared within `corruption_steps`, as of one committed step, both state and "
    "parameters; at each save those of all blocks are compared that there were at its boundary",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal.core.sampled_blocks",
            "range(step % every_steps, blocks, every_steps)",
            "range(0, blocks, every_steps)",
        ),
        Edit(
            "shoal.training.corruption_watch",
            "        self._saved, self._due, self._sound = None, None, False\n        self._copies = any",
            "        self._copies = any",
            by="test_a_joiner_is_spared_the_comparison_of_a_save_that_began_at_the_boundary_where_it_joined",
        ),
        Edit(
            "shoal.training.corruption_watch",
            "own = self._due & self._valid",
            "own = self._valid",
            by="test_a_copy_that_is_filled_after_the_boundary_of_a_save_does_not_verify_its_checkpoint",
        ),
        Edit(
            "shoal.training.corruption_watch",
            "        if step > self._state.step:\n",
            "        if True:\n",
            by="test_a_vote_without_a_step_compares_nothing_and_only_the_latest_differences_are_told_on",
        ),
        Edit(
            "shoal.training.corruption_watch",
            "[-MOST_REPORTED:]",
            "",
            by="test_a_vote_without_a_step_compares_nothing_and_only_the_latest_differences_are_told_on",
        ),
    ],
)
@pytest.mark.parametrize(("tensor", "owned"), [("exp_avg", True), ("exp_avg", False), ("parameters", False)])
def test_a_flipped_bit_of_an_owner_or_a_mirror_is_told_with_block_steps_and_both_workers(
    tensor: str, owned: bool
) -> None:
    with Crew("ab", task(on_corruption="continue")) as crew:
        crew.train_to(6)
        block = strike(crew, "a", tensor, owned)
        crew.train_to(6 + SOON + 1)
        crew.until("word of it", lambda: bool(seen(crew)))
        assert len(seen(crew)) == 1
        assert seen(crew)[0].startswith(f"the copies of block {block} of workers a and b differ; one was changed ")
        first, last = map(int, seen(crew)[0].rpartition("steps ")[2].split(" and "))
        assert first <= 6 <= last and last - first <= SOON


def test_of_three_copies_the_one_that_differs_is_named() -> None:
    with Crew("abc", task(on_corruption="continue", mirrors=2)) as crew:
        crew.train_to(6)
        block = strike(crew, "b", owned=False)
        crew.train_to(6 + SOON + 1)
        crew.until("word of it", lambda: bool(seen(crew)))
        name = crew.workers["b"].link.worker
        assert seen(crew)[0].startswith(
            f"block {block} of worker {name} differs from its other copies; changed between"
        )


@holds("The copies of every block are compared within")
def test_nothing_is_told_of_a_job_whose_copies_agree_through_kills_and_joins() -> None:
    with Crew("abc", task(mirrors=2)) as crew:
        crew.train_to(5)
        crew.kill("b")
        crew.add("d")
        crew.train_until("the joiner", lambda: len(crew.members()) == 3 and crew.at_rest())
        assert crew.finish() == reference(PLAIN)
        assert seen(crew) == []


def test_nothing_is_compared_where_the_job_is_not_bit_exact() -> None:
    with Crew("ab", task(exact=False)) as crew:
        crew.train_to(4)
        strike(crew, "a")
        crew.train_to(4 + 2 * SOON)
        assert seen(crew) == []


def test_a_world_without_mirrors_spends_nothing_on_comparing() -> None:
    with Crew("ab", task(mirrors=0)) as crew:
        crew.train_to(3)
        with crew.changed:
            engine = crew.workers["a"].engine
            assert [engine.parts.corruption.comparisons(engine.global_step + n) for n in range(1, SOON + 1)] == [
                ()
            ] * SOON


@holds("The copies of every block are compared within")
def test_a_vote_without_a_step_compares_nothing_and_only_the_latest_differences_are_told_on() -> None:
    with Crew("ab", task()) as crew:
        crew.train_to(3)
        with crew.changed:
            engine = crew.workers["a"].engine
            watch = engine.parts.corruption
            assert watch.comparisons(engine.global_step) == ()
            assert any(watch.comparisons(engine.global_step + n) for n in range(1, SOON + 1))
            passed = engine.context.state.record
            assert passed is not None
            for block in range(2 * MOST_REPORTED):
                watch.on_record(replace(passed, corrupt=(CorruptBlock(block, 0, 3, ("a", "b")),)))
            assert [one.block for one in watch.corrupt] == list(range(MOST_REPORTED, 2 * MOST_REPORTED))


# ---- a copy that goes


def strike_and_drain(crew: Crew, struck_one_goes: bool) -> tuple[int, str]:
    """Flips a bit of a block that worker a owns, and drains one of its two holders; returns the block and both."""
    crew.train_to(crew.allowed + 6)
    block = strike(crew, "a")
    assert block < crew.allowed, "its turn in this round is over"
    world = crew.job.durable.current
    assert world is not None
    holders = [m.worker for m, share in zip(world.members, world.shares, strict=True) if block in share.keeps]
    other = next(name for name in holders if name != "a")
    crew.train_to(crew.allowed + 1)
    crew.request(DrainWorker("a" if struck_one_goes else other))
    return block, " and ".join(holders)


@holds("Before a planned change begins, copies")
@pytest.mark.parametrize("struck_one_goes", [True, False])
@pytest.mark.parametrize("names", ["ab", "abc"])
def test_a_flipped_bit_is_told_though_a_drain_takes_away_a_copy_before_its_turn(
    names: str, struck_one_goes: bool
) -> None:
    with Crew(names, task(corruption_steps=1000, on_corruption="continue")) as crew:
        block, holders = strike_and_drain(crew, struck_one_goes)
        crew.train_until("the drain", lambda: len(crew.members()) < len(names) and crew.at_rest())
        assert len(seen(crew)) == 1
        assert seen(crew)[0].startswith(f"the copies of block {block} of workers {holders} differ; one was changed ")


@holds("Before a planned change begins, copies")
def test_after_such_a_drain_all_go_back_and_the_job_has_the_undisturbed_bits(tmp_path: Path) -> None:
    with Crew("ab", task(tmp_path, corruption_steps=1000)) as crew:
        save(crew, 2)
        strike_and_drain(crew, struck_one_goes=False)
        assert crew.finish() == reference(PLAIN)
        assert seen(crew, "restoring")[0].startswith("all members go back to the checkpoint of step 2: the copies of ")


@holds("Before a planned change begins, copies")
def test_a_flipped_bit_is_told_though_a_joiner_takes_over_one_of_its_two_copies() -> None:
    struck: list[int] = []

    def look(worker: Worker, point: str, step: int) -> None:
        context = worker.engine.context
        if (worker.name, point) == ("a", "forward") and context.world is not None and not struck:
            for fill in context.world.plan.fill_slice(context.boundaries)[:1]:
                struck.append(min(fill.blocks))
                flip(memory_at(worker, "exp_avg", struck[0]))

    with Crew("ab", task(corruption_steps=1000, on_corruption="continue")) as crew:
        crew.train_to(2)
        with crew.changed:
            crew.watchers.append(look)
        crew.add("c")
        crew.train_until("its share", lambda: len(owners(crew)) == 3 and crew.at_rest())
        assert len(seen(crew)) == 1
        assert seen(crew)[0].startswith(f"the copies of block {struck[0]} of workers a and b differ; ")


@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_a_death_while_copies_are_compared_costs_the_comparison_and_no_bit(victim: str) -> None:
    with Crew("abc", task(corruption_steps=1000)) as crew:
        crew.train_to(2)
        with crew.changed:
            crew.plant(victim, 3, "begin")
        crew.request(DrainWorker("b"))
        assert crew.finish() == reference(PLAIN)
        assert seen(crew) == []


# ---- what follows


@holds("When copies differ, all members return to a checkpoint whose")
@pytest.mark.parametrize(
    ("tensor", "owned"),
    shortened([("exp_avg", True), ("exp_avg", False), ("parameters", False)], ("parameters", False)),
)
def test_after_going_back_to_a_sound_checkpoint_the_job_has_the_undisturbed_bits(
    tensor: str, owned: bool, tmp_path: Path
) -> None:
    with Crew("abc", task(tmp_path)) as crew:
        save(crew, 4)
        assert [one.verified for one in crew.job.durable.checkpoints] == [True]
        crew.train_to(crew.allowed + 1)
        strike(crew, "b", tensor, owned)
        assert crew.finish() == reference(PLAIN)
        assert len(seen(crew)) == 1
        assert seen(crew, "restoring")[0].startswith("all members go back to the checkpoint of step 4: the copies of ")


@holds("When copies differ, all members return to a checkpoint whose")
def test_a_checkpoint_saved_while_copies_differ_is_not_verified_and_not_gone_back_to(tmp_path: Path) -> None:
    with Crew("abc", task(tmp_path, corruption_steps=1000)) as crew:
        save(crew, 4)
        crew.train_to(crew.allowed + 1)
        strike(crew, "b")
        ask_for_save(crew)
        assert crew.finish() == reference(PLAIN)
        assert len(seen(crew)) == 1, "the save's own comparison has found it"
        assert "changed between steps 0 and " in seen(crew)[0]
        manifests = [one.manifest for one in checkpoints(LocalStorage(tmp_path), print)]
        sound = {(one.generation, one.step) for one in manifests if one.verified}
        doubtful = {(one.generation, one.step) for one in manifests if not one.verified}
        assert (1, 4) in sound and any(generation == 1 for generation, _ in doubtful)
        assert all(generation > 1 for generation, _ in sound - {(1, 4)}), "the one that was asked for is doubtful"
        assert seen(crew, "restoring")[0].startswith("all members go back to the checkpoint of step 4: ")


@holds("When copies differ, all members return to a checkpoint whose")
def test_a_checkpoint_of_which_a_block_differs_is_not_verified_though_all_that_is_compared_after_it_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corruption_watch, "SLICE", 6)
    with Crew("ab", task(tmp_path, corruption_steps=1000, on_corruption="continue")) as crew:
        crew.train_to(2)
        assert strike(crew, "a") < corruption_watch.SLICE
        save(crew, 5)
        assert [one.verified for one in crew.job.durable.checkpoints] == [False]


@holds("When copies differ, all members return to a checkpoint whose")
def test_a_checkpoint_of_which_a_block_has_one_valid_copy_only_is_not_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    valid = CorruptionWatch._valid
    with Crew("abc", task(tmp_path, corruption_steps=1000)) as crew:
        filling = crew.workers["b"].engine.parts.corruption
        hidden = property(lambda watch: NO_BLOCKS if watch is filling else valid.fget(watch))
        monkeypatch.setattr(CorruptionWatch, "_valid", hidden)
        save(crew, 4)
        assert crew.finish() == undisturbed(PLAIN)
        manifests = [one.manifest for one in checkpoints(LocalStorage(tmp_path), print)]
        assert manifests and not any(manifest.verified for manifest in manifests)


@holds("The copies of every block are compared within")
def test_a_copy_that_is_filled_after_the_boundary_of_a_save_does_not_verify_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It agrees with what it was made of, whatever that is."""
    held: list[tuple[int, ...]] = []
    summed: list[set[int]] = []

    def note(state: Any, blocks: Runs) -> Tensor:
        summed.append(set(blocks))
        return block_checksums(state, blocks)

    monkeypatch.setattr(corruption_watch, "block_checksums", note)

    def look(worker: Worker, point: str, step: int) -> None:
        engine = worker.engine
        if (worker.name, point, step) == ("a", "exchange", 3) and engine.context.generation == 2:
            engine.save_checkpoint()  # at the boundary of the first step after the loss, in which half is filled
        if point == "save":
            held.append(tuple(engine.context.state.held.runs))

    with Crew("abc", task(tmp_path, corruption_steps=1000, fill_bytes_per_step=100_000)) as crew:
        crew.train_to(2)
        with crew.changed:
            crew.watchers.append(look)
        crew.kill("c")
        crew.train_to(3)
        crew.until("the disks", lambda: all(rests(worker) for worker in crew.members()))
        crew.train_to(4)
        assert crew.workers["a"].engine.context.state.held.runs == crew.workers["b"].engine.context.state.held.runs
        saved(crew, 3)
        copies = Counter(block for blocks in held for block in blocks)
        assert len(held) == 2 and min(copies.values()) == 1, "all are filled before the next vote"
        assert summed and all(any(blocks <= set(own) for own in held) for blocks in summed)
        assert [one.verified for one in crew.job.durable.checkpoints] == [False]


@holds("The copies of every block are compared within")
def test_a_joiner_is_spared_the_comparison_of_a_save_that_began_at_the_boundary_where_it_joined(tmp_path: Path) -> None:
    """Votes in which some bring checksums and others bring none have rows of two lengths."""
    with Crew("ab", task(tmp_path, corruption_steps=1000)) as crew:
        crew.train_to(3)
        crew.add("c")
        crew.until("the group with c", lambda: all(worker.link.own.next_built for worker in crew.members()))
        ask_for_save(crew)
        crew.train_to(4)
        crew.until("its world", lambda: len(crew.members()) == 3)
        assert crew.finish() == reference(PLAIN)
        assert [(one.step, one.verified) for one in crew.job.durable.checkpoints] == [(4, False)]


def ruin(crew: Crew) -> int:
    """Flips a bit by which the next step's update makes a parameter, and so the loss of the one after, infinite."""
    return strike(crew, "a", bit=30)


@holds("A step that is not finite ends the job only")
@pytest.mark.parametrize("stage", shortened([1, 3], 1))
def test_a_flip_that_makes_the_loss_infinite_is_gone_back_from_and_does_not_end_the_job(
    stage: int, tmp_path: Path
) -> None:
    options = {**task(tmp_path, corruption_steps=1000).options, "stage": stage}
    with Crew("abc", Task(options)) as crew:
        save(crew, 4)
        crew.train_to(crew.allowed + 1)
        ruin(crew)
        assert crew.finish() == reference(PLAIN)
        assert seen(crew, "restoring")[0].startswith("all members go back to the checkpoint of step 4: the copies of ")


@holds("A step that is not finite ends the job only")
@pytest.mark.parametrize("is_paused", [False, True], ids=["training", "pause-asked-for"])
@pytest.mark.parametrize("shoal", [{"on_corruption": "pause"}, {}], ids=["pause", "no-checkpoint"])
def test_before_such_a_loss_a_job_that_does_not_go_back_pauses_and_goes_on_once_the_bad_copy_is_gone(
    shoal: dict[str, Any], is_paused: bool
) -> None:
    with Crew("abc", task(corruption_steps=1000, **shoal)) as crew:
        crew.train_to(4)
        block = ruin(crew)
        if is_paused:
            with crew.changed:
                crew.watchers.append(lambda _, point, step: pause_in_step_6(crew, point, step))
        crew.allow(6)
        crew.until("the pause", lambda: bool(crew.job.durable.paused_because))
        crew.until("rest", lambda: crew.at_rest() and not crew.job.durable.current.steps)
        assert f"the copies of block {block} of workers a and b differ" in crew.job.durable.paused_because
        assert {worker.engine.global_step for worker in crew.members()} == {5}
        crew.kill("a")
        crew.until("the loss", lambda: len(crew.job.durable.current.members) == 2 and crew.at_rest())
        crew.request(Resume())
        assert crew.finish() == reference(PLAIN)


def pause_in_step_6(crew: Crew, point: str, step: int) -> None:
    """An operator asks for it while the step that is not finite is under way."""
    if (point, step) == ("exchange", 6) and not seen(crew, "paused"):
        crew._feed(Pause())


@holds("A step that is not finite ends the job only")
def test_where_nothing_is_done_about_it_the_end_of_the_job_names_the_block_and_not_the_learning_rate() -> None:
    with Crew("ab", task(corruption_steps=1000, on_corruption="continue")) as crew:
        crew.train_to(4)
        block = ruin(crew)
        crew.allow()
        crew.until("the end", lambda: crew.job.durable.phase.is_over)
        assert crew.job.durable.phase.value == "failed"
        assert f"A worker's memory is at fault: the copies of block {block} of workers a and b differ" in (
            crew.job.durable.reason
        )
        assert "learning rate" not in crew.job.durable.reason


def test_without_a_sound_checkpoint_the_job_pauses_and_says_why() -> None:
    with Crew("ab", task()) as crew:
        crew.train_to(6)
        strike(crew, "a")
        crew.allow()
        crew.until("the pause", lambda: crew.job.durable.paused)
        assert "there is no checkpoint whose copies were compared" in seen(crew, "paused")[0]
