"""Several networks in one module, whose groups of one optimizer are stepped in turn: a GAN, an actor and its critic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import ONE_AT_A_TIME, Crew, Task, engine_of, train, undisturbed
from gan import Gan, body, whose
from rule import Edit, holds, rule
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.engine import Engine
from shoal_protos.errors import UserError
from torch import Tensor, nn


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    assert isinstance(model, Gan)
    networks = {"generator": model.generator, "discriminator": model.discriminator}
    return torch.optim.AdamW([{"params": list(net.parameters()), "name": name} for name, net in networks.items()], 1e-3)


def constant(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def gan(stage: int, **options: Any) -> Task:
    return Task({"max_steps": 7, "stage": stage, **options}, model=Gan, optimizer=optimizer_of, body=body)


@rule(
    "An update is one of the groups whose turn it is: the others keep parameters and state, in memory and in "
    "files, and their gradients are in no norm",
    "Data, evaluations and the doors",
    broken_by=[
        Edit(
            "shoal.blocks.state_home",
            "        if not bucket.is_frozen and turns[bucket.group]\n",
            "        if not bucket.is_frozen or turns is None\n",
        ),
        Edit(
            "shoal.offload.state_place",
            "        turns = [has_turn(segments.twin.param_groups[bucket.group]) for bucket in",
            "        turns = [bool(bucket.slots) for bucket in",
        ),
        Edit(
            "shoal.training.step", "        self._forget_gradients_without_a_turn()\n        return", "        return"
        ),
        Edit(
            "shoal.optim.hyper",
            "        group[TURN] = not own.isdisjoint(names)\n",
            "        group[TURN] = group.get(TURN, False) or not own.isdisjoint(names)\n",
        ),
    ],
)
def test_only_the_group_whose_turn_it_is_changes() -> None:
    """A step of the generator leaves the discriminator and its momentum alone, though its gradient runs through it; and
    that gradient is in no norm.
    """
    seen: list[tuple[str, bool, bool]] = []

    def watched(engine: Engine, batch: Any) -> None:
        parts = [engine.module.generator, engine.module.discriminator]
        before = [[value.clone() for value in part.parameters()] for part in parts]
        turn = whose(engine)
        step = engine.global_step
        body(engine, batch)
        if engine.global_step > step:
            changed = [
                any(not torch.equal(*pair) for pair in zip(values, part.parameters(), strict=True))
                for values, part in zip(before, parts, strict=True)
            ]
            seen.append((turn, *changed))

    with ONE_AT_A_TIME:
        task = Task({"max_steps": 3, "lanes": 1}, model=Gan, optimizer=optimizer_of, body=watched)
        train(engine_of(task, AloneLink(), Faults([])), task, lambda: None)
    assert seen == [("discriminator", False, True), ("discriminator", False, True), ("generator", True, False)]


@holds("An update is one of the")
def test_it_trains_as_two_optimizers_do() -> None:
    """Against torch itself, each network with its own optimizer and its own norm."""
    batches: list[Tensor] = []

    def noted(engine: Engine, batch: Any) -> None:
        batches.append(batch["tokens"].float() / 255)
        body(engine, batch)

    with ONE_AT_A_TIME:
        options = {"max_steps": 6, "lanes": 1, "gradient_clipping": 0.05}
        task = Task(options, model=Gan, optimizer=optimizer_of, scheduler=constant, body=noted)
        engine = engine_of(task, AloneLink(), Faults([]))
        train(engine, task, lambda: None)
        torch.manual_seed(0)
        plain = Gan()
    networks: dict[str, nn.Module] = {"generator": plain.generator, "discriminator": plain.discriminator}
    optimizers = {name: torch.optim.AdamW(network.parameters(), 1e-3) for name, network in networks.items()}
    for step, real in enumerate(batches):
        turn = "generator" if step % 3 == 2 else "discriminator"
        plain.zero_grad()
        (plain.of_generator(real) if turn == "generator" else plain.of_discriminator(real)).backward()
        nn.utils.clip_grad_norm_(networks[turn].parameters(), 0.05)
        optimizers[turn].step()
    for mine, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@rule(
    "Whose turn it is, is a hyper-parameter: who runs no body takes it over before the vote, and joiners and "
    "checkpoints have it",
    "Data, evaluations and the doors",
    broken_by=Edit("shoal.optim.hyper", '        if key != "params"\n', '        if key not in ("params", "turn")\n'),
)
@holds("An update is one of the")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_world_ends_as_one_worker(stage: int) -> None:
    """Through a kill before the generator has any state, and a joiner after it."""
    right = undisturbed(gan(0))
    with Crew("abc", gan(stage)) as crew:
        crew.train_to(1)
        crew.plant("b", 2, "exchange")
        crew.train_to(4)
        crew.add("d")
        assert crew.finish() == right


@holds("Whose turn it is, is a")
def test_a_turn_reaches_a_joiner_that_replays_and_one_that_differs_fails_the_job() -> None:
    task = gan(1, max_steps=12)
    with Crew("abc", task) as crew:
        crew.train_to(3)
        joiner = crew.add("d")
        crew.train_until("d to be in", lambda: joiner in crew.members())
        assert crew.finish() == undisturbed(task)

    def each_its_own(engine: Engine, batch: Any) -> None:
        real = batch["tokens"].float() / 255
        engine.turn("generator" if engine.rank == 1 else "discriminator")
        assert isinstance(engine.module, Gan)
        engine.backward(engine.module.of_discriminator(real) + engine.module.of_generator(real))
        engine.step()

    with Crew("ab", replace(task, body=each_its_own)) as crew:
        crew.allow()
        crew.until("the job to fail", lambda: crew.job.durable.phase.is_over)
        assert "turn of optimizer group 0 is true here and false there" in crew.job.durable.reason


@rule(
    "A vote without a step compares no hyper-parameters: where the world broke, some members are in the next "
    "step's body, which has set its own, and others have not begun it",
    "Data, evaluations and the doors",
    broken_by=Edit("shoal.training.step", "        if step > context.state.step:  #", "        if step >= 0:  #"),
)
def test_values_of_the_next_body_are_not_compared_in_a_vote_without_a_step() -> None:
    """Where the world breaks between two steps, a vote settles what the last one has left, and some members may have
    begun the next body, which has set its turn or its rate, and others not.
    """

    def script(engine: Engine, before: Callable[[], None]) -> None:
        for batch in engine:
            before()
            body(engine, batch)
        engine.turn("generator" if engine.rank == 1 else "discriminator")
        engine.fingerprint()

    with Crew("ab", replace(gan(1), script=script)) as crew:
        assert crew.finish() == undisturbed(gan(1))


@holds("An update is one of the")
def test_state_in_files_stays_as_it_is_where_it_is_not_its_turn(tmp_path: Path) -> None:
    """With updates that carry it through buffers, in another stage."""
    with Crew("ab", gan(2, offload=tmp_path)) as crew:
        crew.train_to(3)
        crew.plant("b", 4, "exchange")
        assert crew.finish() == undisturbed(gan(0))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_that_takes_no_turns_is_told_once_which_networks_the_saved_one_leaves(
    stage: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whose step 4 was the discriminator's. A run that takes turns hears nothing."""
    saving: dict[str, Any] = {"shoal": {"checkpoint": {"path": str(tmp_path), "every_steps": 4}}}

    def without_turns(engine: Engine, batch: Any) -> None:
        assert isinstance(engine.module, Gan)
        engine.backward(engine.module.of_generator(batch["tokens"].float() / 255))
        engine.step()

    with Crew("ab", gan(1, **{**saving, "max_steps": 4})) as crew:
        crew.finish()
    from_there = {"shoal": {"checkpoint": {"resume": str(next(tmp_path.glob("step-*4-*")))}}}
    for script, times in ((without_turns, 3), (body, 0)):
        capsys.readouterr()
        with Crew("abc", replace(gan(stage, **from_there), body=script)) as crew:
            crew.train_to(5)
            crew.plant("c", 6, "exchange")
            crew.finish()
        lines = [line for line in capsys.readouterr().err.splitlines() if "turn_as_saved" in line]
        assert len(lines) == times and all('"stay": ["generator"]' in line for line in lines)


def test_names_that_no_group_has_are_refused() -> None:
    engine = engine_of(gan(1), AloneLink(), Faults([]))
    with pytest.raises(UserError) as refused:
        engine.turn("critic")
    assert str(refused.value) == (
        "engine.turn got 'critic'; expected names of the optimizer's groups: generator, discriminator."
    )
    nameless = engine_of(Task({"max_steps": 1}), AloneLink(), Faults([]))
    with pytest.raises(UserError, match='expected names of the optimizer\'s groups: none \\(give each a "name"'):
        nameless.turn("critic")
    with pytest.raises(UserError, match=r"engine\.turn got no name"):
        engine.turn()
