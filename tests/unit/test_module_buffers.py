"""Buffers of a step: the mean over lanes against a dumb twin, and how little is read of those that do not change."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from crew import Crew, Task, undisturbed
from hypothesis import given, settings
from hypothesis import strategies as st
from integration.scripts import Model
from matrices import examples
from rule import Edit, holds, rule
from shoal.core.cell_part import WHOLE
from shoal.exchange import module_buffers
from shoal.exchange.buffer_joins import Join, have_same_bits
from shoal.exchange.module_buffers import LARGE_ELEMENTS, ModuleBuffers
from shoal.group.group import SoloGroup
from shoal.training.engine import Engine
from shoal_protos.errors import UserError
from torch import Tensor, nn


def module_with(**buffers: Tensor) -> nn.Module:
    module = nn.Module()
    for name, value in buffers.items():
        module.register_buffer(name, value)
    return module


def exchanged(buffers: ModuleBuffers, lanes: int, group: SoloGroup | None = None) -> dict[str, Tensor]:
    """What a world of one commits."""
    plan = SimpleNamespace(trainer_of=lambda *_: 0, members=(SimpleNamespace(coordinate=0),))
    layout = SimpleNamespace(part=WHOLE)
    coordinates = SimpleNamespace(mates=(0,))
    traffic = SimpleNamespace(
        plan=plan, layout=layout, coordinates=coordinates, lane_spans=(((0, lanes),),), other_mates=()
    )
    buffers.exchange(group or SoloGroup(), cast(Any, traffic))
    return buffers.pending


def tree_sum(values: list[Tensor]) -> Tensor:
    """Level by level, neighbours are added; an odd one passes up."""
    while len(values) > 1:
        pairs = [a + b for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[2 * len(pairs) :]
    return values[0]


@rule(
    "Buffers are averaged over all lanes in the wider of float32 and their dtype; a buffer that no lane changed "
    "stays as it is; a large one is read only if its version counter moved, or if the counter has proved unreliable",
    "Arithmetic and layout",
    broken_by=Edit(
        "shoal.exchange.buffer_joins", "return torch.promote_types(dtype, torch.float32) if", "return torch.float32 if"
    ),
)
@given(st.lists(st.booleans(), min_size=1, max_size=9), st.randoms(use_true_random=False))
@settings(max_examples=examples(200), deadline=None)
def test_the_mean_is_that_of_all_lanes_whichever_of_them_changed_a_buffer(changes: list[bool], random: Any) -> None:
    lanes, start = len(changes), torch.tensor([0.1, 3e7])
    module = module_with(value=start.clone())
    buffers = ModuleBuffers(module, lanes)
    after = [start + torch.tensor([1 + random.random(), 1.0]) if change else start for change in changes]
    for lane in random.sample(range(lanes), lanes):
        buffers.put_back()
        module.get_buffer("value").copy_(after[lane])
        buffers.lane_done(lane)
    pending = exchanged(buffers, lanes)
    assert pending.keys() == ({"value"} if any(changes) else set())
    if any(changes):
        assert pending["value"].tolist() == (tree_sum(after) / lanes).tolist()


@holds("Buffers are averaged over all")
def test_a_float64_buffer_keeps_its_bits_in_the_mean() -> None:
    """In float32 a counter at 2^24 would stay there."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Task().model()
            self.register_buffer("count", torch.tensor(16_777_216.0, dtype=torch.float64))
            self.register_buffer("narrow", torch.tensor(1.0, dtype=torch.float16))

        def forward(self, **batch: Tensor) -> Any:
            self.get_buffer("count").add_(1)
            self.get_buffer("narrow").mul_(1.5)
            return self.inner(**batch)

    task = Task({"max_steps": 6}, model=Counting)
    with Crew("ab", task) as crew:
        assert crew.finish() == undisturbed(task)
        committed = crew.workers["a"].engine.context.state.buffers.committed
    assert committed["count"].item() == 16_777_222
    assert (
        committed["narrow"].dtype == torch.float16 and committed["narrow"].item() == torch.tensor(1.5**6).half().item()
    )


