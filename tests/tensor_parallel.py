"""A small model by tensor parallelism, written by hand, and what a crew trains with it: cells of two processes.

Megatron's layers: a column-parallel matrix, then a row-parallel one, f before and g after them (Shoeybi et al.,
"Megatron-LM", 2019). `Whole` is the same model in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from crew import Crew, Opened, Task, undisturbed
from crew_link import CrewLink
from integration.cell_scripts import Copied, Summed
from integration.scripts import VOCABULARY, WIDTH, Samples, config, optimizer_of
from shoal.cells.hub import CellHub
from shoal.cells.marks import common, sharded
from shoal.cells.process_group import CellGroup
from shoal.config.load import Beside, load_config
from shoal.data.data_workers import HERE
from shoal.data.fetch import Fetcher
from shoal.data.stream_source import source_of
from shoal.optim.hyper import take_over
from shoal.process.numerics import make_exact
from shoal.state.training_state import NO_STEP, Limits, TrainingState
from shoal.training.engine import Engine
from shoal.training.residency import residency_of
from shoal.training.start import _description, in_cell
from shoal_protos.messages import MemberState, Status
from shoal_protos.shape import DIMENSIONS, Shape
from torch import Tensor, nn

TWO = Shape(tensor=2)
DEPTH = 2
"""How often the matrices are applied."""


class Parallel(nn.Module):
    """Tokens to the mean cross entropy of the next ones. `between`: called between two collectives of a forward."""

    def __init__(self, hub: CellHub, between: Callable[[], None], buffers: bool = False) -> None:
        super().__init__()
        self.group, self.between = CellGroup(hub, tuple(hub.shape.coordinates), "tensor"), between
        whole = Whole(buffers)
        self.embedding, self.norm, self.dropout, self.head = whole.embedding, whole.norm, whole.dropout, whole.head
        size, index = hub.shape.tensor, hub.coordinate
        self.up = sharded(nn.Parameter(whole.up.detach().chunk(size, 0)[index].clone()))
        self.down = sharded(nn.Parameter(whole.down.detach().chunk(size, 1)[index].clone()), dim=1)
        self.inner = nn.BatchNorm1d(len(self.up)) if buffers else nn.Identity()
        for parameter in self.inner.parameters():
            sharded(parameter)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.dropout(self.norm(self.embedding(tokens)))
        for _ in range(DEPTH):
            inner = torch.relu(Copied.apply(hidden, self.group) @ self.up.T)
            inner = self.inner(inner.flatten(0, 1)).view_as(inner)
            hidden = hidden + Summed.apply(inner @ self.down.T, self.group)
            self.between()
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


class Sequenced(Parallel):
    """The same, where each process norms a part of the sequence: it has a part of the norm's gradients."""

    def __init__(self, hub: CellHub, between: Callable[[], None], buffers: bool = False) -> None:
        super().__init__(hub, between, buffers)
        self.norm = NormOfPart(self.norm, self.group)


class NormOfPart(nn.LayerNorm):
    def __init__(self, whole: nn.LayerNorm, group: CellGroup) -> None:
        super().__init__(whole.normalized_shape)
        self.load_state_dict(whole.state_dict())
        self.group = group
        for parameter in self.parameters():
            common(parameter, gradient="sum")

    def forward(self, hidden: Tensor) -> Tensor:
        return Joined.apply(super().forward(Taken.apply(hidden, self.group)), self.group)


def _own_part(x: Tensor, group: CellGroup) -> Tensor:  # of the second dimension
    return x.chunk(group.size(), 1)[group.rank()].contiguous()


def _all_parts(x: Tensor, group: CellGroup) -> Tensor:
    found = [torch.empty_like(x) for _ in range(group.size())]
    group.allgather([found], [x.contiguous()]).wait()
    return torch.cat(found, 1)


