"""The rules of a change of the world that bits depend on, on real engines in one process (docs/rules.md lists them).

Each test fails when its rule is broken: it was tried.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from crew import Crew, Task, Worker, undisturbed
from idle_members import answering
from reference import reference
from rule import Edit, holds, rule
from shoal.process.faults import PlantedFault
from shoal.training.engine import Engine
from shoal_protos.acts import DrainWorker, Pause, Resume
from shoal_protos.errors import UserError
from shoal_protos.messages import MemberState
from shoal_protos.plan import Plan, Reason
from shoal_protos.runs import NO_BLOCKS, Runs, every

TASK = Task({"max_steps": 12, "dropout": 0.1})
TWO_MIRRORS = Task({"max_steps": 12, "dropout": 0.1, "shoal": {"mirrors": 2}})
"""Two losses in a row lose no block, though nothing is filled in the step between."""
LONG = Task({"max_steps": 20})
SLICES = Task({"max_steps": 12, "shoal": {"fill_bytes_per_step": 100_000}})
"""Fills take several steps."""


def keeps(worker: Worker) -> Runs:
    world = worker.engine.context.world
    assert world is not None
    return world.plan.shares[world.rank].keeps


def filled(worker: Worker) -> Runs:
    """What has come by the fill beside this step."""
    world = worker.engine.context.world
    assert world is not None
    return world.plan.filled(world.rank, worker.engine.context.boundaries + 1)


def current(crew: Crew) -> Plan:
    plan = crew.job.durable.current
    assert plan is not None
    return plan


# ---- rolling forward


@rule(
    "An inventory names the generation in which its step was committed; after a roll-forward that is the "
    "generation of the vote",
    "A step",
    broken_by=Edit(
        "shoal.training.resize",
        "        generation = context.world.plan.generation if context.world else context.state.committed_in\n",
        "        generation = context.state.committed_in\n",
    ),
)
def test_who_has_not_passed_a_vote_that_another_has_rolls_forward_in_the_generation_of_that_vote() -> None:
    committed_in = {}

    def look(worker: Worker, point: str, _: int) -> None:
        if point == "opened" and current(crew).generation > 0 and worker.link.own.promised > 1:
            committed_in[worker.name] = worker.engine.context.state.committed_in

    with Crew("abc", TASK) as crew:
        crew.watchers.append(look)
        crew.train_to(3)
        crew.plant("b", 4, "in_vote")
        crew.train_to(6)
        inventories = {name: crew.workers[name].link.inventories[-1] for name in "ac"}
        assert sorted(inventory.step for inventory in inventories.values()) == [3, 4]
        behind = min(inventories, key=lambda name: inventories[name].step)
        ahead = inventories[max(inventories, key=lambda name: inventories[name].step)]
        assert inventories[behind].pending == inventories[behind].holds != NO_BLOCKS
        assert ahead.pending == NO_BLOCKS and ahead.committed_in == 1
        assert committed_in == {"a": 1, "c": 1}
        assert "roll_forward" in crew.workers[behind].seen
        assert crew.finish() == reference(TASK)


@holds("An inventory names the generation")
def test_a_step_that_is_rolled_forward_was_committed_in_the_generation_of_its_vote() -> None:
    """Also where it is the first one of that generation, so that the step before was of another."""
    opened: list[int] = []
    committed_in: dict[str, int] = {}

    def look(worker: Worker, point: str, _: int) -> None:
        if point == "opened" and worker.name == "b" and not opened:
            opened.append(worker.link.own.promised)
            worker.engine.context.faults._planted.append(PlantedFault("b", 4, "in_vote", "kill"))
        elif point == "promote" and opened:
            committed_in[worker.name] = worker.engine.context.state.committed_in

    with Crew("abcd", TWO_MIRRORS) as crew:
        crew.train_to(3)
        crew.watchers.append(look)
        crew.kill("d")
        crew.train_to(6)
        inventories = {name: crew.workers[name].link.inventories[-1] for name in "ac"}
        assert opened == [2]
        assert sorted((one.step, one.committed_in) for one in inventories.values()) == [(3, 1), (4, 2)]
        rolled = min(inventories, key=lambda name: inventories[name].step)
        assert "roll_forward" in crew.workers[rolled].seen
        assert committed_in["a"] == committed_in["c"] == 2
        assert crew.finish() == reference(TWO_MIRRORS)


def test_a_member_that_has_not_all_gradients_yet_has_none_to_roll_forward_with() -> None:
    with Crew("abc", TASK) as crew:
        crew.train_to(3)
        crew.plant("b", 4, "exchange")
        crew.train_to(6)
        inventories = [crew.workers[name].link.inventories[-1] for name in "ac"]
        assert [(one.step, one.pending) for one in inventories] == [(3, NO_BLOCKS)] * 2
        assert crew.finish() == reference(TASK)


@rule(
    "Only blocks whose next gradient has arrived roll forward",
    "A step",
    broken_by=Edit("shoal.state.training_state", "        self.held.keep_only(self.pending)\n", ""),
)
def test_a_block_whose_gradient_is_not_in_does_not_roll_forward() -> None:
    """A member keeps what its new plan releases until the first commit; in the vote of that commit another one dies."""
    released: list[Runs] = []
    rolled: list[tuple[Runs, Runs]] = []

    def look(worker: Worker, point: str, step: int) -> None:
        if worker.name != "a":
            return
        state = worker.engine.context.state
        if point == "vote" and worker.engine.context.boundaries == 0 and state.held.runs - keeps(worker):
            released.append(state.held.runs - keeps(worker))
            crew.plant("c", step, "in_vote")
        elif point == "roll_forward":
            rolled.append((state.held.runs, state.pending))
        elif point == "promote" and rolled:
            held, pending = rolled[0]
            assert not pending & released[0] and released[0] <= held
            assert state.held.runs == pending

    with Crew("ab", TASK) as crew:
        crew.watchers.append(look)
        crew.train_to(2)
        crew.add("c")
        assert crew.finish() == reference(TASK)
        assert crew.workers["c"].killed and rolled


def test_the_time_that_a_joiner_was_outside_is_no_pause_of_training() -> None:
    with Crew("ab", TASK) as crew:
        crew.train_to(2)
        crew.kill("b")
        joiner = crew.add("c")
        joiner.engine.parts.resize._clock.start()  # as one that has answered PREPARE and was left out
        joiner.engine.parts.resize._clock._began = time.monotonic() - 100.0
        assert crew.finish() == reference(TASK)
        assert Reason.JOIN in {resize.reason for resize in crew.job.durable.history}
        assert max(resize.pause_seconds for resize in crew.job.durable.history) < 50.0


# ---- what a plan releases


@rule(
    "Blocks that a plan releases are freed after the first commit of its generation, and leave the inventory then",
    "A change of the world",
    broken_by=Edit(
        "shoal.state.training_state",
        "        self.held.keep_only(self.pending)\n",
        "        self.held.keep_only(self.pending | self.held.runs)\n",
    ),
)
def test_what_a_plan_releases_is_freed_after_its_first_commit_and_leaves_the_inventory_then() -> None:
    kept_until_then: list[Runs] = []

    def look(worker: Worker, point: str, _: int) -> None:
        engine, reported = worker.engine, worker.link.dialogue._status.holds
        if engine.context.world is None or engine.context.is_over:
            return
        if point == "begin":
            assert reported == engine.context.state.held.runs
        elif point == "vote" and engine.context.boundaries == 0:
            assert keeps(worker) <= engine.context.state.held.runs
            assert engine.context.state.held.runs - keeps(worker) - filled(worker) <= reported
            kept_until_then.append(engine.context.state.held.runs - keeps(worker) - filled(worker))
        elif point == "hand_out":
            assert engine.context.state.held.runs == engine.context.world.replays(engine.context.boundaries)
        elif point == "forward" and engine.context.boundaries > 0:
            assert reported == engine.context.state.held.runs

    with Crew("ab", TASK) as crew:
        crew.watchers.append(look)
        crew.train_to(2)
        crew.add("c")
        assert crew.finish() == reference(TASK)
    assert any(kept_until_then), "no plan released anything"


@rule(
    "A leaving worker keeps its blocks until a step has been committed in a generation without it",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.scaling",
        "    return state in (MemberState.LEFT, MemberState.STOPPED) and has_world_voted(turn)",
        "    return state in (MemberState.LEFT, MemberState.STOPPED)",
    ),
)
def test_a_leaving_worker_keeps_its_blocks_until_a_step_is_committed_without_it() -> None:
    with Crew("a", LONG) as crew:
        crew.train_to(2)
        leaver, heir = crew.workers["a"], crew.add("b")
        crew.train_until("b to be in", lambda: len(current(crew).members) == 2)
        crew.request(DrainWorker("a"))
        while leaver.link.own.state is not MemberState.LEFT:
            crew.train_to(crew.allowed + 1)
            crew.beat(1)  # what the step has begun is over
        crew.beat(5)
        assert current(crew).world_size == 1 and heir.engine.context.boundaries == 0, "no step was committed without it"
        assert leaver.alive and leaver.engine.context.state.held.runs == every(current(crew).blocks)
        crew.kill("b")
        crew.add("c")
        assert crew.finish() == reference(LONG)
        assert not leaver.alive and leaver.failure == ""


# ---- whether steps run, and how fast fills go, is in the plan


@rule(
    "Whether steps run is part of the plan",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.planner_questions",
        "    return not turn.durable.paused and not turn.durable.final_drain and turn.durable.are_enough(members)",
        "    return True",
    ),
)
def test_pause_and_resume_are_planned_changes_after_which_all_stand_at_the_same_step() -> None:
    with Crew("abc", TASK) as crew:
        crew.train_to(2)
        crew.request(Pause())
        crew.allow()
        crew.until("the pause", lambda: not current(crew).steps)
        paused = current(crew)
        assert paused.base == 1 and paused.recovery is None
        crew.beat(5)
        steps = {worker.engine.global_step for worker in crew.workers.values()}
        boundaries = [worker.engine.context.boundaries for worker in crew.workers.values()]
        assert len(steps) == 1 and min(boundaries) > 0, "they vote on, without a step"
        crew.request(Resume())
        assert crew.finish() == reference(TASK)
        assert [kind for kind, _ in crew.events].count("prepare") == 1, "that of the start"


@rule(
    "A stop is carried out by the commit of a step: asked for where votes commit none, it waits for the next",
    "Not marked in the design, but needed as much",
    broken_by=Edit("shoal.training.requests", " and (request.kind not in ENDS or self._context.is_over)", ""),
)
def test_a_stop_that_is_asked_for_between_steps_ends_the_job_after_the_next_one() -> None:
    """Rank 0 asks in the callback of the very step after which the job pauses: votes without a step carry it then."""
    asked: list[int] = []

    def ask(engine: Engine) -> None:
        if engine.context.begins is not None and not engine.context.begins.plan.steps:
            engine.stop()
            asked.append(engine.global_step)

    with Crew("ab", replace(TASK, prepare=lambda engine: engine.on_step(ask))) as crew:
        crew.train_to(2)
        crew.request(Pause())
        crew.allow()
        crew.until("the pause", lambda: not current(crew).steps)
        crew.beat(3)
        assert asked and {worker.engine.global_step for worker in crew.workers.values()} == set(asked)
        crew.request(Resume())
        crew.finish()
    assert crew.job.durable.step == asked[0] + 1


@rule(
    "A fill's bytes per step are a number in the plan, never a local measurement",
    "A change of the world",
    broken_by=Edit(
        "shoal.training.step",
        "        reduction, fills = self.reducing.take(), self._slice()\n",
        "        reduction, fills = self.reducing.take(), self._slice() if self._context.meter._step_seconds "
        "< 50.0 else ()\n",
    ),
)
def test_how_much_a_fill_moves_is_the_plans_number_whatever_a_member_measures() -> None:
    slices: list[tuple[str, int, int, int]] = []

    def look(worker: Worker, point: str, _: int) -> None:
        engine = worker.engine
        engine.context.meter._step_seconds = {"a": 100.0, "b": 0.001, "c": 1.0}[worker.name]  # each of another opinion
        if point == "fill" and engine.context.world is not None:
            rate = engine.context.world.plan.fill_blocks_per_step
            slices.append((worker.name, engine.generation, engine.context.boundaries, rate))

    with Crew("ab", SLICES) as crew:
        crew.watchers.append(look)
        crew.train_to(2)
        crew.add("c")
        assert crew.finish() == reference(SLICES)
    assert {rate for *_, rate in slices} == {3}
    assert max(boundary for _, _, boundary, _ in slices) >= 1, "the fill took one step"


# ---- joiners


@rule(
    "A joiner warms up on one lane whose result is thrown away",
    "A change of the world",
    broken_by=Edit(
        "shoal.training.training_loop",
        "if not (context.loop.is_warm or context.link.alone):",
        "if False:",
    ),
)
def test_a_joiner_warms_up_on_a_lane_whose_result_is_thrown_away() -> None:
    warmed_up: list[Engine] = []

    def look(engine: Engine) -> None:
        if engine.context.world is None:
            warmed_up.append(engine)
            engine.report(noise=1e9)
            assert engine.context.link.membership().state is MemberState.WARMING_UP

    task = Task(TASK.options, in_loop=look)
    with Crew("ab", task) as crew:
        crew.train_to(2)
        joiner = crew.add("c")
        crew.train_to(6)
        assert joiner.engine in warmed_up
        assert "noise" not in joiner.engine.reports
        assert crew.finish() == reference(TASK)


@rule(
    "A joiner gets the values in `param_groups`, not only the scheduler's state",
    "A change of the world",
    broken_by=Edit("shoal.state.training_state", 'self.load_hyper_parameters(given["hyper"])', "given"),
)
def test_the_values_of_the_optimizers_groups_reach_a_joiner() -> None:
    """A scheduler's state alone would leave the learning rate as the script has set it."""
    with Crew("ab", TASK) as crew:
        crew.train_to(7)
        joiner = crew.add("c")
        crew.train_until("c to be in", lambda: joiner in crew.members())
        rates = [
            [group["lr"] for group in worker.engine.context.state.optimizer.param_groups] for worker in crew.members()
        ]
        assert len(rates) == 3 and rates[0] == rates[1] == rates[2]
        assert rates[0][0] < 1e-3
        assert crew.finish() == reference(TASK)


