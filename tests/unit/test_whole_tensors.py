"""Optimizers whose own class updates whole tensors, each at its home: any that is deterministic and sees one alone."""

from __future__ import annotations

import math
from abc import ABC
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, Task, undisturbed
from crew_saves import saved
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import shortened
from memory_group import MemoryGroup
from rule import Edit, holds, rule
from shoal.blocks.held import HeldBlocks
from shoal.blocks.whole_tensors import OddStates
from shoal.checkpoint.__main__ import main as checkpoint_command
from shoal.core.laying_out import lay_out
from shoal.core.layout import Trainable
from shoal.exchange.traffic import FILLED, PARTS, RETURNED
from shoal.optim.elementwise import check_optimizer
from shoal.optim.own_class import SINGLE_BYTES, let_own_class_update
from shoal.optim.twin import whole_updates
from shoal_protos.errors import UserError
from torch import nn
from whole_models import FORMS, Mixed, trained_here


class Lamb(torch.optim.Optimizer):
    """With a ratio of norms for each tensor, a count that is a Python number, and one that is a fraction."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-6})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state, (first, second) = self.state[p], group["betas"]
        if not state:
            state.update(step=0, ratio=1.0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
        state["step"] += 1
        state["mean"].lerp_(p.grad, 1 - first)
        state["square"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
        mean, square = state["mean"] / (1 - first ** state["step"]), state["square"] / (1 - second ** state["step"])
        update = mean / (square.sqrt() + group["eps"])
        norms = p.norm().item(), update.norm().item()
        state["ratio"] = norms[0] / norms[1] if min(norms) > 0 else 1.0
        p.add_(update, alpha=-group["lr"] * state["ratio"])


def whole(kind: Callable[..., torch.optim.Optimizer]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = kind([one for one in model.parameters() if one.requires_grad], lr=1e-2)
        assert not let_own_class_update(optimizer)
        return optimizer

    return make


class Kept(Lamb, ABC):
    """Keeps a ratio that is 1, a number, where a norm is zero, and a tensor elsewhere; and None. Of two bases, as those
    of packages are.
    """

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        super()._update(p, group)
        norm = p.grad.norm() if p.grad is not None else 0
        self.state[p].update(norm=1 if norm == 0 else norm.bfloat16(), nothing=None)
        p.mul_(1 - 1e-3 * self.state[p].get("before", 0.0))
        self.state[p]["before"] = self.state[p]["norm"] / (1 + self.state[p]["norm"])


class Counting(torch.optim.Optimizer):
    """Counts its steps in its group, as many do; each tensor's update has the length of its weights."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for p in (one for one in group["params"] if one.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 0.1 / group["step"])
                p.add_(mean, alpha=-group["lr"] * p.norm().item() / (1e-6 + mean.norm().item()))


KINDS = {"Adafactor": torch.optim.Adafactor, "Lamb": Lamb, "Kept": Kept, "Counting": Counting}


def task(kind: str, **options: Any) -> Task:
    return Task({"max_steps": 6, "gradient_clipping": 0.05, **options}, Mixed, whole(KINDS[kind]))


