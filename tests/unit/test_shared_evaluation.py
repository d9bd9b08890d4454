"""Evaluations right after a step: their numbers, the weights they measured, who hears of them, through any change."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from crew import ONE_AT_A_TIME, Crew, Killed, Task, Worker, engine_of, train, undisturbed
from idle_members import answering
from memory_group import wire_of
from rule import Edit, holds, rule
from safetensors.torch import load_file
from shoal.callbacks import CSV, EarlyStopping, SaveBest, TensorBoard
from shoal.exchange.evaluation_round import EvaluationRound, _Stream
from shoal.exchange.traffic import AWAITED, EVALUATED
from shoal.exchange.world import World
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training import evaluation, requests
from shoal.training.engine import Engine
from shoal_protos.errors import PeerError, UserError
from shoal_protos.messages import MemberState

STAGE_3 = {"stage": 3}
NUMBERS = range(22)
"""What is evaluated: not every lane has as many."""

Hearings = dict[str, list[tuple[int, float]]]
"""By worker, what it was told: the step, and the number."""


def evaluate(engine: Engine) -> None:
    with engine.evaluating():
        for part in engine.shard(NUMBERS):
            engine.report(seen=part.double().mean())


def after_even_steps(engine: Engine) -> None:
    """And looks at what is there at once."""
    if engine.step() and engine.global_step % 2 == 0:
        evaluate(engine)
        assert engine.reports["seen"] > 0


def listening(hearings: Hearings, **task: Any) -> Task:
    def prepare(engine: Engine) -> None:
        name = engine.context.link.worker
        engine.on_evaluation(lambda now: hearings.setdefault(name, []).append((now.global_step, now.reports["seen"])))

    return Task(**{"step": after_even_steps, **task, "prepare": prepare})


def alone(task: Task) -> Engine:
    with ONE_AT_A_TIME:
        engine = engine_of(task, AloneLink(), Faults([]))
        train(engine, task, lambda: None)
        return engine


def heard_alone(**task: Any) -> list[tuple[int, float]]:
    hearings: Hearings = {}
    alone(listening(hearings, **task))
    [record] = hearings.values()
    return record


@rule(
    "An evaluation right after a step waits for each member with lanes until it has brought its own, or asks for its "
    "next batch; before the next vote that decides every member has the same numbers, whether it evaluates or not",
    "Data, evaluations and the doors",
    broken_by=[
        Edit(
            "shoal.training.training_loop",
            "                    parts.boundary.end_body()\n",
            "",
            by="test_one_member_alone_waits_for_no_evaluation_of_others",
        ),
        Edit(
            "shoal.training.evaluation",
            "        self._take(self._round.settle(messages))\n",
            "        self._round.settle(messages)\n",
        ),
        Edit("shoal.exchange.vote", "        raise Undecided(messages)\n", "        pass\n"),
        Edit("shoal.exchange.evaluation_round", "                self._take(of, peer)\n", "                pass\n"),
        Edit(
            "shoal.exchange.evaluation_round",
            "            self._hear(lacking)\n        return self.take()\n\n    def end",
            "            break\n        return self.take()\n\n    def end",
        ),
    ],
)
@holds("A member enters a vote that can decide")
@pytest.mark.parametrize(
    ("names", "options"),
    [("ab", {}), ("abc", {}), ("abcd", STAGE_3)],
    ids=["two", "uneven lanes", "stage 3"],
)
def test_every_member_hears_the_numbers_of_a_world_of_one_under_their_step(names: str, options: dict[str, Any]) -> None:
    """Those of the last step too; with its lanes' numbers at the end of the `with`."""
    task = {"options": {"max_steps": 4, **options}}
    right, hearings = heard_alone(**task), Hearings()
    assert [step for step, _ in right] == [2, 4]

    def look(worker: Worker, point: str, _: int) -> None:
        world = worker.engine.context.world
        if point == "vote" and world is not None and not options:  # units of stage 3 are sent beside
            assert not world.group.unwaited or worker.engine.parts.evaluation.messages

    with Crew(names, listening(hearings, **task)) as crew:
        crew.watchers.append(look)
        assert crew.finish() == undisturbed(Task(**task))
    assert hearings == dict.fromkeys(names, right)


