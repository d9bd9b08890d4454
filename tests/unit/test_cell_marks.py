"""What the parameters of a module are to the places of a cell. DTensors: tests/integration/test_cell_processes.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rule import Edit, holds, rule
from shoal.cells.marks import COMMON, Mark, common, local_gradient, local_of, marks, sharded
from shoal.core.cuts import Cut, Dealt
from shoal.training.start import part_of
from shoal_protos.errors import UserError
from shoal_protos.shape import ONE, Shape
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

TWO = Shape(tensor=2)


class Layer(nn.Module):
    """A parameter of each kind, one under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.own, self.summed, self.megatrons, self.sequence, self.pipelines = (
            nn.Parameter(torch.zeros(2, 3)) for _ in range(6)
        )
        self.tied = sharded(self.own, dim=-1)
        common(self.summed, gradient="sum")
        sharded(self.pipelines, over="pipeline")
        self.megatrons.tensor_model_parallel, self.megatrons.partition_dim = True, 1  # type: ignore[attr-defined]
        self.megatrons.partition_stride = 2  # type: ignore[attr-defined]
        self.sequence.tensor_model_parallel, self.sequence.sequence_parallel = False, True  # type: ignore[attr-defined]


def test_parameters_are_what_scripts_and_megatrons_layers_say_and_common_else() -> None:
    assert marks(Layer(), TWO, 0) == {
        "plain": COMMON,
        "own": Mark(True, dim=1),
        "tied": Mark(True, dim=1),
        "summed": Mark(gradient="sum"),
        "megatrons": Mark(True, dim=1, stride=2),
        "sequence": Mark(gradient="sum"),
        "pipelines": COMMON,
    }