class Watched(SoloGroup):
    """Keeps the rows that are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[int]] = []

    def all_gather(self, row: Tensor) -> Tensor:
        self.rows.append(row.tolist())
        return super().all_gather(row)


def test_a_job_that_declares_nothing_gathers_a_flag_for_each_buffer_and_no_more() -> None:
    group, module = Watched(), module_with(queue=torch.zeros(4, 2), at=torch.tensor(0), still=torch.zeros(2))
    for joins in ({}, {"queue": "writes", "at": "sum"}):
        buffers = ModuleBuffers(module, 1)
        for name, kind in joins.items():
            buffers.joins.declare(name, Join(kind))
        for _ in range(2):
            buffers.put_back()
            module.get_buffer("queue")[1] += 1
            module.get_buffer("at").add_(1)
            buffers.lane_done(0)
            exchanged(buffers, 1, group)
            buffers.commit()
            buffers.clear()
        if not joins:
            assert group.rows == [[1, 1, 0]] * 2
            group.rows.clear()
    flags, digest, count, *later = group.rows
    assert flags == [13, 5, 0] and len(digest) == 32 and count == [1] + [0] * 7
    assert later == [flags, count], "what is declared is compared once in a world"


class BesideAnother(SoloGroup):
    """A member at another coordinate of the cell has changed all buffers."""

    def all_gather(self, row: Tensor) -> Tensor:
        return torch.stack([row, torch.ones_like(row)])


@holds("Buffers of a cell's coordinates are each their own")
def test_what_another_coordinate_has_changed_is_no_change_here() -> None:
    buffers = ModuleBuffers(module_with(value=torch.ones(3)), 4)
    for lane in range(4):
        buffers.put_back()
        buffers.lane_done(lane)
    assert exchanged(buffers, 4, BesideAnother()) == {}


def test_large_buffers_that_nobody_writes_are_not_read_in_every_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = {f"mask_{i}": torch.ones(LARGE_ELEMENTS + 1) for i in range(12)}
    buffers = ModuleBuffers(module_with(**masks, mean=torch.zeros(4)), 4)
    compared: list[int] = []

    def same(a: Tensor, b: Tensor) -> bool:
        compared.append(a.numel())
        return have_same_bits(a, b)

    monkeypatch.setattr(module_buffers, "have_same_bits", same)
    for lane in range(4):
        buffers.put_back()
        buffers.lane_done(lane)
    large = [count for count in compared if count > LARGE_ELEMENTS]
    assert len(large) == 12 + 3, "all in the first lane, then one a lane"
    assert exchanged(buffers, 4) == {}


def test_a_large_buffer_that_is_written_is_noticed_in_its_lane() -> None:
    module = module_with(table=torch.zeros(LARGE_ELEMENTS + 1))
    buffers = ModuleBuffers(module, 4)
    for lane in range(4):
        buffers.put_back()
        assert not module.get_buffer("table").any()
        if lane == 3:
            module.get_buffer("table")[5] = 4.0
        buffers.lane_done(lane)
    assert exchanged(buffers, 4)["table"][5] == 1.0


@holds("Buffers are averaged over all")
def test_a_large_buffer_that_is_written_past_its_version_counter_is_compared_in_every_lane() -> None:
    module = module_with(table=torch.zeros(LARGE_ELEMENTS + 1), other=torch.zeros(LARGE_ELEMENTS + 1))
    buffers = ModuleBuffers(module, 4)
    for lane in range(4):
        buffers.put_back()
        module.get_buffer("table").data[5] += lane + 1
        buffers.lane_done(lane)
    assert exchanged(buffers, 4)["table"][5] == 2.5
    buffers.commit()
    assert module.get_buffer("table")[5] == 2.5


def test_a_lane_that_became_void_leaves_nothing_in_a_buffer_written_past_its_version_counter() -> None:
    module = module_with(table=torch.zeros(LARGE_ELEMENTS + 1))
    buffers = ModuleBuffers(module, 1)
    buffers.put_back()
    module.get_buffer("table").data[5] = 7.0
    buffers.put_back()
    assert module.get_buffer("table")[5] == 0.0


def test_a_write_past_the_version_counter_that_begins_later_is_refused_by_the_buffers_name() -> None:
    module = module_with(table=torch.zeros(LARGE_ELEMENTS + 1))
    buffers = ModuleBuffers(module, 2)
    buffers.put_back()
    buffers.lane_done(0)
    module.get_buffer("table").data[5] = 7.0
    with pytest.raises(UserError, match=r'buffer "table" was changed through `.data`'):
        buffers.lane_done(1)


@rule(
    "A buffer is unchanged where it has the bits that it had, so that every lane starts from the same: a nan that "
    "stays is no write, and another sign of a zero is one, which is put back",
    "Arithmetic and layout",
    broken_by=Edit(
        "shoal.exchange.buffer_joins", "torch.equal(_words_of(one), _words_of(other))", "torch.equal(one, other)"
    ),
)
def test_a_large_buffer_with_a_nan_that_stays_is_not_taken_for_one_that_is_written() -> None:
    module = module_with(bank=torch.zeros(LARGE_ELEMENTS + 1))
    buffers = ModuleBuffers(module, 2)
    for step in range(4):
        for lane in range(2):
            buffers.put_back()
            if step == 1:
                module.get_buffer("bank")[5] = float("nan")
            buffers.lane_done(lane)
        assert exchanged(buffers, 2).keys() == ({"bank"} if step == 1 else set())
        buffers.commit()
        buffers.clear()


class Signed(nn.Module):
    """Reads the sign of a zero in a large buffer, and turns it in some micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model(0.1, True)
        self.register_buffer("bank", torch.zeros(LARGE_ELEMENTS + 1))

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        bank = self.get_buffer("bank")
        loss = self.inner(tokens, targets) * (1 + 0.1 * torch.ones(()).copysign(bank[5]))
        if int(tokens.sum()) % 2:
            with torch.no_grad():
                bank[5] = -0.0
        return loss


