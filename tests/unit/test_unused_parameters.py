"""Parameters that no lane of a step uses: left alone as by torch itself, in every world, stage and precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import ONE_AT_A_TIME, Crew, Task, engine_of, train, undisturbed
from crew_saves import saved
from dcp_folders import written
from integration.scripts import VOCABULARY
from late_device import LateDevice
from matrices import shortened
from rule import Edit, holds, rule
from shoal.checkpoint import named
from shoal.checkpoint.catalogue import checkpoints
from shoal.checkpoint.fingerprint import verify
from shoal.checkpoint.importing import import_model
from shoal.checkpoint.storage import LocalStorage
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.engine import Engine
from torch import Tensor, nn

WIDTH = 64
BF16 = {"bf16": {"enabled": True}}
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Towers(nn.Module):
    """Three heads, one of which is used at a time, and layers of which one is left out; borders lie within blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.first, self.second, self.third = (nn.Linear(WIDTH, size) for size in (100, 137, 77))
        self.never = nn.Linear(WIDTH, 90)

    def forward(self, tokens: Tensor, which: int) -> Tensor:
        hidden = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            if number != which:
                hidden = hidden + torch.tanh(layer(hidden))
        head = (self.first, self.second, self.third)[which]
        return head(hidden).float().square().mean()