@holds("An evaluation right after a step waits")
@pytest.mark.parametrize("options", [{}, STAGE_3], ids=["stage 1", "stage 3"])
def test_one_member_alone_waits_for_no_evaluation_of_others(options: dict[str, Any]) -> None:
    """All hear of it, and it costs no bit."""

    def step(engine: Engine) -> None:
        if engine.step() and engine.context.link.worker == "b" and engine.global_step != 3:
            evaluate(engine)

    hearings = Hearings()
    with Crew("abc", listening(hearings, options={"max_steps": 4, **options}, step=step)) as crew:
        assert crew.finish() == undisturbed(Task({"max_steps": 4, **options}))
    assert [step for step, _ in hearings["b"]] == [1, 2, 4]
    assert hearings["a"] == hearings["b"] == hearings["c"]


@holds("An evaluation right after a step waits")
def test_several_evaluations_after_one_step_and_after_the_loop_are_told_apart() -> None:
    def script(engine: Engine, before: Any) -> None:
        for batch in engine:
            before()
            engine.backward(engine.module(**batch))
            if engine.step() and engine.context.is_over:
                for name in ("first", "second"):
                    measure(engine, name)
        measure(engine, "third")

    def measure(engine: Engine, name: str) -> None:
        with engine.evaluating():
            for part in engine.shard(NUMBERS):
                engine.report(**{name: part.double().mean()})
        seen.setdefault(engine.context.link.worker, []).append(dict(engine.reports))

    seen: dict[str, list[dict[str, float]]] = {}
    with Crew("ab", Task({"max_steps": 2}, script=script)) as crew:
        crew.finish()
    assert seen["a"] == seen["b"]
    assert [sorted(reports) for reports in seen["a"]] == [["first"], ["first", "second"], ["first", "second", "third"]]
    assert len(set(seen["a"][2].values())) == 1


@holds("An evaluation right after a step waits")
@pytest.mark.parametrize("options", [{}, STAGE_3], ids=["stage 1", "stage 3"])
def test_a_worker_that_joins_hears_of_every_evaluation_from_its_first_step_on(options: dict[str, Any]) -> None:
    """As a standby, and in stage 3 with lanes, though it has no body of the step after which it joins. Its lanes are
    missing after the step with which it gets its first ones.
    """

    def step(engine: Engine) -> None:
        if engine.step():
            evaluate(engine)

    hearings, job = Hearings(), {"max_steps": 12, **options}
    with Crew("ab", listening(hearings, options=job, step=step)) as crew:
        crew.train_to(2)
        crew.add("c")
        crew.train_until("c has joined", lambda: "c" in hearings)
        assert crew.finish() == undisturbed(Task(job))
        assert crew.workers["c"].engine.lanes
    right = heard_alone(options=job, step=step)
    assert hearings["a"] == hearings["b"] and [step for step, _ in hearings["a"]] == [step for step, _ in right]
    assert sum(mine != one for mine, one in zip(hearings["a"], right, strict=True)) <= 1
    assert len(hearings["c"]) < 12 and hearings["c"] == hearings["a"][-len(hearings["c"]) :]


@pytest.mark.parametrize("options", [{}, STAGE_3], ids=["stage 1", "stage 3"])
def test_where_none_evaluates_nothing_is_said_of_it_and_each_step_has_one_vote(options: dict[str, Any]) -> None:
    votes = Counter[int]()
    with Crew("abc", Task({"max_steps": 4, **options})) as crew:
        crew.watchers.append(lambda worker, point, step: votes.update([step] if point == "vote" else []))
        crew.train_to(3)
        assert [votes[step] for step in (2, 3)] == [3, 3]
        world = crew.workers["a"].engine.context.world
        assert world is not None and wire_of(world.group).posts
        assert not [way for _, way in wire_of(world.group).posts if way[-1] in (EVALUATED, AWAITED)]
        crew.finish()


# ---- losses