@holds("A buffer is unchanged where it has the bits")
@pytest.mark.parametrize("evaluates", [False, True])
def test_no_lane_starts_from_the_zero_whose_sign_another_lane_or_an_evaluation_has_turned(evaluates: bool) -> None:
    def evaluate(engine: Engine) -> None:
        if evaluates and engine.rank == 0:
            with engine.evaluating():
                engine.module(torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.long))
                engine.module.get_buffer("bank")[5] = -0.0

    task = Task({"max_steps": 4}, model=Signed)
    with Crew("ab", replace(task, in_loop=evaluate)) as crew:
        assert crew.finish() == undisturbed(task)


def test_bits_of_all_dtypes_are_compared() -> None:
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.float64, torch.complex64, torch.complex128):
        zero = torch.zeros((), dtype=dtype)
        assert have_same_bits(zero, zero.clone()) and not have_same_bits(zero, torch.ones((), dtype=dtype))
        if dtype.is_floating_point or dtype.is_complex:
            nan = torch.full((2, 3), float("nan"), dtype=dtype).T
            assert have_same_bits(nan, nan.clone()) and not have_same_bits(zero, -zero)


# ---- buffers that are not those of the start


class Odd(nn.Module):
    """`change(module)` runs in the forward."""

    def __init__(self, change: Any, **buffers: Tensor | None) -> None:
        super().__init__()
        self.inner, self.change = Task().model(), change
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.change(self)
        loss: Tensor = self.inner(tokens, targets)
        return loss


class Bare(Odd):
    """Without any other buffer."""

    def __init__(self, change: Any, **buffers: Tensor | None) -> None:
        super().__init__(change, **buffers)
        self.inner = Model(0.1, False)


def fill_cache(module: nn.Module) -> None:
    module.cache = torch.ones(3)


def grow_cache(module: nn.Module) -> None:
    module.cache = torch.ones(8)


def widen_cache(module: nn.Module) -> None:
    module.cache = module.cache.double()


def delete_cache(module: nn.Module) -> None:
    if "cache" in module._buffers:
        del module.cache


def register_cache(module: nn.Module) -> None:
    module.register_buffer("cache", torch.ones(3))


ADDED, GONE = r'buffer "cache" was added since shoal\.initialize', r'buffer "cache" is gone since shoal\.initialize'
GREW = r'buffer "cache" has shape \(8,\) and torch\.float32; at shoal\.initialize it had \(2,\)'


@rule(
    "Persistent buffers keep the names, shapes and dtypes that they had at the start; any change is refused, and "
    "the buffer is named",
    "Arithmetic and layout",
    broken_by=Edit(
        "shoal.exchange.module_buffers",
        "if value.shape != before.shape or value.dtype != before.dtype:",
        "if value.dtype != before.dtype:",
    ),
)
@pytest.mark.parametrize("kind", [Odd, Bare])
@pytest.mark.parametrize(
    ("change", "cache", "sentence"),
    [
        (fill_cache, None, ADDED),
        (register_cache, None, ADDED),
        (grow_cache, torch.zeros(2), GREW),
        (widen_cache, torch.zeros(2), r'buffer "cache" has shape \(2,\) and torch\.float64; .* had \(2,\) and'),
        (delete_cache, torch.zeros(2), GONE),
    ],
)
def test_a_buffer_that_appears_grows_or_vanishes_is_refused_by_its_name(
    kind: type[Odd], change: Any, cache: Tensor | None, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence + r".*persistent=False"):
        undisturbed(Task({"max_steps": 2}, model=lambda: kind(change, cache=cache)))


@holds("Persistent buffers keep the names")
def test_an_expanded_buffer_is_refused_by_its_name_before_anything_is_built() -> None:
    with pytest.raises(UserError, match=r'buffer "pos" is expanded: .*\.contiguous\(\), or with persistent=False'):
        ModuleBuffers(module_with(pos=torch.arange(4).expand(3, -1)), 4)
    ModuleBuffers(module_with(pos=torch.arange(4).expand(1, -1), one=torch.ones(1).expand(1)), 4)


def test_a_buffer_that_is_the_modules_own_may_do_what_it_likes() -> None:
    def change(module: nn.Module) -> None:
        module.register_buffer("cache", torch.ones(int(torch.randint(1, 9, ()))), persistent=False)

    assert undisturbed(Task({"max_steps": 2}, model=lambda: Bare(change)))