def by_the_step(engine: Engine) -> None:
    for group in engine.context.state.optimizer.param_groups:
        group["lr"] = 1e-3 / (1 + engine.global_step)


@rule(
    "… and values that the loop's body sets there are sent before each vote to members without lanes, where no "
    "body runs",
    "A change of the world",
    broken_by=Edit(
        "shoal.training.step",
        "        take_over_where_no_body_runs(self._world, self._context.state.optimizer, self._context.state.modes)\n",
        "",
    ),
    after="A joiner gets the values",
)
def test_a_rate_that_the_body_sets_reaches_members_whose_body_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As loops do that keep a schedule of their own."""
    idle, task = {"d"}, Task({"max_steps": 14}, in_loop=by_the_step)
    monkeypatch.setattr("crew.answer", answering(idle))
    with Crew("abc", task) as crew:
        crew.train_to(3)
        joiner = crew.add("d")
        crew.train_until("d to be in", lambda: joiner in crew.members())
        assert joiner.engine.lanes == []
        crew.train_to(crew.allowed + 1)
        idle.clear()
        crew.kill("a")
        assert crew.finish() == undisturbed(task)


@rule(
    "No hyper-parameter may be set between `engine.step` and the next batch: a worker that gets its first lane "
    "there would miss it",
    "A change of the world",
    broken_by=Edit("shoal.guards.agreed_values", "        if difference:", "        if not difference and difference:"),
)
def test_a_rate_that_is_set_after_the_step_is_refused_in_any_world_before_a_joiner_lacks_it() -> None:
    def step(engine: Engine) -> None:
        if engine.step():
            by_the_step(engine)

    with pytest.raises(UserError, match=r"lr of optimizer group 0 is 0\.0005 here and 0\.001 there after the step"):
        undisturbed(Task({"max_steps": 14}, step=step, scheduler=lambda _: None))


# ---- promotion


@rule(
    "Only a worker that holds a block becomes its owner or mirror",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.core.planning.planner",
        "        if group.holders.issuperset(group.keepers)\n",
        "        if staying\n",
    ),
)
def test_a_plan_makes_owners_and_mirrors_only_of_those_who_hold_the_blocks() -> None:
    begun = 0

    def look(worker: Worker, point: str, _: int) -> None:
        nonlocal begun
        if point == "forward" and worker.engine.context.boundaries == 0 and worker.engine.context.world is not None:
            begun += 1
            assert keeps(worker) <= worker.engine.context.state.held.runs

    with Crew("abc", SLICES) as crew:
        crew.watchers.append(look)
        crew.train_to(2)
        crew.kill("b")
        crew.train_to(4)
        crew.add("d")
        crew.train_to(6)
        assert crew.finish() == reference(SLICES)
        assert begun > 6


# ---- the end


@rule(
    "A job has succeeded when its digests have arrived, whatever a status says",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.running",
        "    if not turn.durable.fingerprint:\n"
        "        return False  # a status may come before the digests that it speaks of\n",
        "",
    ),
)
def test_a_job_has_its_fingerprint_though_the_last_status_comes_before_the_digests() -> None:
    def look(worker: Worker, point: str, _: int) -> None:
        if point == "after_last":
            worker.link.dialogue.beat()
            worker.link.muted = True

    with Crew("a", TASK) as crew:
        crew.watchers.append(look)
        crew.allow()
        crew.until("the script's end", lambda: crew.workers["a"].engine.context.ended)
        crew.workers["a"].link.muted = False
        assert crew.finish() == reference(TASK)


# ---- lanes that are done


def test_a_worker_whose_only_lane_of_the_new_world_is_done_trains_it_again() -> None:
    """One that is about to join gets its second one, in a loss at that moment: all that was left to it was done, and it
    failed for want of a lane.
    """
    broken: list[tuple[int, ...]] = []

    def step(engine: Engine) -> None:
        engine.step()
        world = engine.context.world
        if world is None or broken or crew.workers["b"].engine is not engine:
            return
        lanes, joins = world.lanes, "c" in crew.workers and crew.workers["c"].link.own.state is MemberState.JOINING
        if joins and engine.context.loop.lane == lanes[1]:
            broken.append(lanes)
            world.group.abort()
            crew.workers["b"].wait(lambda: engine.context.link.stopping)

    with Crew("ab", replace(TASK, step=step)) as crew:
        crew.train_to(2)
        joiner = crew.add("c")
        crew.until("c to join", lambda: joiner.link.own.state is MemberState.JOINING)
        assert crew.finish() == reference(TASK)
        assert broken == [(2, 3)]
        assert [worker.failure for worker in crew.workers.values()] == ["", "", ""]