@rule(
    "Survivors of a loss have the same numbers of an evaluation: who lacks what another has got of it before the world "
    "broke is given it before the next world opens, else they exchange it again",
    "Data, evaluations and the doors",
    broken_by=[
        Edit("shoal.training.resize", "        self._boundary.agree_on_evaluations(world)\n", ""),
        Edit(
            "shoal.training.evaluation",
            "            self._delivered = rows[recovery.counted.index(True)][1]\n",
            "            self._delivered = 0\n",
            by="test_who_is_given_states_is_told_no_more_than_they_know",
        ),
        Edit(
            "shoal.training.evaluation",
            "over.before == len(self.measured.numbers)",
            "not self.measured.numbers",
            by="test_what_was_measured_before_is_no_reason_to_give_up_the_next_one",
        ),
    ],
)
@pytest.mark.parametrize("options", [{}, STAGE_3], ids=["stage 1", "stage 3"])
@pytest.mark.parametrize("when", ["before", "in", "after"])
def test_survivors_of_a_kill_around_the_exchange_are_told_the_same_once(
    when: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`in`: one of two has its sums, and has told what comes of all, when the third dies."""
    hearings, senders, say = Hearings(), set[int](), EvaluationRound._say

    def strike(round: EvaluationRound, message: list[Any]) -> None:
        group, victim = round.group, crew.workers["c"]
        if when == "in" and message[0] == 0 and group.size == 3:
            if group.rank == victim.engine.rank:
                victim.wait(lambda: len(senders) == 2)
                round._others = [crew.workers["a"].engine.rank]
                say(round, message)
                victim.wait(lambda: "a" in hearings)
                raise Killed
            senders.add(group.rank)
        say(round, message)

    def step(engine: Engine) -> None:
        if engine.step() and engine.global_step == 2:
            with engine.evaluating():
                for part in engine.shard(NUMBERS):
                    engine.report(seen=part.double().mean())
                    if when == "before" and engine.context.link.worker == "c":
                        raise Killed
            if when == "after" and engine.context.link.worker == "c":
                raise Killed

    monkeypatch.setattr(EvaluationRound, "_say", strike)
    task = {"options": {"max_steps": 4, **options}}
    with Crew("abc", listening(hearings, **task, step=step)) as crew:
        assert crew.finish() == undisturbed(Task(**task))
        assert not crew.workers["c"].alive
    assert hearings["a"] == hearings["b"] and [step for step, _ in hearings["a"]] == [2]
    if when == "in":
        assert hearings["a"] == heard_alone(**task)[:1], "nothing of the dead is lost"


@holds("Survivors of a loss have the same numbers")
def test_what_was_measured_before_is_no_reason_to_give_up_the_next_one() -> None:
    """A second evaluation after the same step, in which a worker dies."""

    def step(engine: Engine) -> None:
        if engine.step() and engine.global_step == 2:
            evaluate(engine)
            with engine.evaluating():
                for part in engine.shard(NUMBERS):
                    engine.report(seen=1 + part.double().mean())
                    if engine.context.link.worker == "c":
                        raise Killed

    hearings = Hearings()
    with Crew("abc", listening(hearings, options={"max_steps": 4}, step=step)) as crew:
        crew.finish()
    assert hearings["a"] == hearings["b"] and [step for step, _ in hearings["a"]] == [2, 2]


@holds("Survivors of a loss have the same numbers")
def test_a_tracker_of_the_next_rank_0_is_told_what_the_last_one_may_not_have_written(tmp_path: Path) -> None:
    """Rank 0 dies before it has; the line of that step is the one that it wrote, and has all."""

    def prepare(engine: Engine) -> None:
        def die(_: dict[str, float]) -> None:
            raise Killed

        if engine.context.link.worker == "a":
            engine.parts.evaluation.measured.add_observer(die)
        engine.on_step(CSV(path))

    path = tmp_path / "steps.csv"
    with Crew("abc", Task({"max_steps": 4}, step=after_even_steps, prepare=prepare)) as crew:
        crew.finish()
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["step"] for row in found] == ["1", "2", "3", "4"]
    assert [bool(row["seen"]) for row in found] == [False, True, False, True]
    assert all(row["loss"] for row in found)


@holds("Survivors of a loss have the same numbers")
def test_who_is_given_states_is_told_no_more_than_they_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a recovery: of two evaluations the states that it was given know the first."""
    rows, numbers = torch.tensor([[2, 1], [2, 2], [0, 0]]), [{"seen": 1.0}, {"seen": 2.0}]
    group = SimpleNamespace(all_gather=lambda _: rows)
    plan = SimpleNamespace(recovery=SimpleNamespace(counted=(True, True, False)))
    monkeypatch.setattr(evaluation, "receive_framed", lambda *_: json.dumps(numbers).encode())
    newcomer, heard_of = evaluation.Measured(), list[dict[str, float]]()
    newcomer.add_listener(heard_of.append)
    newcomer.agree(cast(World, SimpleNamespace(plan=plan, rank=2, group=group)))
    newcomer.tell(is_first=False)
    assert newcomer.numbers == numbers and heard_of == [{"seen": 2.0}]


def test_a_worker_that_comes_after_an_evaluation_has_the_others_callbacks_as_they_are() -> None:
    """Where another one is lost before the next step."""
    hearings, stopping = Hearings(), dict[str, EarlyStopping]()

    def prepare(engine: Engine) -> None:
        stopping[engine.context.link.worker] = callback = EarlyStopping("seen", patience=9)
        engine.on_step(callback)
        listened.prepare(engine)

    listened = listening(hearings)
    with Crew("abc", Task({"max_steps": 6}, step=after_even_steps, prepare=prepare)) as crew:
        crew.train_to(2)
        crew.until("all have heard of it", lambda: len(hearings) == 3)
        d = crew.add("d")
        crew.until("it waits to join", lambda: d.link.own.state is MemberState.JOINING)
        crew.kill("c")
        crew.finish()
        assert not crew.workers["d"].killed
    assert hearings["d"] == hearings["a"][1:]
    assert stopping["d"].state_dict() == stopping["a"].state_dict() == stopping["b"].state_dict()
    assert stopping["a"].worse == 2


# ---- what follows from it


@rule(
    "An export that is asked for between a step and the next batch has the weights and buffers of that step, and is "
    "whole before the next step can be committed, whoever dies",
    "Data, evaluations and the doors",
    broken_by=[
        Edit("shoal.training.boundary", "        self._requests.export_at_hand()\n", ""),
        Edit(
            "shoal.training.requests",
            "            self._context.state.buffers.put_back()  # lanes of the next step have changed them\n",
            "",
        ),
        Edit(
            "shoal.training.requests",
            "        if self._evaluation.can_ask or (context.is_busy and context.rank == 0):\n",
            "        if context.is_busy and context.rank == 0:\n",
        ),
        Edit(
            "shoal.training.requests",
            "        return path in self._evaluation.asked\n",
            "        return False\n",
            by="test_a_standby_that_hears_of_the_best_number_later_exports_no_other_weights",
        ),
    ],
)
@pytest.mark.parametrize(
    ("names", "options"), [("a", {}), ("abc", {}), ("ab", STAGE_3)], ids=["alone", "three", "stage 3"]
)
def test_the_best_weights_are_those_that_were_measured(names: str, options: dict[str, Any], tmp_path: Path) -> None:
    """With batch normalization; by the last evaluation too, and no later ones over them."""
    path, weights = tmp_path / "best.safetensors", dict[int, dict[str, torch.Tensor]]()

    def prepare(engine: Engine) -> None:
        engine.on_step(SaveBest(path, "score", mode="max"))
        engine.on_step(lambda now: keep(now, weights))

    def step(engine: Engine) -> None:
        if engine.step() and engine.global_step in best:
            with engine.evaluating():
                for _ in engine.shard(NUMBERS):
                    engine.report(score=engine.global_step)

    for best in ([2], [2, 4]):
        task = Task({"max_steps": 4, **options}, step=step, prepare=prepare)
        with Crew(names, task) as crew:
            crew.finish()
        found, moved = load_file(path), "norm.running_mean"
        assert not torch.equal(weights[2][moved], weights[4][moved])
        assert all(torch.equal(found[name], weights[best[-1]][name]) for name in found)


@holds("An export that is asked for between")
def test_a_standby_that_hears_of_the_best_number_later_exports_no_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number is the best, while there is one."""
    monkeypatch.setattr("crew.answer", answering({"c"}))
    path, weights, with_standby = tmp_path / "best.safetensors", dict[int, dict[str, torch.Tensor]](), set[int]()

    def prepare(engine: Engine) -> None:
        engine.on_step(SaveBest(path, "score", mode="max"))
        engine.on_step(lambda now: keep(now, weights))

    def step(engine: Engine) -> None:
        if not engine.step() or engine.context.world is None:
            return
        if engine.global_step < 9 and any(not share.lanes for share in engine.context.world.plan.shares):
            with_standby.add(engine.global_step)
            with engine.evaluating():
                for _ in engine.shard(NUMBERS):
                    engine.report(score=engine.global_step)

    with Crew("ab", Task({"max_steps": 12}, step=step, prepare=prepare)) as crew:
        crew.train_to(2)
        crew.add("c")
        crew.finish()
    found = load_file(path)
    assert max(with_standby) == 8 and all(torch.equal(found[name], weights[max(with_standby)][name]) for name in found)


def keep(engine: Engine, weights: dict[int, dict[str, torch.Tensor]]) -> None:
    with engine.gathered():
        named = engine.module.state_dict()
        weights[engine.global_step] = {name: value.detach().clone() for name, value in named.items()}


@holds("An export that is asked for between")
@pytest.mark.parametrize("victim", ["rank 0", "another"])
def test_a_kill_while_they_are_written_costs_nothing_of_them(
    victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 in the midst of its file, or the only other owner of a part of the model while it is written."""
    path, weights, struck = tmp_path / "best.safetensors", dict[int, dict[str, torch.Tensor]](), list[int]()
    real = requests.export

    def export(*given: Any) -> None:
        if not struck:
            struck.append(1)
            if victim == "rank 0":
                raise Killed
            crew.workers["c"].killed = True
        real(*given)

    def step(engine: Engine) -> None:
        if engine.step() and engine.global_step == 2:
            evaluate(engine)
            engine.export(path)

    monkeypatch.setattr(requests, "export", export)
    task = Task({"max_steps": 4}, step=step, prepare=lambda engine: engine.on_step(lambda now: keep(now, weights)))
    with Crew("abc", task) as crew:
        crew.finish()
        assert sum(worker.killed for worker in crew.workers.values()) == 1
    found = load_file(path)
    assert all(torch.equal(found[name], weights[2][name]) for name in found)


def test_trackers_show_an_evaluation_under_its_step_beside_what_it_has(tmp_path: Path) -> None:
    """The last one too."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def prepare(engine: Engine) -> None:
        engine.on_step(CSV(tmp_path / "steps.csv"))
        engine.on_step(TensorBoard(tmp_path / "board"))

    alone(Task({"max_steps": 4}, step=after_even_steps, prepare=prepare))
    with (tmp_path / "steps.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], bool(row["seen"]), bool(row["loss"])) for row in rows] == [
        ("1", False, True), ("2", True, True), ("3", False, True), ("4", True, True),
    ]  # fmt: skip
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [scalar.step for scalar in board.Scalars("loss")] == [1, 2, 3, 4]
    assert [scalar.step for scalar in board.Scalars("seen")] == [2, 4]


def test_a_number_of_the_last_evaluation_alone_is_not_missed(capsys: pytest.CaptureFixture[str]) -> None:
    def step(engine: Engine) -> None:
        if engine.step() and engine.context.is_over:
            evaluate(engine)

    alone(Task({"max_steps": 2}, step=step, prepare=lambda engine: engine.on_step(EarlyStopping("seen"))))
    assert "number_never_reported" not in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [None, SaveBest, EarlyStopping(), "print"])
def test_what_cannot_be_called_for_an_evaluation_is_one_sentence(wrong: Any) -> None:
    engine = engine_of(Task(), AloneLink(), Faults([]))
    with pytest.raises(UserError, match=r"engine\.on_evaluation got .*; expected a function that takes the engine"):
        engine.on_evaluation(wrong)


@pytest.mark.parametrize("message", [b"{", b"[7, {}]", b"[1]", b"[null, 3]"])
def test_what_no_worker_says_of_an_evaluation_is_refused(message: bytes) -> None:
    with pytest.raises(PeerError, match="what another worker said of its evaluation cannot be read"):
        _Stream().take(message)