@pytest.mark.parametrize("shape", [Shape(), Shape(context=2)])
def test_nothing_is_divided_where_a_cell_has_one_place_that_divides_layers(shape: Shape) -> None:
    assert marks(Layer(), shape, 0) == marks(Layer(), TWO, 0)
    part = part_of(Layer(), shape, 0)
    assert (part.own, part.summed) == (frozenset(), frozenset())
    assert part.cuts == {"own": Cut(1)}, "3 elements are no two pieces"


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        (lambda one: sharded(one, dim=2), r"dim 2 of a parameter of shape \(2, 3\)"),
        (lambda one: sharded(one, over="tensr"), "'tensr'; expected one of pipeline, expert, context, tensor"),
        (lambda one: common(one, gradient="mean"), '\'mean\'; expected "equal" or "sum"'),
    ],
)
def test_a_mark_that_cannot_be_is_refused(mark: Callable[[nn.Parameter], object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        mark(nn.Parameter(torch.zeros(2, 3)))


SQUARE = Shape(context=2, tensor=2)
BY_TENSOR, BY_CONTEXT, ALL = [0, 1], [0, 2], [[0, 1], [2, 3]]


def on_a_mesh(
    coordinates: list[Any], names: tuple[str, ...] | None, shape: Shape = SQUARE, last: Placement | None = None
) -> dict[str, Mark]:
    """The marks of a module whose parameter is cut, or lies as is said, along the last dimension of a mesh of
    coordinates.
    """
    mesh = DeviceMesh("cpu", torch.tensor(coordinates), mesh_dim_names=names, _init_backend=False, _rank=0)
    placements = [*[Replicate()] * (mesh.ndim - 1), last or Shard(0)]
    module = nn.Module()
    module.weight = nn.Parameter(DTensor.from_local(torch.zeros(2, 3), mesh, placements, run_check=False))
    return marks(module, shape, 0)


@pytest.mark.parametrize("names", [None, ("tensor",), ("tp",)])
def test_a_mesh_is_read_by_its_coordinates_and_not_by_its_names(names: tuple[str, ...] | None) -> None:
    for shape in (SQUARE, TWO):
        assert on_a_mesh(BY_TENSOR, names, shape) == {"weight": Mark(True, dim=0)}


@rule(
    "A parameter on a mesh of other places of a cell than those of its dimension `tensor` is refused",
    "Cells",
    broken_by=Edit(
        "shoal.cells.marks",
        "        if places != expected and not of_expert:\n",
        "        if places != expected and not of_expert and size != shape.tensor:\n",
    ),
)
@pytest.mark.parametrize(
    ("coordinates", "names", "words"),
    [
        (BY_CONTEXT, None, "whose dimension 0, without a name, has the coordinates [0, 2]"),
        (BY_CONTEXT, ("tp",), "whose dimension 'tp' has the coordinates [0, 2]"),
        (BY_CONTEXT, ("tensor",), "whose dimension 'tensor' has the coordinates [0, 2]"),
        (ALL, ("context", "tensor"), "whose dimension 'context' has the coordinates [0, 2]"),
        ([2, 3], ("tensor",), "whose dimension 'tensor' has the coordinates []"),
    ],
)
def test_a_mesh_of_other_coordinates_is_refused_with_those_that_were_expected(
    coordinates: list[Any], names: tuple[str, ...] | None, words: str
) -> None:
    with pytest.raises(UserError) as refused:
        on_a_mesh(coordinates, names)
    expected = "of a cell of context 2, tensor 2, and its dimension 'tensor' has [0, 1] here; make it on cell.mesh["
    assert f'parameter "weight" is a DTensor on a mesh {words} {expected}' in str(refused.value)


@holds("An export of a job of cells has the whole")
def test_of_a_fused_dtensor_that_is_cut_by_a_strided_shard_a_place_has_a_piece_of_each_part() -> None:
    for coordinates, shape in ((BY_TENSOR, TWO), ([0], ONE)):
        for dim in (0, -1):
            strided = _StridedShard(dim, split_factor=2 + dim % 2)  # parts of 2 × 3
            assert on_a_mesh(coordinates, ("tensor",), shape, strided) == {
                "weight": Mark(True, dim=dim % 2, stride=2 + dim % 2)
            }
    with pytest.raises(UserError, match="into 2 parts along dimension 0, 3 pieces a place, which are not equal"):
        on_a_mesh(BY_TENSOR, ("tensor",), TWO, _StridedShard(0, split_factor=3))


OF_EXPERTS = Shape(expert=2, tensor=2)


@rule(
    "A DTensor that is a shard on the mesh of a cell's dimension `expert` is of experts; on another mesh of those "
    "places it is refused, as FSDP adds gradients up there",
    "Cells",
    broken_by=[
        Edit("shoal.cells.marks", "Mark(of_expert=True, dealt=Dealt(cut.dim)) if of_expert else ", ""),
        Edit("shoal.cells.marks", 'device_mesh.mesh_dim_names == ("expert",) and ', "device_mesh.ndim == 1 and "),
        Edit("shoal.cells.marks", " and tensor.placements[0].is_shard()", ""),
    ],
)
def test_a_shard_on_the_mesh_of_experts_is_of_experts_and_what_else_lies_on_their_places_is_refused() -> None:
    assert on_a_mesh(BY_CONTEXT, ("expert",), OF_EXPERTS) == {"weight": Mark(of_expert=True, dealt=Dealt(0))}
    assert on_a_mesh([0], ("expert",), ONE) == {"weight": Mark(dealt=Dealt(0))}
    assert on_a_mesh(BY_TENSOR, ("tensor",), OF_EXPERTS) == {"weight": Mark(True, dim=0)}
    for coordinates, names in ((BY_CONTEXT, ("fsdp",)), (BY_CONTEXT, None), (ALL, ("expert", "tensor"))):
        with pytest.raises(UserError, match=r'or a shard of experts on cell.mesh\["expert"\]'):
            on_a_mesh(coordinates, names, OF_EXPERTS)
    with pytest.raises(UserError, match="has the coordinates"):
        on_a_mesh(BY_CONTEXT, ("expert",), OF_EXPERTS, Replicate())
    with pytest.raises(UserError, match="has the coordinates"):
        on_a_mesh(BY_CONTEXT, ("expert",))


def test_a_plain_parameter_and_its_gradient_are_their_own_local_parts() -> None:
    parameter, gradient = nn.Parameter(torch.zeros(2)), torch.ones(2)
    assert local_of(parameter) is parameter
    found = local_gradient(parameter, gradient)
    assert found.tensor is gradient and not found.is_partial and found.own(gradient) is gradient
