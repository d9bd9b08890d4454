"""Buffers where processes of a cell have different ones: stages of a pipeline, and a queue that one place writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from pipeline_parallel import DROPOUT, HUBS, PIPELINE, Stage, in_stages
from queue_buffers import Queue, declare
from rule import Edit, holds, rule
from shoal.cells.hub import CellHub
from shoal.cells.stages import Stages, built_stages
from tensor_parallel import CellTask, Parallel, crew_of, trained
from torch import Tensor, nn

STEPS = 4
WRITTEN = STEPS * 4 * 2 * 2
"""Rows: of lanes, micro-batches and samples."""


class WithQueue(Stage):
    """Which writes what it makes into a queue. Other stages have running means."""

    def __init__(self, number: int, hub: CellHub, between: Callable[[], None]) -> None:
        super().__init__(number, hub.shape.pipeline, DROPOUT, hub, between)
        self.counted, self.memory = nn.Identity(), Queue()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        self.memory.put(made.detach().mean(1)[:, : self.memory.queue.shape[0]], x.flatten(1)[:, 0].long() % 2)
        return made


def stages_with(kind: type[WithQueue | Bare], at: int, hub: CellHub, between: Callable[[], None]) -> Stages:
    """One of them is of this kind."""
    places = hub.shape.pipeline

    def build(number: int) -> nn.Module:
        return kind(number, hub, between) if number == at else Stage(number, places, DROPOUT, hub, between)

    found = built_stages(build, places, hub.shape.index(hub.coordinate)["pipeline"], places)
    HUBS[found] = hub
    return found


@rule(
    "Stages of a pipeline may have different buffers, and places of a cell write different ones: what all members "
    "gather of them is equally long",
    "Cells",
    broken_by=[
        Edit("shoal.exchange.buffer_exchange", "[0] * (self._most - len(flags))", "[0] * 0"),
        Edit("shoal.exchange.buffer_exchange", "torch.zeros(most, self", "torch.zeros(len(names), self"),
        Edit("shoal.exchange.buffer_exchange", "        if written:", "        if self._of_kind(changed, *OF_ROWS):"),
        Edit("shoal.exchange.module_buffers", "        if self._most:", "        if self.committed:"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("at", [0, 1])
def test_stages_with_different_buffers_end_in_the_same_bits_in_any_number_of_cells(at: int) -> None:
    task = replace(
        in_stages(CellTask({"max_steps": STEPS}, shape=PIPELINE)),
        model=lambda hub, between, _: stages_with(WithQueue, at, hub, between),
        prepare=lambda engine: declare(engine, f"{at}."),
    )
    found = set[str]()
    for names in ("ab", "abcde"):
        with crew_of(names, task) as crew:
            crew.train_to(1)
            if names != "ab":
                crew.plant("d", 2, "exchange")
            found.add(trained(crew))
            rows = crew.workers["ab"[at]].engine.module.get_buffer(f"{at}.memory.seen")
        assert int(rows) == WRITTEN
    assert len(found) == 1


class Bare(Stage):
    """Without buffers."""

    def __init__(self, number: int, hub: CellHub, between: Callable[[], None]) -> None:
        super().__init__(number, hub.shape.pipeline, DROPOUT, hub, between)
        self.counted = nn.Identity()  # type: ignore[assignment]


@holds("Stages of a pipeline may have different buffers")
def test_a_stage_without_a_buffer_trains_beside_one_that_has_some() -> None:
    task = replace(
        in_stages(CellTask({"max_steps": STEPS}, shape=PIPELINE)),
        model=lambda hub, between, _: stages_with(Bare, 0, hub, between),
    )
    found = set[str]()
    for names in ("ab", "abcd"):
        with crew_of(names, task) as crew:
            found.add(crew.finish())
    assert len(found) == 1


class AtOnePlace(Parallel):
    """All processes have a queue, and coordinate 1 writes its own."""

    def __init__(self, hub: CellHub, between: Callable[[], None], buffers: bool = False) -> None:
        super().__init__(hub, between, buffers)
        self.memory = Queue()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = super().forward(tokens, targets)
        if self.group.rank():
            self.memory.put(self.embedding(tokens).detach().mean(dim=1), tokens[:, 0] % 2)
        return loss


@holds("Stages of a pipeline may have different buffers")
def test_a_queue_that_is_written_at_one_coordinate_alone_is_there_what_one_cell_writes() -> None:
    task, found = CellTask({"max_steps": STEPS}, model=AtOnePlace, prepare=declare), set[str]()
    for names in ("ab", "abcd"):
        with crew_of(names, task) as crew:
            found.add(crew.finish())
            seen = [int(crew.workers[name].engine.module.get_buffer("memory.seen")) for name in names]
        assert seen == [0, STEPS * 4 * 2] * (len(names) // 2)
    assert len(found) == 1
