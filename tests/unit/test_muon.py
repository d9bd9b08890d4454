"""Muon: the bits of plain torch at one lane, and those of one worker in every world, through changes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import ONE_AT_A_TIME, Crew, Task, engine_of, undisturbed
from crew_saves import saved
from matrices import shortened
from memory_group import MemoryGroup
from rule import Edit, holds, rule
from shoal.core.anchors import anchors, equal_cut
from shoal.core.laying_out import lay_out
from shoal.core.layout import Trainable
from shoal.exchange.traffic import PARTS, RETURNED
from shoal.optim.several import several
from shoal.optim.twin import whole_updates
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal_protos.acts import DrainWorker
from shoal_protos.errors import UserError
from torch import Tensor, nn
from whole_models import FORMS, Mixed, Net, trained_here

STEPS = 6


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.requires_grad], lr=2e-2, adjust_lr_fn="match_rms_adamw")


def task(**options: Any) -> Task:
    return Task({"max_steps": STEPS, "gradient_clipping": 0.05, **options}, model=Net, optimizer=muon)


def list_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [model.a.weight, model.b.weight, model.c.weight, model.unused.weight, model.back.weight]
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [torch.optim.Muon(matrices, lr=2e-2), torch.optim.AdamW(rest, lr=1e-3)]


def mixed(**options: Any) -> Task:
    given = {"max_steps": 8, "gradient_clipping": 0.05, **options}
    return Task(given, Mixed, lambda model: several(list_of(model)), lambda _: None)


class Jordan(torch.optim.Optimizer):
    """In own words what the classes do that came with the text on Muon: another norm, and other roundings."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(momentum, group["momentum"])
                rows = x.view(len(x), -1).bfloat16() if x.ndim == 4 else x.bfloat16()
                rows = rows.mT if rows.size(-2) > rows.size(-1) else rows
                rows = rows / (rows.norm(dim=(-2, -1), keepdim=True) + 1e-7)
                for _ in range(5):
                    square = rows @ rows.mT
                    rows = 3.4445 * rows + (-4.7750 * square + 2.0315 * square @ square) @ rows
                rows = rows if rows.shape == (len(x), x.numel() // len(x)) else rows.mT
                rows = rows * max(1, x.size(-2) / x.size(-1)) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(rows.reshape(p.shape), alpha=-group["lr"])


SingleDeviceMuon = type("SingleDeviceMuon", (Jordan,), {})


@pytest.mark.parametrize("kind", [muon, lambda model: SingleDeviceMuon(model.parameters())])
def test_at_one_lane_weights_are_those_of_the_class_itself(
    kind: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    mine, theirs = trained_here(task(), kind)
    *used, unused = zip(mine, theirs, strict=True)
    assert all(one.equal(other) for one, other in used)
    assert unused[0].equal(unused[1]) or kind is not muon  # its class trains what has no gradient too


def test_beside_another_optimizer_weights_are_those_of_plain_torch() -> None:
    given = mixed()
    for mine, theirs in zip(*trained_here(given, given.optimizer), strict=True):
        assert mine.equal(theirs)


@holds("Tensors that are updated whole")
@pytest.mark.parametrize(
    ("form", "stage"), shortened(product(("clipped", "bf16", "on the host"), range(4)), ("clipped", 0), ("bf16", 3))
)
def test_beside_another_optimizer_bits_survive_a_death_and_a_join(form: str, stage: int) -> None:
    with Crew("abc", mixed(stage=stage, **FORMS[form])) as crew:
        crew.train_to(2)
        crew.plant("b", 3, "shape")
        crew.train_to(4)
        crew.add("d")
        assert crew.finish() == undisturbed(mixed(**FORMS[form]))


@rule(
    "An update of a whole tensor that is not finite is found at its home, before the vote, so nobody makes its step",
    "A step",
    broken_by=Edit("shoal.exchange.shaping", "for (slot, column, _), total in zip(self._made, totals, strict=True):",
                   "for (slot, column, _), total in ():"),
)  # fmt: skip
def test_an_update_that_is_not_finite_ends_the_job_before_its_step_by_the_parameters_name() -> None:
    def spoil(engine: Any) -> None:
        for group in engine.context.state.optimizer.param_groups if engine.global_step == 2 else ():
            group["ns_coefficients"] = (float("nan"), 0.0, 0.0)

    given = Task({"max_steps": STEPS}, model=Net, optimizer=muon, in_loop=spoil)
    with Crew("abc", given) as crew:
        crew.allow()
        crew.until("the end", lambda: crew.job.durable.phase.is_over)
        assert 'the update of parameter "' in crew.job.durable.reason, crew.story()
        assert {worker.engine.global_step for worker in crew.workers.values()} == {2}


@rule(
    "What is computed of whole tensors before the vote is of gradients that are clipped by the norm which it will find",
    "A step",
    broken_by=[
        Edit("shoal.training.step", "if norms is not None else 1.0", "if False else 1.0"),
        Edit("shoal.blocks.whole_tensors", "of_state, cut(run.gradient), scale)", "of_state, cut(run.gradient))"),
    ],
)
def test_clipped_gradients_are_those_of_plain_torch() -> None:
    given, clipping = mixed(), 0.01
    for mine, theirs in zip(*trained_here(given, given.optimizer, clipping), strict=True):
        assert mine.equal(theirs)


def test_a_class_that_only_has_the_name_is_not_taken_for_it() -> None:
    class Other(Jordan):
        def step(self, closure: None = None) -> None:
            super().step(closure)
            super().step(closure)

    named = type("Muon", (Other,), {})
    assert whole_updates(named([nn.Parameter(torch.zeros(8, 8))])) == [None]


class Plain(Jordan):
    """Steps along the gradient."""

    def step(self, closure: None = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


class Coupled(Jordan):
    """Adds the decay to the gradient."""

    def step(self, closure: None = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad.add_(p, alpha=self.param_groups[0]["weight_decay"])
        decay, self.param_groups[0]["weight_decay"] = self.param_groups[0]["weight_decay"], 0.0
        super().step()
        self.param_groups[0]["weight_decay"] = decay


@pytest.mark.parametrize(("kind", "is_taken"), [(Jordan, True), (Plain, False), (Coupled, False)])
def test_a_rate_and_a_decay_that_begin_with_zero_hide_no_other_numbers(
    kind: type[torch.optim.Optimizer], is_taken: bool
) -> None:
    optimizer = type("Muon", (kind,), {})([nn.Parameter(torch.zeros(8, 8))])
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    assert [one is not None for one in whole_updates(optimizer)] == [is_taken]


class Counted(Jordan):
    """By its group's number of passes."""

    def step(self, closure: None = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"] if group["passes"] != 5 else ():
                p.mul_(0.5)


def test_each_group_is_judged_by_its_own_values() -> None:
    pair = [{"params": [nn.Parameter(torch.zeros(8, 8))]} for _ in range(2)]
    counted = type("Muon", (Counted,), {})(pair)
    for passes in ((5, 4), (4, 5)):
        for group, number in zip(counted.param_groups, passes, strict=True):
            group["passes"] = number
        assert [one is not None for one in whole_updates(counted)] == [number == 5 for number in passes]
    plain = torch.optim.Muon([{**one, "ns_steps": 4 + at, "nesterov": bool(at)} for at, one in enumerate(pair)])
    assert all(one is not None for one in whole_updates(plain))


@rule(
    "Tensors that are updated whole are computed at one home, from parts of all owners, and what comes back goes to "
    "all who update one of the tensor's blocks: owner, mirrors and who is filling it",
    "A step",
    broken_by=Edit(
        "shoal.exchange.shaping",
        "for runs in self.traffic.replays(boundaries)]",
        "for runs in self.traffic.owned]",
    ),
)
@pytest.mark.parametrize(
    ("workers", "stage"),
    shortened(product(["ab", "abc", "abcd", "abcde"], range(4)), ("ab", 0), ("abcde", 1), ("abc", 3)),
)
def test_every_world_gives_the_same_bits(workers: str, stage: int) -> None:
    with Crew(workers, task(stage=stage, lanes=8)) as crew:
        assert crew.finish() == undisturbed(task(lanes=8))


POINTS = ("exchange", "mirror", "shape", "vote", "optimizer", "hand_out")
KEPT = [
    ("mirror", "clipped", 0), ("shape", "clipped", 1), ("vote", "bf16", 2), ("optimizer", "on the host", 1),
    ("hand_out", "two micro-batches, two mirrors", 3), ("exchange", "not clipped", 1), ("shape", "bf16", 3),
]  # fmt: skip


@rule(
    "A tensor's home is the owner of its anchor block in the world at hand",
    "A change of the world",
    broken_by=Edit(
        "shoal.training.step",
        "if self._shaping is None or self._shaping.traffic is not world.traffic:",
        "if self._shaping is None:",
    ),
)
@rule(
    "What is made of whole tensors is here before the vote: pending means gradient and update both, so a member that "
    "has passed the vote needs no other for its commit",
    "A step",
    broken_by=Edit(
        "shoal.training.step",
        "        self._shape(norms)\n        wait_for(sends, self._world.group)\n"
        "        record = self._pass_vote(reduction.find_bad_gradient, norms)"
        "  # past this line the step is committed\n",
        "        wait_for(sends, self._world.group)\n"
        "        record = self._pass_vote(reduction.find_bad_gradient, norms)  # past this line the step is committed\n"
        "        self._shape(norms)\n",
    ),
)
@rule(
    "Nothing of state is written before the vote where tensors are updated whole: parts are copies",
    "A step",
    broken_by=Edit(
        "shoal.optim.muon",
        "moved = torch.lerp(momentum, gradient, 1 - beta)",
        "moved = momentum.lerp_(gradient, 1 - beta).clone()",
    ),
)
@holds("Tensors that are updated whole")
@pytest.mark.parametrize(("point", "form", "stage"), shortened(product(POINTS, FORMS, range(4)), *KEPT))
def test_bits_survive_a_death_at_any_point_and_a_join(point: str, form: str, stage: int) -> None:
    given = {**FORMS[form], "max_steps": 8}
    with Crew("abc", task(stage=stage, **given)) as crew:
        crew.train_to(2)
        crew.plant("b", 3, point)
        crew.train_to(4)
        crew.add("d")
        assert crew.finish() == undisturbed(task(**given))


@pytest.mark.parametrize("stage", shortened(range(4), 1))
def test_bits_survive_a_drain_and_the_loss_of_most(stage: int) -> None:
    with Crew("abcd", task(stage=stage, max_steps=9)) as crew:
        crew.train_to(2)
        crew.request(DrainWorker("a"))
        crew.train_to(5)
        crew.kill("b")
        crew.train_to(7)
        crew.kill("c")
        assert crew.finish() == undisturbed(task(max_steps=9))


@pytest.mark.parametrize(("before", "after"), shortened([("a", "abc"), ("abc", "a"), ("ab", "abcd")], ("abc", "a")))
def test_a_checkpoint_of_any_world_is_gone_on_from_in_another(before: str, after: str, tmp_path: Path) -> None:
    def saving(place: str, **checkpoint: Any) -> Task:
        return task(stage=1, max_steps=8, shoal={"checkpoint": {"path": str(tmp_path / place), **checkpoint}})

    with Crew(before, saving("first", every_steps=4)) as crew:
        crew.train_to(5)
        saved(crew, 4)
    resume = str(next((tmp_path / "first").glob("step-000000000004-*")))
    with Crew(after, saving("second", resume=resume)) as crew:
        assert crew.finish() == undisturbed(task(max_steps=8))


@rule(
    "What a whole tensor has of its first and last block is taken alone, as kernels round the last of a run otherwise",
    "Arithmetic and layout",
    broken_by=[
        Edit("shoal.core.anchors", "end = min(last, (first // size + blocks) * size)", "end = last"),
        Edit("shoal.core.anchors", "blocks = 1 if first % size else max(", "blocks = max("),
        Edit("shoal.core.anchors", "min(longest // size, (last - first) // size)", "(last - first) // size"),
        Edit("shoal.core.anchors", " if threads == 1 else LONGEST_SHARED", ""),
    ],
)
def test_a_tensor_is_cut_at_its_first_and_last_block_and_into_runs_of_one_thread() -> None:
    layout = lay_out([Trainable(f"p{n}", shape, torch.float32, 0) for n, shape in enumerate([(70, 100), (33, 77)])])
    (bucket,) = layout.buckets
    first, second = bucket.slots
    end = second.start + second.parameter.elements
    assert [*equal_cut((bucket, second), 0, bucket.elements, 1)] == [
        (second.start, 4096), (4096, 8192), (8192, end)
    ]  # fmt: skip
    assert [*equal_cut((bucket, second), 4096, 8192, 1)] == [(4096, 8192)]
    assert [*equal_cut((bucket, first), 4096, 8192, 1)] == []
    shapes = [(300, 401), (40, 5)]
    (large,) = lay_out([Trainable(f"p{n}", shape, torch.float32, 0) for n, shape in enumerate(shapes)]).buckets
    tensor = large.slots[1]
    for threads, between in ((1, [114_688]), (2, [28_672] * 4)):
        pieces = [*equal_cut((large, tensor), 0, large.elements, threads)]
        assert pieces[0] == (tensor.start, 4096) and tensor.start % 4096, "its part of the first block"
        assert [stop - start for start, stop in pieces[1:-1]] == between
        assert pieces[-1] == (pieces[-2][1], tensor.start + tensor.parameter.elements)
    assert [*equal_cut((large, tensor), 8192, 16_384, 1)] == [(8192, 16_384)], (
        "together, where one world has no more of it"
    )


def test_a_member_without_lanes_updates_with_what_the_body_has_set() -> None:
    def momentum(engine: Any) -> None:
        for group in engine.context.state.optimizer.param_groups:
            group["momentum"] = 0.9 if engine.global_step % 2 else 0.5

    given = Task({"max_steps": STEPS}, model=Net, optimizer=muon, in_loop=momentum)
    with Crew("ab", given) as crew:
        crew.train_to(2)
        crew.add("c")
        assert crew.finish() == undisturbed(given)


def test_a_step_that_overflows_drops_what_was_made_for_it() -> None:
    fp16 = {
        "precision": {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}}
    }
    with Crew("abc", task(**fp16)) as crew:
        crew.train_to(2)
        crew.kill("c")
        assert crew.finish() == undisturbed(task(**fp16))


@holds("A tensor's home is")
def test_anchors_spread_the_cost_over_block_numbers() -> None:
    shapes = [(768, 768)] * 4 * 8 + [(3072, 768)] * 2 * 8
    layout = lay_out([Trainable(f"p{n}", shape, torch.float32, 0) for n, shape in enumerate(shapes)])
    places = [(bucket, slot) for bucket in layout.buckets for slot in bucket.slots]
    costs = [min(slot.parameter.shape) ** 2 * max(slot.parameter.shape) for _, slot in places]
    found = anchors(layout, places, costs)
    for workers in (2, 4, 8):
        loads = [0] * workers
        for (bucket, slot), anchor, cost in zip(places, found, costs, strict=True):
            loads[anchor * workers // layout.blocks] += cost
            first, last = slot.start, slot.start + slot.parameter.elements - 1
            position = layout.numbers[bucket.index].index(anchor)
            assert first // bucket.block_elements <= position <= last // bucket.block_elements
        assert max(loads) <= 1.34 * sum(costs) / workers


@pytest.mark.parametrize(("workers", "mirrors"), [("ab", 0), ("abcd", 1)])
def test_an_element_travels_once_to_its_home_and_once_to_each_holder(
    workers: str, mirrors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, send = Counter[int](), MemoryGroup.send

    def counted(self: MemoryGroup, tensor: Tensor, to: int, tag: int) -> Any:
        sent[tag] += tensor.nbytes
        return send(self, tensor, to, tag)

    monkeypatch.setattr(MemoryGroup, "send", counted)
    with Crew(workers, task(mirrors=mirrors, max_steps=2)) as crew:
        crew.finish()
    elements = sum(parameter.numel() for parameter in Net().parameters())
    most = 2 * 2 * elements  # bytes in bfloat16, in two steps
    assert 0 < sent[PARTS] <= most
    assert 0 < sent[RETURNED] <= (1 + mirrors) * most


def test_files_and_vectors_are_refused_in_a_sentence(tmp_path: Path) -> None:
    vector = nn.Module()
    vector.a, vector.b = nn.Parameter(torch.zeros(8, 8)), nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.Muon([vector.a])
    optimizer.add_param_group({"params": [vector.b]})
    one = Task({}, model=lambda: vector, optimizer=lambda _: optimizer)
    sentence = r'parameter "b" of shape \(8,\) is in a group of Muon'
    with ONE_AT_A_TIME, pytest.raises(UserError, match=sentence):
        engine_of(one, AloneLink(), Faults([]))
    with ONE_AT_A_TIME, pytest.raises(UserError, match='is "nvme", and Muon reads its state before the vote'):
        engine_of(task(offload=str(tmp_path)), AloneLink(), Faults([]))
