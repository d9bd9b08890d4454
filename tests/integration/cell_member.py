"""One process of a cell without a controller: its world, and the scripts that tests have it run.

`member` is forked by test_cell_processes.py; a script is a function of its own here, which is given the process's cell
and hub and returns what the test compares.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shoal.cells.cell import Cell
from shoal.cells.hub import CellHub, current_hub
from shoal.cells.marks import is_divided, lie_in, local_gradient, local_of, marks
from shoal.group.build import Cancellation, GroupSpec
from shoal.group.gloo import build_gloo
from shoal.group.group import Group
from shoal_protos.errors import UserError
from shoal_protos.shape import Shape
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Enter = Callable[[], Group]
"""Begins the process's next world, and a lane in it."""


def member(script: str, coordinate: int, addresses: Sequence[str], result: str) -> None:
    """Runs one of the scripts below at a coordinate of a cell of so many processes; its result becomes a file."""
    torch.set_num_threads(1)
    cell = Cell(Shape(tensor=len(addresses)), coordinate)
    hub = current_hub()
    assert hub is not None
    groups: list[Group] = []

    def enter() -> Group:
        spec = GroupSpec(len(groups) + 1, coordinate, tuple(addresses), builder=0)
        groups.append(build_gloo(spec, Cancellation()))
        hub.begin(groups[-1], tuple(range(len(addresses))))
        hub.begin_lane()
        return groups[-1]

    found = globals()[script](cell, hub, enter)
    Path(result).write_text(json.dumps(found))
    enter()
    dist.barrier()  # a process that ends closes what others may be in


# ---- what torch knows of a cell


def names(cell: Cell, hub: CellHub, enter: Enter) -> dict[str, Any]:
    dist.barrier()
    try:
        dist.broadcast(torch.ones(1), 0)
        refused = ""
    except UserError as error:
        refused = str(error)
    try:
        Cell(cell.shape, 0)
        again = ""
    except UserError as error:
        again = str(error)
    enter()
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, {"from": dist.get_rank()})
    pair = dist.new_group([0, 1])
    dist.all_reduce(values := torch.tensor([cell.coordinate + 1]), group=pair)
    return {
        "rank": dist.get_rank(),
        "size": dist.get_world_size(),
        "environment": [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")],
        "place": [cell.coordinate, cell.index("tensor"), cell.size("tensor"), cell.size("pipeline")],
        "stages": [cell.is_first_stage, cell.is_last_stage],
        "group": dist.get_process_group_ranks(cell.group("tensor")),
        "mesh": [list(cell.mesh.mesh_dim_names or ()), list(cell.mesh.shape)],
        "refused": refused,
        "again": again,
        "objects": objects,
        "sum": values.item(),
    }


# ---- a model whose layers are divided


WIDTH = 8


class Block(nn.Module):
    """A norm whose gradients are partial under sequence parallelism, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


def whole_and_divided(cell: Cell, sequence: bool) -> tuple[nn.Module, nn.Module]:
    """The same block twice."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    whole = Block()
    torch.manual_seed(0)
    divided = Block()
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Replicate()),
            "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        }
    parallelize_module(divided, cell.mesh["tensor"], plan, src_data_rank=None)
    return whole, divided


def gradients(cell: Cell, hub: CellHub, enter: Enter) -> dict[str, Any]:
    """Of each parameter's own part: how far they are from the whole block's, and what the marks say."""
    found: dict[str, Any] = {}
    enter()
    for kind in ("tensor", "sequence"):
        whole, divided = whole_and_divided(cell, sequence=kind == "sequence")
        marked = marks(divided, cell.shape, cell.coordinate)
        whole(_batch()).square().sum().backward()
        divided(_batch()).square().sum().backward()
        parts = {name: local_gradient(p, p.grad) for name, p in divided.named_parameters() if p.grad is not None}
        partial = sorted(name for name, part in parts.items() if part.is_partial)
        hub.reduce_sum([parts[name].tensor for name in partial])
        apart = 0.0
        for name, parameter in whole.named_parameters():
            expected, own = parameter.grad, parts[name].own(parts[name].tensor)
            assert expected is not None
            if marked[name].is_own:
                expected = expected.chunk(cell.size("tensor"), marked[name].dim)[cell.index("tensor")]
            assert own.shape == expected.shape == local_of(divided.get_parameter(name)).shape
            apart = max(apart, float((own - expected).abs().max()))
        own_dims = {name: mark.dim for name, mark in marked.items() if mark.is_own}
        found[kind] = {"apart": apart, "partial": partial, "own": own_dims}
    return found