class Taken(torch.autograd.Function):
    """This process's part of a sequence that all have; of the gradient all get all parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CellGroup) -> Tensor:
        ctx.group = group
        return _own_part(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_parts(gradient, ctx.group), None


class Joined(torch.autograd.Function):
    """The other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CellGroup) -> Tensor:
        ctx.group = group
        return _all_parts(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _own_part(gradient, ctx.group), None


class Whole(nn.Module):
    """The same in one process."""

    def __init__(self, buffers: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.up = nn.Parameter(torch.randn(8 * WIDTH, WIDTH) / WIDTH)
        self.down = nn.Parameter(torch.randn(WIDTH, 8 * WIDTH) / WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.inner = nn.BatchNorm1d(8 * WIDTH) if buffers else nn.Identity()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.dropout(self.norm(self.embedding(tokens)))
        for _ in range(DEPTH):
            inner = torch.relu(hidden @ self.up.T)
            hidden = hidden + self.inner(inner.flatten(0, 1)).view_as(inner) @ self.down.T
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class CellTask:
    """What processes at all coordinates of a cell train."""

    options: dict[str, Any] = field(default_factory=dict)
    """Those of integration/scripts.py."""
    buffers: bool = False
    shape: Shape = TWO
    model: Callable[[CellHub, Callable[[], None], bool], nn.Module] = Parallel
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = optimizer_of
    scheduler: Callable[[torch.optim.Optimizer], Any] = lambda _: None
    data: Callable[[], Any] = lambda: Samples(40)
    body: Callable[[Engine, Any], object] | None = None
    """What a loop does with a batch in place of forward, backward and step."""
    prepare: Callable[[Engine], object] = lambda _: None
    """Called before the loop."""
    after: Callable[[Engine], object] = lambda _: None
    """Called after it."""
    loop: Callable[[Engine, Callable[[], None]], None] | None = None
    """All of the script after the engine is made. It is given what must be called before each batch."""

    def at(self, coordinate: int) -> Task:
        """That of a process."""
        return Task(whole=partial(script, self, coordinate))


def crew_of(names: str, task: CellTask) -> Crew:
    """Workers named by letters: a is at coordinate 0, b at 1, c at 0 again, and so on."""
    return Crew(names, task.at(0), odd={name: task.at(coordinate_of(name, task.shape)) for name in names})


def trained(crew: Crew) -> str:
    """The fingerprint at the end, by when all that was planted has struck."""
    digest = crew.finish()
    assert not [worker.name for worker in crew.workers.values() if worker.planned], "a fault did not strike"
    return digest


def coordinate_of(name: str, shape: Shape = TWO) -> int:
    return (ord(name) - ord("a")) % shape.processes


def script(task: CellTask, coordinate: int, opened: Opened) -> None:
    """What one process of a cell runs."""
    link, options = opened.link, task.options
    assert isinstance(link, CrewLink)
    link.coordinate = coordinate
    shoal = {
        "cell": {name: size for name in DIMENSIONS if (size := getattr(task.shape, name)) > 1},
        **options.get("shoal", {}),
    }
    beside = Beside(open_end=options.get("max_steps", 0) is None)
    settled = load_config(config({"lanes": 4, "max_steps": 6, **options, "shoal": shoal}), beside)
    make_exact(settled.exact, settled.torch_threads)
    source = source_of(task.data(), None, settled, HERE)
    hub = CellHub(task.shape, coordinate)
    torch.manual_seed(0)
    engines: list[Engine] = []
    model = task.model(hub, lambda: opened.faults.at("between", engines[0].global_step + 1), task.buffers)
    optimizer = task.optimizer(model)
    scheduler = task.scheduler(optimizer)
    limits = Limits.of(settled, source.sampler.last_step(settled.max_steps, settled.epochs))
    limits = in_cell(limits, model, optimizer, hub, task.optimizer)
    state = TrainingState(model, optimizer, scheduler, limits, residency_of(settled.stage))
    fetcher = Fetcher(source, None, settled.seed, state.device.kind)
    status = Status(sequence=0, generation=0, state=MemberState.WARMING_UP, promised=0, step=-1, committed_in=0)
    link.introduce(_description(settled, state, optimizer, source.sampler.samples, are_others=True), status)
    take_over(optimizer, scheduler, lambda: state.step > NO_STEP)
    engine = Engine(settled, state, link, fetcher, opened.faults, hub)
    engines.append(engine)
    opened.made(engine)
    engine.parts.loading.begin(engine.parts.status.publish)
    task.prepare(engine)
    if task.loop is not None:
        task.loop(engine, opened.before)
        return
    for batch in engine:
        opened.before()
        if task.body is not None:
            task.body(engine, batch)
        else:
            engine.backward(engine.module(**batch))
            engine.step()
    task.after(engine)


def partners(engine: Engine, elements: int = 1) -> Tensor:  # (elements,)
    """How many have taken part in a collective that is made here."""
    assert isinstance(engine.module, Parallel)
    return Summed.apply(torch.ones(elements), engine.module.group)


def losses_of_the_whole(options: dict[str, Any]) -> list[float]:
    """Those of the same model in one process, step by step."""
    found: list[float] = []

    def step(engine: Engine) -> None:
        if engine.step() and engine.loss is not None:
            found.append(engine.loss)

    undisturbed(Task({"lanes": 4, "max_steps": 6, **options}, Whole, scheduler=lambda _: None, step=step))
    return found
