"""What a script has registered, in checkpoints of steps that an evaluation follows: through kills and changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, Killed, Task, Worker, undisturbed
from crew_saves import saved
from idle_members import answering
from rule import Edit, holds, rule
from safetensors.torch import load_file
from shoal.callbacks import EarlyStopping, SaveBest
from shoal.checkpoint.catalogue import look_into, saves
from shoal.checkpoint.manifest import MANIFEST
from shoal.checkpoint.storage import LocalStorage
from shoal.core.checkpoint_errors import CheckpointDamaged
from shoal.core.plain import decode
from shoal.core.saving import BUSY
from shoal.exchange.evaluation_round import EvaluationRound
from shoal.group.group import WorldChanged
from shoal.training.engine import Engine
from tiers import check

pytestmark = check("saves in crews of several workers")

EVEN = range(2, 99, 2)
SCORES = (0.5, 0.75, 0.25)
"""What evaluations find, in turn: that after step 2 is the best one."""


class Seen:
    """A script's own state: scores that it has heard of, and how far its body has come."""

    def __init__(self) -> None:
        self.scores: list[tuple[int, float]] = []
        self.begun = self.ended = 0

    def state_dict(self) -> dict[str, Any]:
        return {"scores": torch.tensor(self.scores, dtype=torch.float64), "begun": self.begun, "ended": self.ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scores = [(int(step), score) for step, score in state["scores"].tolist()]
        self.begun, self.ended = state["begun"], state["ended"]


def evaluate(engine: Engine) -> None:
    with engine.evaluating():
        for _ in engine.shard(range(8)):
            engine.report(score=SCORES[engine.global_step % 3])


class Script:
    """Evaluates after the steps `at`, and looks at what it was told then."""

    def __init__(
        self, folder: Path, every: int, at: Iterable[int], evaluates: Callable[[Engine], object] = evaluate
    ) -> None:
        self.folder, self._at, self._evaluates = folder, frozenset(at), evaluates
        self._saving = {"path": str(folder), "every_steps": every, "keep": 99}
        self.seen: dict[str, Seen] = {}

    def task(self, steps: int, **options: Any) -> Task:
        shoal = {"checkpoint": {**self._saving, **options.pop("checkpoint", {})}}
        return Task({"max_steps": steps, "shoal": shoal, **options}, prepare=self._prepare, in_loop=self._begin,
                    step=self._step)  # fmt: skip

    def _prepare(self, engine: Engine) -> None:
        seen = self.seen[engine.context.link.worker] = Seen()
        engine.register_state("seen", seen)
        engine.on_step(EarlyStopping("score", patience=99))
        engine.on_evaluation(lambda now: seen.scores.append((now.global_step, now.reports["score"])))

    def _begin(self, engine: Engine) -> None:
        self.seen[engine.context.link.worker].begun = engine.global_step + 1

    def _step(self, engine: Engine) -> None:
        if engine.step() and engine.global_step in self._at:
            self._evaluates(engine)
        self.seen[engine.context.link.worker].ended = engine.global_step

    def check(self, body: bool = True) -> set[int]:
        """Every whole checkpoint has what came of all evaluations up to its step, and nothing later. Returns their
        steps. `body`: also how far the body had come.
        """
        storage, found = LocalStorage(self.folder), set[int]()
        for name in saves(storage):
            try:
                one = look_into(storage, name)
            except CheckpointDamaged:
                continue  # its save was lost with a worker
            tensors, states = one.reader().tensors(), one.manifest.states
            right = [(step, SCORES[step % 3]) for step in range(1, name.step + 1) if step in self._at]
            seen = decode(states["seen"], tensors)
            assert [(int(step), score) for step, score in seen["scores"].tolist()] == right, name
            judged = decode(states["EarlyStopping score"], tensors)
            best = min((score for _, score in right), default=None)
            assert (judged["step"], judged["best"]) == (name.step, best), name
            assert not body or (seen["begun"], seen["ended"]) == (name.step, name.step), name
            found.add(name.step)
        return found


@rule(
    "What a script has registered stands in a checkpoint as it is when the script is through with the step and has "
    "heard of all evaluations right after it; the blocks are written meanwhile, and no worker waits for it",
    "Data, evaluations and the doors",
    broken_by=[
        Edit(
            "shoal.training.checkpoint_saving",
            "        saver.begin(SaveTask(part, name, snapshot, lead, ours), copy_seconds=time.monotonic() - began)\n",
            "        saver.begin(SaveTask(part, name, snapshot, lead, ours), copy_seconds=time.monotonic() - began)\n"
            "        self.states.take()\n",
        ),
        Edit(
            "shoal.training.boundary",
            "            self._saving.states.take()\n",
            "",
        ),
        Edit(
            "shoal.training.evaluation",
            "        self.after_telling()\n",
            "",
            by="test_a_leader_that_does_not_evaluate_saves_what_it_hears_of_others",
        ),
        Edit(
            "shoal.core.saving",
            "None if vote.owed else vote.sound",
            "vote.sound",
            by="test_a_vote_that_settles_a_step_amid_an_evaluation_completes_no_checkpoint",
        ),
        Edit(
            "shoal.training.boundary",
            "        if not self._owed:  # else the script may be in the midst of an evaluation\n",
            "        if True:\n",
            by="test_a_vote_that_settles_a_step_amid_an_evaluation_completes_no_checkpoint",
        ),
    ],
)
@pytest.mark.parametrize(
    ("names", "options"),
    [("a", {}), ("abc", {}), ("ab", {"stage": 3, "checkpoint": {"stream": True}})],
    ids=["alone", "uneven lanes", "stage 3, streamed"],
)
def test_a_checkpoint_has_the_evaluation_right_after_its_step(
    names: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """The last step's too. Its blocks have been written before the evaluation is over."""

    def evaluates(engine: Engine) -> None:
        saver = engine.parts.saving._saver
        assert saver is not None
        if engine.global_step == 4 and engine.rank == 0:
            saver.join()
            folder, worker = "step-000000000004-*", engine.context.link.worker
            assert saver.status and not list(tmp_path.glob(f"{folder}/{MANIFEST}"))
            assert len(list(tmp_path.glob(f"{folder}/*-{worker}-*.safetensors"))) == 1
        evaluate(engine)

    script = Script(tmp_path, 4, EVEN, evaluates)
    with Crew(names, script.task(8, **options)) as crew:
        crew.train_to(4)
        saved(crew, 4)
        crew.finish()
    assert script.check() == {4, 8}


@holds("What a script has registered stands in a checkpoint")
def test_a_leader_that_does_not_evaluate_saves_what_it_hears_of_others(tmp_path: Path) -> None:
    """It has begun the next body when it hears of it."""
    script = Script(tmp_path, 4, EVEN, lambda engine: engine.rank and evaluate(engine))
    with Crew("abc", script.task(8)) as crew:
        crew.train_to(4)
        saved(crew, 4)
        crew.finish()
    assert script.check(body=False) == {4, 8}


@holds("What a script has registered stands in a checkpoint")
@pytest.mark.parametrize("victim", "ac")
@pytest.mark.parametrize("when", ["before", "in", "after"])
def test_a_kill_around_the_evaluation_leaves_no_checkpoint_that_lacks_it(
    when: str, victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the leader of the save, which is lost with it, or of another. `in`: it has said its numbers, and no more."""
    hear = EvaluationRound._hear

    def strike(round: EvaluationRound, *given: Any) -> None:
        is_victim = round.group.rank == crew.workers[victim].engine.rank
        if when == "in" and is_victim and round.group.size == 3 and round._posted:
            raise Killed
        hear(round, *given)

    def evaluates(engine: Engine) -> None:
        dies = engine.global_step == 4 and engine.context.link.worker == victim
        if dies and when == "before":
            raise Killed
        evaluate(engine)
        if dies and when == "after":
            raise Killed

    monkeypatch.setattr(EvaluationRound, "_hear", strike)
    script = Script(tmp_path, 4, range(4, 99), evaluates)
    with Crew("abc", script.task(8)) as crew:
        crew.finish()
        assert not crew.workers[victim].alive
    assert 8 in script.check()


@holds("What a script has registered stands in a checkpoint")
def test_a_vote_that_settles_a_step_amid_an_evaluation_completes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member without lanes has not come to the step's boundary when the others evaluate and all have written."""
    monkeypatch.setattr("crew.answer", answering({"d"}))
    struck, held, evaluating = list[int](), list[int](), set[str]()

    def evaluates(engine: Engine) -> None:
        context, saver = engine.context, engine.parts.saving._saver
        assert saver is not None and context.world is not None
        saver.join()
        begun = saver._save is not None and saver._save.part.save.step == engine.global_step
        if context.link.worker == "c" and begun and context.boundaries and not context.world.plan.shares[-1].lanes:
            held.append(engine.global_step)
            crew.workers["c"].wait(lambda: False)
        evaluating.add(context.link.worker)
        evaluate(engine)
        evaluating.discard(context.link.worker)

    def strike(worker: Worker, point: str, step: int) -> None:
        context = worker.engine.context
        is_standby = context.world is not None and not context.lanes and context.begins is None
        record = context.state.record
        begins = record is not None and not any(status in BUSY for status in record.saving)
        if (worker.name, point, struck) == ("d", "hand_out", []) and is_standby and begins:
            worker.wait(lambda: bool(held) and {"a", "b"} <= evaluating)
            struck.append(step)
            crew.workers["c"].killed = True
            raise WorldChanged("the connection to c broke")

    script = Script(tmp_path, 1, range(99), evaluates)
    with Crew("abc", script.task(12)) as crew:
        crew.watchers.append(strike)
        crew.train_to(2)
        crew.add("d")
        crew.finish()
    assert struck == held and held[0] in script.check()


@holds("What a script has registered stands in a checkpoint")
@pytest.mark.parametrize("asks", [False, True], ids=["due", "asked for"])
def test_checkpoints_of_steps_at_which_a_worker_joins_have_their_evaluations(asks: bool, tmp_path: Path) -> None:
    """One that joins knows of no save that is under way."""

    def evaluates(engine: Engine) -> None:
        evaluate(engine)
        if asks:
            engine.save_checkpoint()

    script = Script(tmp_path, 99 if asks else 1, range(99), evaluates)
    with Crew("ab", script.task(12)) as crew:
        crew.train_to(2)
        crew.add("c")
        crew.train_until("c has lanes", lambda: bool(crew.workers["c"].engine.lanes))
        crew.finish()
    assert 12 in script.check()


@rule(
    "A checkpoint that is asked for between a step and the next batch is of that step: each owner copies its blocks "
    "before the next update, unless one is being written; what is lost with a worker is made up for",
    "Data, evaluations and the doors",
    broken_by=[
        Edit("shoal.training.requests", "at_hand=by_script and self._evaluation.can_ask", "at_hand=False"),
        Edit("shoal.training.boundary", "            self._saving.begin(context.world)\n", ""),
        Edit(
            "shoal.training.registered_states",
            "states if step == self._context.state.step else self._settled()",
            "self._settled()",
        ),
    ],
)
@pytest.mark.parametrize("askers", ["abc", "b"])
def test_a_checkpoint_that_is_asked_for_after_a_step_is_of_that_step(askers: str, tmp_path: Path) -> None:
    """Its states too, where the leader itself asks; a job that goes on from it ends with the same bits."""

    def evaluates(engine: Engine) -> None:
        evaluate(engine)
        if engine.global_step == 3 and engine.context.link.worker in askers:
            engine.save_checkpoint()

    script = Script(tmp_path, 99, range(99), evaluates)
    with Crew("abc", script.task(6)) as crew:
        crew.train_to(3)
        saved(crew, 3)
        right = crew.finish()
    assert script.check(body=askers != "b") == {3}
    assert right == undisturbed(Task({"max_steps": 6}))
    again = Script(tmp_path, 99, range(99))
    assert undisturbed(again.task(6)) == right
    assert [step for step, _ in again.seen["w0"].scores] == [1, 2, 3, 4, 5, 6]


@holds("A checkpoint that is asked for between")
@pytest.mark.parametrize("victim", "ac")
def test_a_checkpoint_that_is_lost_with_a_worker_is_made_at_a_later_step(victim: str, tmp_path: Path) -> None:
    def evaluates(engine: Engine) -> None:
        evaluate(engine)
        if engine.global_step == 3 and engine.context.link.worker == "b":
            engine.save_checkpoint()

    script = Script(tmp_path, 99, range(99), evaluates)
    with Crew("abc", script.task(9)) as crew:
        crew.train_to(1)
        crew.plant(victim, 3, "save")
        assert crew.finish() == undisturbed(Task({"max_steps": 9}))
        assert not crew.workers[victim].alive
    assert len(script.check(body=False)) == 1


def test_a_job_that_goes_on_from_a_checkpoint_keeps_the_best_weights_that_were_found_right_after_it(
    tmp_path: Path,
) -> None:
    path, weights = tmp_path / "best.safetensors", dict[int, torch.Tensor]()

    def prepare(engine: Engine) -> None:
        engine.on_step(SaveBest(path, "score"))
        engine.on_step(
            lambda now: weights.update({now.global_step: now.module.get_parameter("up.weight").detach().clone()})
        )

    def step(engine: Engine) -> None:
        if engine.step() and engine.global_step in (3, 6):
            with engine.evaluating():
                for _ in engine.shard(range(8)):
                    engine.report(score=engine.global_step)

    saving = {"checkpoint": {"path": str(tmp_path / "saves"), "every_steps": 3}}
    with Crew("ab", Task({"max_steps": 8, "shoal": saving}, prepare=prepare, step=step)) as crew:
        crew.train_to(3)
        saved(crew, 3)
        for name in "ab":
            crew.kill(name)
        crew.until("all to be lost", lambda: crew.job.durable.current is None)
        for name in "cd":
            crew.add(name)
        crew.finish()
    assert torch.equal(load_file(path)["up.weight"], weights[3])