@rule(
    "State of a tensor that is not one value for each element is packed into its first elements, so it is mirrored, "
    "filled and saved with its blocks; what is kept of it is what is used",
    "Arithmetic and layout",
    broken_by=[
        Edit("shoal.optim.own_class", "        at += one.bytes\n    return [part", "        at += 4\n    return [part"),
        Edit("shoal.core.value_places", "= values[at : at + end - start]", "= values[: end - start]"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_at_one_lane_weights_are_those_of_the_class_itself(kind: str) -> None:
    given = task(kind)
    for mine, theirs in zip(*trained_here(given, given.optimizer), strict=True):
        assert mine.equal(theirs)


CASES = product(
    KINDS, ("clipped", "bf16", "two micro-batches, two mirrors", "on the host"), range(4), ("shape", "vote")
)
KEPT = [
    ("Adafactor", "clipped", 1, "shape"), ("Lamb", "bf16", 3, "vote"), ("Adafactor", "on the host", 0, "vote"),
    ("Lamb", "two micro-batches, two mirrors", 2, "shape"), ("Counting", "clipped", 1, "vote"),
    ("Kept", "clipped", 2, "vote"),
]  # fmt: skip


@holds("State of a tensor that is not one")
@pytest.mark.parametrize(("kind", "form", "stage", "point"), shortened(CASES, *KEPT))
def test_bits_survive_a_death_and_a_join(kind: str, form: str, stage: int, point: str) -> None:
    with Crew("abc", task(kind, stage=stage, **FORMS[form])) as crew:
        crew.train_to(2)
        crew.plant("b", 3, point)
        crew.train_to(4)
        crew.add("d")
        assert crew.finish() == undisturbed(task(kind, **FORMS[form]))


@pytest.mark.parametrize(
    ("kind", "workers"), shortened(product(KINDS, ("ab", "abcd", "abcde")), ("Adafactor", "abcde"))
)
def test_every_world_gives_the_same_bits(kind: str, workers: str) -> None:
    with Crew(workers, task(kind, lanes=8)) as crew:
        assert crew.finish() == undisturbed(task(kind, lanes=8))


@holds("Of state that is not one value")
@pytest.mark.parametrize("stage", shortened(range(4), 1))
@pytest.mark.parametrize("form", ["as far as it is used", "with a place for each element, as before"])
def test_a_checkpoint_is_gone_on_from_in_another_world(
    form: str, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saving(place: str, **checkpoint: Any) -> Task:
        of_place = {"checkpoint": {"path": str(tmp_path / place), **checkpoint}}
        return task("Adafactor", max_steps=8, stage=stage, shoal=of_place)

    with monkeypatch.context() as patched:
        if form.endswith("before"):
            patched.setattr(HeldBlocks, "places_in", lambda *_: {})
        with Crew("abc", saving("first", every_steps=4)) as crew:
            crew.train_to(5)
            saved(crew, 4)
    first = next((tmp_path / "first").glob("step-000000000004-*"))
    assert ('"spans"' in (first / "manifest.json").read_text()) != form.endswith("before")
    assert checkpoint_command(["verify", str(first)]) == 0
    with Crew("ab", saving("second", resume=str(first))) as crew:
        assert crew.finish() == undisturbed(task("Adafactor", max_steps=8))


@rule(
    "Of state that is not one value for each element, fills and files have the values alone; what they lack is zero, "
    "and the checksum of a block is of what the file has of it",
    "A change of the world",
    broken_by=[
        Edit("shoal.checkpoint.writer", "ends_of(piece.places.get(key), bounds)", "ends_of(None, bounds)"),
        Edit("shoal.checkpoint.reader", "at += count_of(places, 0, bounds[0])", "at += bounds[0]"),
        Edit("shoal.exchange.fill_slices", "held.take(_changed(states, held, _apart))", "held.take(states)"),
    ],
)
def test_files_and_fills_have_odd_state_as_far_as_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    filled, send = Counter[torch.dtype](), MemoryGroup.send

    def counted(self: MemoryGroup, tensor: torch.Tensor, to: int, tag: int) -> Any:
        if tag == FILLED:
            filled[tensor.dtype] += tensor.nbytes
        return send(self, tensor, to, tag)

    monkeypatch.setattr(MemoryGroup, "send", counted)
    saving = {"checkpoint": {"path": str(tmp_path), "every_steps": 8}}
    with Crew("abc", task("Adafactor", max_steps=12, shoal=saving)) as crew:
        crew.train_to(2)
        crew.add("d")
        crew.train_until("fills", lambda: bool(crew.workers["d"].engine.context.state.held.runs))
        crew.kill("a")
        crew.train_to(9)
        saved(crew, 8)
        assert crew.finish() == undisturbed(task("Adafactor", max_steps=12))
    parameters = sum(one.nbytes for one in Mixed().parameters())
    found = next(tmp_path.glob("step-*"))
    assert checkpoint_command(["verify", str(found)]) == 0
    assert undisturbed(task("Adafactor", max_steps=8)) in capsys.readouterr().out
    assert sum(one.stat().st_size for one in found.glob("*.safetensors")) < 1.5 * parameters
    assert 0 < sum(filled[dtype] for dtype in (torch.int64, torch.int32)) < 0.2 * parameters


class CountingInPlace(Counting):
    """Its count is a tensor of its group, which the script has too."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.param_groups[0]["step"] = torch.zeros(())


def test_what_a_home_makes_of_a_tensor_leaves_the_scripts_group_as_it_is() -> None:
    optimizer = whole(CountingInPlace)(nn.Linear(4, 4))
    (group,), (update,) = optimizer.param_groups, whole_updates(optimizer)
    assert update is not None
    state = update.first_state(torch.ones(16)).values()
    update.whole([torch.ones(16), torch.ones(16), *state], (4, 4), group, True)
    assert group["step"] == 0


# ---- what state takes


def test_a_worker_keeps_as_many_bytes_of_state_as_the_class_itself() -> None:
    """Of vectors Adafactor keeps a value for each element, of matrices one for each row and column."""
    given = task("Adafactor", max_steps=2)
    with Crew("ab", replace(given, options={**given.options, "mirrors": 0})) as crew:
        crew.finish()
        kept = [worker.engine.context.state.held.home.state_bytes() for worker in crew.workers.values()]
    plain = Mixed()
    optimizer = torch.optim.Adafactor(plain.parameters())
    for parameter in plain.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values()]
    own = sum(value.nbytes if value.dim() else SINGLE_BYTES for value in values)
    most = own + 8 * len(optimizer.state)
    assert own - 64 <= sum(kept) <= most, "an unused matrix of 8 rows and columns may have none; a word has 8 bytes"
    assert sum(kept) < 0.2 * sum(parameter.numel() for parameter in plain.parameters())


def test_odd_state_travels_as_far_as_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, send = Counter[tuple[int, torch.dtype]](), MemoryGroup.send

    def counted(self: MemoryGroup, tensor: torch.Tensor, to: int, tag: int) -> Any:
        assert tensor.numel() or tag not in (PARTS, RETURNED)
        sent[tag, tensor.dtype] += tensor.nbytes
        return send(self, tensor, to, tag)

    monkeypatch.setattr(MemoryGroup, "send", counted)
    with Crew("abcd", task("Adafactor", max_steps=2)) as crew:
        crew.finish()
    for tag in (PARTS, RETURNED):
        odd = sum(size for (of, dtype), size in sent.items() if of == tag and dtype in (torch.int32, torch.uint8))
        assert 0 < odd < 0.2 * sent[tag, torch.float32]


def test_state_that_is_kept_otherwise_is_refused_in_a_sentence() -> None:
    optimizer = whole(torch.optim.Adafactor)(nn.Linear(64, 64))
    layout = lay_out([Trainable("a", (64, 64), torch.float32, 0), Trainable("b", (64,), torch.float32, 0)])
    other = {"odd 0": torch.zeros(layout.buckets[0].elements, dtype=torch.int32)}
    with pytest.raises(UserError, match=r"the state of optimizer Adafactor is odd 0; expected odd bytes 0, odd bytes"):
        OddStates(layout, whole_updates(optimizer)).kept(0, other, 0)


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from([(), (1,), (2,), (3,), (5,), (4, 1), (3, 2), (1, 70)]), min_size=1, max_size=6), st.data()
)
def test_what_is_kept_of_odd_state_of_any_shapes_is_what_was_carried(shapes: list[tuple[int, ...]], data: Any) -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
    updates = whole_updates(whole(torch.optim.Adafactor)(model))
    layout = lay_out([Trainable(str(number), shape, torch.float32, 0) for number, shape in enumerate(shapes)])
    counts = [(math.prod(shape), updates[0].odd(shape)) for shape in shapes]
    assert all(0 <= count <= elements for elements, found in counts for count in found.values())
    odd = OddStates(layout, updates)
    for bucket in layout.buckets:
        start = data.draw(st.integers(0, bucket.elements - 1))
        stop = data.draw(st.integers(start + 1, bucket.elements))
        full = {
            key: torch.randint(1, 100, value.shape).to(value.dtype)
            for key, value in updates[0].first_state(torch.zeros(stop - start)).items()
        }
        kept = odd.kept(bucket.index, full, start)
        carried = odd.carried(bucket.index, kept, start, stop)
        again = odd.kept(bucket.index, carried, start)
        assert all(kept[key].equal(again[key]) for key in full)
        assert all(((carried[key] == full[key]) | (carried[key] == 0)).all() for key in full)


def test_a_matrix_of_one_row_keeps_four_rows_and_columns_of_moments() -> None:
    class Came(Lamb):
        def _update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
            super()._update(p, group)
            for key, dim in (("rows", -1), ("columns", 0), ("rows again", -1), ("columns again", 0)):
                self.state[p].setdefault(key, torch.zeros_like(p.mean(dim))).lerp_(p.grad.square().mean(dim), 0.1)

    assert not let_own_class_update(Came([nn.Parameter(torch.ones(1, 600))]))


# ---- who may


class Together(Lamb):
    """Scales by the norm of all gradients."""

    def step(self, closure: None = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        total = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.div_(total)
        super().step()


class Drawing(Lamb):
    def step(self, closure: None = None) -> None:
        super().step()
        self.param_groups[0]["params"][0].data.add_(torch.rand(()))


class Square(Lamb):
    """Keeps a matrix for rows and one for columns, as SOAP and Shampoo do."""

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        super()._update(p, group)
        if p.dim() < 2:
            return
        flat = p.grad.reshape(len(p), -1)
        for key, gram in (("rows", flat @ flat.T), ("columns", flat.T @ flat)):
            self.state[p][key] = self.state[p].get(key, torch.zeros_like(gram)) + gram
            self.state[p][f"{key} root"] = self.state[p][key].clone()


class Attribute(Lamb):
    count = 0

    def step(self, closure: None = None) -> None:
        self.count += 1
        super().step()
        for p in self.param_groups[0]["params"]:
            p.data.mul_(1 - 1e-3 * self.count)


MOST = 512


class OfRows(Lamb):
    """Keeps a matrix for a row of numbers."""

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        super()._update(p, group)
        few, grads = p.view(-1)[:MOST], p.grad.flatten()[:MOST]
        self.state[p]["gram"] = gram = torch.outer(grads, grads)
        few.sub_(1e-3 * (gram @ few))


class Hessian(Lamb):
    """As those with Hutchinson's estimate: nothing is done for parameters that require no gradient."""

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        mean = state.setdefault("mean", torch.zeros_like(p))
        if p.requires_grad:
            mean += torch.autograd.grad(p.grad, p, torch.ones_like(p))[0]
        p.sub_(p.grad / (1 + mean.abs()))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (OfRows, r"keeps a matrix for a row of numbers \(42.. numbers for 64\), too large for long ones"),
        (Hessian, "fails on parameters that require a gradient, as one that differentiates gradients does"),
        (Together, "reads several tensors together"),
        (Drawing, "draws random numbers"),
        (Square, "numbers beside those of each element"),
        (Attribute, "changes attribute count, which neither tensors nor numbers of its state have"),
        (torch.optim.LBFGS, "searches along a line through all parameters"),
    ],
)
def test_a_class_that_may_not_is_refused_with_its_reason(kind: type[torch.optim.Optimizer], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        check_optimizer(kind([nn.Parameter(torch.ones(96, 128))]), False)


def test_a_rate_that_begins_with_zero_hides_no_reason() -> None:
    with pytest.raises(UserError, match=r"`shoal.whole` names Together, for .* do: it reads several tensors together"):
        check_optimizer(Together([nn.Parameter(torch.ones(96, 128))], lr=0.0), False, ["Together"])


@pytest.mark.parametrize("kind", ["Adafactor", "Lamb"])
def test_a_class_that_cannot_run_on_blocks_runs_on_whole_tensors_unasked(kind: str) -> None:
    optimizer = KINDS[kind]([nn.Parameter(torch.ones(32, 32))])
    assert check_optimizer(optimizer, False) == f"state of whole tensors of {kind}"


def test_the_refusal_of_another_class_names_the_key_that_lets_it_train() -> None:
    optimizer = Counting([nn.Parameter(torch.ones(32, 32))])
    with pytest.raises(UserError, match=r'`shoal.whole: \["Counting"\]` gives it whole tensors, each at one worker'):
        check_optimizer(optimizer, False)
    assert whole_updates(optimizer) == [None]
    assert check_optimizer(optimizer, False, ["Counting"]) == "state of whole tensors of Counting"


def test_a_name_that_is_no_given_optimizers_is_refused() -> None:
    with pytest.raises(UserError, match=r"`shoal.whole` names 'Lamb', and the job's optimizer is AdamW; name a class"):
        check_optimizer(torch.optim.AdamW([nn.Parameter(torch.ones(2))]), False, ["Lamb"])
    asked = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    assert check_optimizer(asked, False, ["adamw"]) == "state of whole tensors of AdamW"


def test_torchs_muon_is_refused_for_whole_tensors_as_its_matrices_are_whole_already() -> None:
    muon = torch.optim.Muon([nn.Parameter(torch.ones(8, 8))])
    with pytest.raises(UserError, match=r"`shoal.whole` names Muon, whose matrices .* already; leave the name out"):
        check_optimizer(muon, False, ["Muon"])