def by_step(engine: Engine, batch: Any) -> None:
    """Heads take turns; each rests before it is used for the first time, and later again."""
    engine.backward(engine.module(batch["tokens"], engine.global_step // 2 % 3))
    engine.step()


def by_lane(engine: Engine, batch: Any) -> None:
    """Lanes of one step may use different ones."""
    which = (engine.global_step + int(batch["tokens"].sum()) % 5 // 4) % 3
    engine.backward(engine.module(batch["tokens"], which))
    engine.step()


def constant(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def adamw(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1, **more)


class HomeMade(torch.optim.Optimizer):
    """Adam that counts a parameter's steps as a number, and all steps in its group."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"], state["mean"] = 0, torch.full_like(parameter, 0.5)
                state["step"] += 1
                state["mean"].mul_(0.9).add_(parameter.grad, alpha=0.1)
                parameter.mul_(1 - 1e-3 * group["k"])
                parameter.sub_(state["mean"] / (1 - 0.9 ** state["step"]), alpha=group["lr"])


OPTIMIZERS: dict[str, Make] = {
    "AdamW": adamw,
    "AdamW, amsgrad": lambda model: adamw(model, amsgrad=True),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), 0.01, momentum=0.5, centered=True),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters(), 0.01),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), 0.01, weight_decay=0.1),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters(), 0.1, weight_decay=0.1),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters(), 0.01, weight_decay=0.1),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters(), 0.01, weight_decay=0.1),
    "home-made": lambda m: HomeMade(m.parameters()),
}
FORMS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0}, "1": {"stage": 1}, "2": {"stage": 2}, "3": {"stage": 3},
    "0, bf16": {"stage": 0, "precision": BF16}, "3, bf16": {"stage": 3, "precision": BF16},
    "1, files": {"stage": 1, "offload": "files"}, "3, files, bf16": {"stage": 3, "offload": "files", "precision": BF16},
    "1, host of a device": {"stage": 1, "offload": "cpu"},
    "3, host of a device": {"stage": 3, "offload": "cpu", "offload_param": True},
    "2, files of a device": {"stage": 2, "offload": "files"},
}  # fmt: skip


def towers(form: str, place: Path, optimizer: Make = adamw, **more: Any) -> Task:
    options = {"max_steps": 9, "gradient_clipping": 0, **FORMS[form], **more}
    if options.get("offload") == "files":
        options["offload"] = str(place)
    device: dict[str, Any] = {"device": LateDevice} if form.endswith("of a device") else {}
    return Task(options, model=Towers, optimizer=optimizer, scheduler=constant, body=by_step, **device)


def engine_alone(task: Task) -> Engine:
    """That has trained."""
    with ONE_AT_A_TIME:
        engine = engine_of(task, AloneLink(), Faults([]))
        train(engine, task, lambda: None)
        return engine


def plainly(batches: list[Tensor], optimizer: Make, half: torch.dtype | None = None) -> list[Tensor]:
    """What torch itself makes of the parameters, with master weights where they are in half precision."""
    torch.manual_seed(0)
    model, exact = Towers(), Towers()
    exact.load_state_dict(model.state_dict())
    model.to(half)
    update = optimizer(exact)
    for step, tokens in enumerate(batches):
        model.zero_grad()
        model(tokens, step // 2 % 3).backward()
        for one, master in zip(model.parameters(), exact.parameters(), strict=True):
            master.grad = None if one.grad is None else one.grad.float()
        update.step()
        for one, master in zip(model.parameters(), exact.parameters(), strict=True):
            one.data.copy_(master.data)
    return [parameter.data for parameter in model.parameters()]


CASES = [("1", name) for name in OPTIMIZERS] + [(form, "AdamW") for form in FORMS if form != "1"]


@rule(
    "A parameter that no lane of a step uses keeps every bit of values and state, and its optimizer counts no step of "
    "it: heads that take turns train as by torch itself",
    "A step",
    broken_by=[
        Edit(
            "shoal.state.training_state",
            "        self.held.optimizer_step.cuts = self.misses.cuts(self.layout, unused)\n",
            "",
        ),
        Edit("shoal.blocks.optimizer_step", "    return value - missed if", "    return value if"),
        Edit("shoal.blocks.optimizer_step", "                if not missed.is_new:\n", "                if True:\n"),
        Edit("shoal.training.reducing", "            self._note_used()\n", ""),
    ],
)
@pytest.mark.parametrize(
    ("form", "optimizer"),
    shortened(CASES, ("1", "AdamW"), ("1", "SGD"), ("1", "Rprop"), ("1", "home-made"), *CASES[-7:]),
)
def test_heads_that_take_turns_train_as_by_torch_itself(form: str, optimizer: str, tmp_path: Path) -> None:
    batches: list[Tensor] = []

    def noted(engine: Engine, batch: Any) -> None:
        batches.append(batch["tokens"].clone())
        by_step(engine, batch)

    task = replace(towers(form, tmp_path, OPTIMIZERS[optimizer], lanes=1), body=noted)
    engine = engine_alone(task)
    half = torch.bfloat16 if "bf16" in form else None
    with engine.gathered():
        mine = dict(engine.module.named_parameters())
        for (name, value), theirs in zip(mine.items(), plainly(batches, OPTIMIZERS[optimizer], half), strict=True):
            assert torch.equal(value, theirs), name


@rule(
    "What a parameter has missed is a number of the job: all members with lanes name it, a record rolls it forward, "
    "a joiner and a checkpoint have it",
    "A step",
    broken_by=[
        Edit(
            "shoal.exchange.vote",
            "{rank: ballots[rank].unused for rank in traffic.plan.trainers}",
            "{rank: ballot.unused for rank, ballot in enumerate(ballots) if ballot.unused}",
            by="test_what_is_unused_takes_a_hexadecimal_digit_for_four_parameters_at_most",
        ),
        Edit(
            "shoal.exchange.vote",
            "{rank: ballots[rank].unused for rank in traffic.plan.trainers}",
            "{rank: ballot.unused for rank, ballot in enumerate(ballots)}",
        ),
        Edit("shoal.blocks.loaded_state", "Missed(max(less, default=0))", "Missed()"),
        Edit("shoal.state.training_state", 'Misses.from_runs(self.layout, given["missed"])', "self.misses"),
        Edit("shoal.checkpoint.restore", "Misses.from_runs(state.layout, manifest.missed)", "state.misses"),
    ],
)
@holds("A parameter that no lane of a step uses")
@holds("An update is cut where")
@pytest.mark.parametrize("names", shortened(["a", "ab", "abc", "abcd"], "abc"))
@pytest.mark.parametrize("form", shortened(FORMS, "0", "1", "2", "3, bf16", "1, files", "3, host of a device"))
def test_every_world_leaves_the_same_parameters_alone(form: str, names: str, tmp_path: Path) -> None:
    """Through a vote that one member passed alone, and a joiner."""
    kind: Make = (lambda model: adamw(model, fused=True)) if form == "1" else adamw
    task = replace(towers(form, tmp_path, kind, mirrors=1, max_steps=14), body=by_lane)
    with Crew(names, task) as crew:
        crew.train_to(2)
        if len(names) > 1:
            crew.plant(names[-1], 3, "in_vote")
        crew.train_to(4)
        joiner = crew.add("e")
        crew.train_until("all to be in", lambda: joiner in crew.members() and crew.at_rest())
        fingerprint = crew.finish()
    in_memory = towers("0, bf16" if "bf16" in form else "0", tmp_path, kind, max_steps=14)
    assert fingerprint == undisturbed(replace(in_memory, body=by_lane))


def missed(engine: Engine) -> dict[str, int]:
    """Updates by parameter, of those that have missed any."""
    state = engine.context.state
    slots = [slot for bucket in state.layout.buckets for slot in bucket.slots]
    found = {slot.parameter.name: one.updates for slot, one in zip(slots, state.misses.of, strict=True)}
    return {name: updates for name, updates in found.items() if updates}


@holds("What a parameter has missed")
@pytest.mark.parametrize("stage", [1, 2])
def test_one_micro_batch_of_one_lane_is_enough_to_use_a_parameter(stage: int, tmp_path: Path) -> None:
    """Also on a member whose other lanes and micro-batches leave it out."""
    used: dict[int, set[int]] = {}

    def noted(engine: Engine, batch: Any) -> None:
        which = int(batch["tokens"].sum()) % 3
        used.setdefault(engine.global_step, set()).add(which)
        engine.backward(engine.module(batch["tokens"], which))
        engine.step()

    task = towers("1", tmp_path, stage=stage, lanes=2, micro_batches_per_lane=2, max_steps=8)
    with Crew("ab", replace(task, body=noted)) as crew:
        crew.train_to(8)
        found = [missed(worker.engine) for worker in crew.workers.values()]
    heads = [sum(head not in which for which in used.values()) for head in range(3)]
    assert any(heads) and len({len(which) for which in used.values()}) > 1
    for one in found:
        assert [one.get(f"{name}.weight", 0) for name in ("first", "second", "third")] == heads
        assert one["never.weight"] == 8 and "embedding.weight" not in one


def test_a_gradient_of_zeros_is_a_use_as_in_torch(tmp_path: Path) -> None:
    def zero(engine: Engine, batch: Any) -> None:
        model = engine.module
        engine.backward(model(batch["tokens"], 0) + 0 * model.never.weight.sum())
        engine.step()

    engine = engine_alone(replace(towers("1", tmp_path, max_steps=3), body=zero))
    torch.manual_seed(0)
    before = Towers().never
    assert not torch.equal(engine.module.never.weight, before.weight)  # type: ignore[union-attr,arg-type]
    assert torch.equal(engine.module.never.bias, before.bias)  # type: ignore[union-attr,arg-type]
    assert "never.weight" not in missed(engine)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_that_updates_nothing_is_missed_by_nobody(stage: int, tmp_path: Path) -> None:
    """One whose micro-batches are all skipped, and one that overflows."""

    def skipping(engine: Engine, batch: Any) -> None:
        if engine.global_step == 3:
            engine.skip()
        else:
            by_step(engine, batch)

    precision = {"fp16": {"enabled": True, "initial_scale_power": 60, "loss_scale_window": 100, "hysteresis": 1}}
    task = replace(towers("1", tmp_path, stage=stage, precision=precision, max_steps=6), body=skipping)
    updates: list[bool] = []

    def in_loop(engine: Engine, batch: Any) -> None:
        skipping(engine, batch)
        if len(updates) < engine.global_step:
            assert engine.context.state.record is not None
            updates.append(engine.context.state.record.updates)

    engine = engine_alone(replace(task, body=in_loop))
    assert updates.count(False) > 1
    assert missed(engine).get("never.weight", 0) == sum(updates)


@holds("What a parameter has missed")
@pytest.mark.parametrize("stage", shortened([0, 1, 2, 3], 1, 3))
def test_a_checkpoint_has_what_was_missed_and_torchs_own_counts(stage: int, tmp_path: Path) -> None:
    """Another world goes on from it; and what is exported for torch counts as torch does."""
    checkpoint = {"shoal": {"checkpoint": {"path": str(tmp_path), "every_steps": 4}}}
    task = towers("1", tmp_path, stage=stage, mirrors=1, max_steps=11)
    with Crew("abc", replace(task, options={**task.options, **checkpoint})) as crew:
        crew.train_to(5)
        saved(crew, 4)
    (found,) = [one for one in checkpoints(LocalStorage(tmp_path), lambda _: None) if one.manifest.step == 4]
    steps = {name: int(state["step"]) for name, state in named.states(found.reader())}
    assert [steps[f"{name}.weight"] for name in ("embedding", "first", "second", "third", "never")] == [4, 2, 2, 0, 0]

    resume = {"shoal": {"checkpoint": {"resume": found.path, "path": str(tmp_path / "later"), "every_steps": 9}}}
    with Crew("ab", replace(task, options={**task.options, **resume})) as crew:
        crew.train_to(9)
        saved(crew, 9)
        fingerprint = crew.finish()
    assert fingerprint == undisturbed(task)
    (later,) = checkpoints(LocalStorage(tmp_path / "later"), lambda _: None)
    assert verify(later.reader()).fingerprint == undisturbed(replace(task, options={**task.options, "max_steps": 9}))


@pytest.mark.parametrize(
    ("kind", "counts"),
    [(torch.optim.AdamW, True), (torch.optim.SGD, True), (torch.optim.NAdam, False), (torch.optim.ASGD, False)],
)
def test_an_optimizer_that_keeps_other_numbers_than_counts_updates_unused_parameters_too(
    kind: type[torch.optim.Optimizer], counts: bool, tmp_path: Path
) -> None:
    """With a gradient of zeros, as the limits say: nothing tells what such a number would have become without it."""
    engine = engine_alone(towers("1", tmp_path, lambda model: kind(model.parameters(), 0.01, weight_decay=0.1)))  # type: ignore[call-arg]
    torch.manual_seed(0)
    assert torch.equal(engine.module.never.weight, Towers().never.weight) is counts  # type: ignore[union-attr,arg-type]
    assert bool(missed(engine)) is counts


TURNS = (1, 0, 1, 2, 0)
"""The head of each step: of the first three by torch, then of two by a job."""
BATCHES = [torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(one)) for one in range(5)]


def trained_by_torch(steps: int, make: Make) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Towers()
    optimizer = make(model)
    for which, tokens in zip(TURNS[:steps], BATCHES, strict=False):
        optimizer.zero_grad()
        model(tokens, which).backward()
        optimizer.step()
    return model, optimizer


@holds("What a parameter has missed")
@pytest.mark.parametrize("kind", shortened(["AdamW", "SGD", "Rprop", "Adagrad"], "AdamW", "SGD"))
@pytest.mark.parametrize("way", ["loaded", "imported"])
def test_a_job_goes_on_from_torchs_own_state_of_heads_that_took_turns(way: str, kind: str, tmp_path: Path) -> None:
    """One of them was never used, and has no state there."""
    model, optimizer = trained_by_torch(3, OPTIMIZERS[kind])
    checkpoint: dict[str, Any] = {}
    if way == "imported":
        states = {name: optimizer.state[one] for name, one in model.named_parameters() if optimizer.state.get(one)}
        content = {"model": model.state_dict(), "optimizer": {"state": states, "param_groups": [{"lr": 0.01}]}}
        import_model(written(content, tmp_path / "dcp"), LocalStorage(tmp_path / "all"))
        (folder,) = (one for one in (tmp_path / "all").iterdir() if one.is_dir())
        checkpoint = {"shoal": {"checkpoint": {"path": str(tmp_path / "later"), "resume": str(folder)}}}

    def taken_over(module: nn.Module) -> torch.optim.Optimizer:
        mine = OPTIMIZERS[kind](module)
        if way == "loaded":
            module.load_state_dict(model.state_dict())
            mine.load_state_dict(optimizer.state_dict())
        return mine

    def body(engine: Engine, _: Any) -> None:
        engine.backward(engine.module(BATCHES[3 + engine.global_step], TURNS[3 + engine.global_step]))
        engine.step()

    task = replace(towers("1", tmp_path, taken_over, lanes=1, max_steps=2, **checkpoint), body=body)
    engine, (theirs, _) = engine_alone(task), trained_by_torch(5, OPTIMIZERS[kind])
    for (name, mine), other in zip(engine.module.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other), name