def placed(cell: Cell, hub: CellHub, enter: Enter) -> dict[str, list[Any]]:
    """The gradient of a parameter of 4 × 2 by its and its gradient's placements, once what is partial is added up."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    enter()
    mesh = cell.mesh["tensor"]
    total = torch.arange(8.0).view(4, 2)
    by_name = {
        "replicate": Replicate(), "shard 0": Shard(0), "shard 1": Shard(1),
        "pieces": _StridedShard(0, split_factor=2), "partial": Partial(),
    }  # fmt: skip
    found: dict[str, list[Any]] = {}
    for wanted in ("replicate", "shard 0", "shard 1", "pieces"):
        parameter = nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [by_name[wanted]], src_data_rank=None))
        expected = local_of(distribute_tensor(total, mesh, [by_name[wanted]], src_data_rank=None))
        for given, placement in by_name.items():
            part = total / 4 * (1 + 2 * cell.coordinate)  # a quarter, and three of them
            if given != "partial":
                part = local_of(distribute_tensor(total, mesh, [placement], src_data_rank=None)).clone()
            gradient = local_gradient(parameter, DTensor.from_local(part, mesh, [placement], run_check=False))
            if gradient.is_partial:
                hub.reduce_sum([gradient.tensor])
            own = gradient.own(gradient.tensor)
            found[f"{wanted} from {given}"] = [torch.equal(own, expected), gradient.is_partial]
    common = nn.Parameter(distribute_tensor(torch.zeros(5), mesh, [Replicate()], src_data_rank=None))
    total = torch.arange(5.0)
    part = distribute_tensor(total, mesh, [Shard(0)], src_data_rank=None)
    gradient = local_gradient(common, part)
    hub.reduce_sum([gradient.tensor])
    found["replicate from uneven parts"] = [torch.equal(gradient.tensor, total), gradient.is_partial]
    for name, size, placement in (
        ("uneven", 5, Shard(0)), ("uneven pieces", 6, _StridedShard(0, split_factor=2)), ("sum", 8, Partial())
    ):  # fmt: skip
        divided = nn.Module()
        local = torch.zeros(size if name == "sum" else size // 2)
        shape: dict[str, Any] = {"shape": torch.Size([size]), "stride": (1,)}
        divided.weight = nn.Parameter(DTensor.from_local(local, mesh, [placement], run_check=False, **shape))
        try:
            marks(divided, cell.shape, cell.coordinate)
        except UserError as error:
            found[name] = [str(error)]
    mean = DTensor.from_local(torch.zeros(8), mesh, [Partial("avg")], run_check=False, **shape)
    try:
        local_gradient(nn.Parameter(distribute_tensor(torch.zeros(8), mesh, [Shard(0)], src_data_rank=None)), mean)
    except UserError as error:
        found["mean"] = [str(error)]
    return found


def _batch() -> Tensor:
    return torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1))


def compiled(cell: Cell, hub: CellHub, enter: Enter) -> dict[str, Any]:
    """Through a rehearsal alone, a world, its end in a collective and the next world: one graph, and equal values."""
    graphs: list[int] = []

    def backend(graph: Any, given: Any) -> Any:
        from torch._dynamo.backends.registry import lookup_backend

        graphs.append(1)
        return lookup_backend("aot_eager")(graph, given)

    whole, divided = whole_and_divided(cell, sequence=False)
    parts = [local_of(parameter).detach() for parameter in divided.parameters()]
    flat = torch.cat([part.flatten() for part in parts])  # all are of one memory, as the engine has them
    for parameter, part, view in zip(divided.parameters(), parts, flat.split([p.numel() for p in parts]), strict=True):
        if is_divided(parameter):
            lie_in(parameter, view.view(part.shape))
    call = torch.compile(divided, backend=backend)
    x = _batch()
    hub.rest()
    hub.begin_lane()
    call(x).sum().backward()
    divided.zero_grad()
    values = []
    for _ in ("a world", "the next one"):
        group = enter()
        y = call(x)
        y.sum().backward()
        values.append(float((y - whole(x)).abs().max()))
        group.abort()
        hub.make_void() if cell.coordinate else None
        call(x).sum().backward()
        assert hub.is_void
    flat.mul_(2)
    doubled = all(
        torch.equal(local_of(p).detach(), 2 * part)
        for p, part in zip(divided.parameters(), parts, strict=True)
        if is_divided(p)
    )
    return {"graphs": len(graphs), "differences": values, "follow": doubled}


# ---- random numbers


def masks(cell: Cell, hub: CellHub, enter: Enter) -> dict[str, Any]:
    """What dropout keeps, of shards and of all, plain and under both kinds of activation checkpointing."""
    found: dict[str, Any] = {}

    def block(x: Tensor, kept: list[list[float]]) -> Tensor:
        with cell.sharded_random("tensor"):
            own = F.dropout(torch.ones(16), 0.5)
        common = F.dropout(torch.ones(16), 0.5)
        kept += [own.tolist(), common.tolist()]
        return (x * own * common).sin()

    for kind in ("plain", "reentrant", "not reentrant"):
        torch.manual_seed(3)
        x, kept = torch.arange(16.0, requires_grad=True), []
        y: Tensor = x
        for _ in range(2):
            y = block(y, kept) if kind == "plain" else checkpoint(block, y, kept, use_reentrant=kind == "reentrant")  # type: ignore[assignment]
        y.sum().backward()
        assert x.grad is not None
        found[kind] = [x.grad.tolist(), kept[:4], float(torch.rand(1))]
    return found
