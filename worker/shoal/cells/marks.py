"""What of a module is divided among the places of a cell, and what all of them have.

A parameter is a place's *own*, a shard that no other place has, or *common*. The gradients of a common one are equal on
all places, or each place has a part of their sum. A DTensor says it by its placements, a parameter of Megatron's layers
by its attributes, any other by `shoal.sharded` or `shoal.common`; one without a mark is common with equal gradients.
The engine asks `marks` once, when it takes a module over; it works on the parts of DTensors that lie in this process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar, cast

from shoal_protos.errors import UserError
from shoal_protos.shape import DIMENSIONS, Shape
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from shoal.core.cuts import Cut, Dealt
from shoal.core.layout import Layout
from shoal.core.ties import Copy, Tie, TiedParameter, ties_of
from shoal.core.units import plain_name, unit_of_name

AnyTensor = TypeVar("AnyTensor", bound=Tensor)
_MARK, _TIE = "_shoal_mark", "_shoal_tie"


@dataclass(frozen=True, slots=True)
class Mark:
    """What a parameter is to the places of a cell's tensor dimension. Those of others have it in common, but for
    experts.
    """

    is_own: bool = False
    """A shard that no other place has; else all have the same."""
    gradient: Literal["equal", "sum"] = "equal"
    """Of a common one: what places have of its gradient. A DTensor's gradient says itself where it is a sum."""
    dim: int = -1
    """Along which an own one is cut; -1: nothing says it."""
    stride: int = 1
    """Pieces that a place has of each of its cuts, as Megatron's fused layers interleave them."""
    of_expert: bool = False
    """Whether it is an expert's, which no other place of the experts has."""
    dealt: Dealt | None = None
    """Of one that is an expert's, or would be with more places of `expert`: where its number is; None: nothing says it.
    """

    def way(self, shape: Shape) -> str:
        """How it is divided in cells of that shape, in words."""
        if self.is_own and shape.tensor > 1:
            of_expert = "an expert's and " if self.of_expert else ""
            cut = Cut(self.dim, self.stride)
            return f"{of_expert}cut along dimension {cut.dim} among the places of tensor{cut.in_pieces}"
        return "an expert's" if self.of_expert else "common to all places"


COMMON = Mark()


# ---- given by scripts


def sharded(parameter: AnyTensor, *, dim: int | None = None, over: str = "tensor") -> AnyTensor:
    """Marks a parameter of which each place of a dimension has a part of its own, cut along `dim`, or 0. Over `expert`
    without `dim` it is one expert's, whose number in a `ModuleList` of experts is a part of its name. Returns it.
    Raises `UserError`.
    """
    _check(parameter, over)
    if dim is not None and not -parameter.dim() <= dim < max(parameter.dim(), 1):
        raise UserError(f"shoal.sharded is given dim {dim} of a parameter of shape {tuple(parameter.shape)}.")
    along = (-1 if over == "expert" else 0) if dim is None else dim % max(parameter.dim(), 1)
    _keep(parameter, over, Mark(True, dim=along))
    return parameter


def common(parameter: AnyTensor, *, over: str = "tensor", gradient: Literal["equal", "sum"] = "equal") -> AnyTensor:
    """Marks a parameter that all places of a dimension have alike. `gradient`: "equal" on all of them, or a part of a
    "sum" on each, as behind layers that divide a sequence. Returns it. Raises `UserError`.
    """
    _check(parameter, over)
    if gradient not in ("equal", "sum"):
        raise UserError(f'shoal.common is given gradient {gradient!r:.60}; expected "equal" or "sum".')
    _keep(parameter, over, Mark(gradient=gradient))
    return parameter


def tied(parameter: AnyTensor, name: str) -> AnyTensor:
    """Marks a parameter of which several stages of a pipeline have a copy, as an embedding that is the head, too: those
    of one name have the same values, and their gradients are added up. Returns it. Raises `UserError`.
    """
    if not isinstance(name, str) or not name:
        raise UserError(f"shoal.tied is given the name {name!r:.60}; expected a text that all copies have.")
    setattr(parameter, _TIE, name)
    return parameter


def _keep(parameter: Tensor, over: str, mark: Mark) -> None:
    setattr(parameter, _MARK, {**getattr(parameter, _MARK, {}), over: mark})


def _check(parameter: Tensor, over: str) -> None:
    if over not in DIMENSIONS:
        raise UserError(f"a parameter is marked over {over!r:.60}; expected one of {', '.join(DIMENSIONS)}.")
    if is_divided(parameter) and over != "expert":
        raise UserError("a DTensor is marked; its placements say what it is, so leave the mark out.")


# ---- asked by the engine


def marks(module: nn.Module, shape: Shape, coordinate: int) -> dict[str, Mark]:
    """What each parameter is, by all names that it has; where the dimension has one place, what it would be with more.
    `coordinate`: of this process. Raises `UserError` for one that cannot be divided so.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    found = {name: _mark(name, parameter, shape, coordinate) for name, parameter in named.items()}
    lists = _lists_of_experts(module, {name for name, mark in found.items() if mark.dealt is not None})
    return {name: replace(mark, dealt=_numbered(name, mark.dealt, lists)) for name, mark in found.items()}


def is_of_expert(parameter: Tensor) -> bool:
    """Whether it is an expert's, by a mark or as DeepSpeed's layers say it."""
    given = cast(dict[str, Mark], getattr(parameter, _MARK, {}))
    return given.get("expert", COMMON).is_own or getattr(parameter, "allreduce", True) is False


def _lists_of_experts(module: nn.Module, of_experts: Collection[str]) -> dict[str, int]:
    """What names of their parameters begin with, outer lists first, and how many experts each has."""
    found: dict[str, int] = {}
    for name, part in module.named_modules() if of_experts else ():
        start = f"{name}." if name else ""
        if isinstance(part, nn.ModuleList | nn.ParameterList) and len(part) > 0:
            names = [f"{start}{one}" for one, _ in part.named_parameters(remove_duplicate=False)]
            if names and all(one in of_experts for one in names):
                found[start] = len(part)
    return found


def _numbered(name: str, dealt: Dealt | None, lists: Mapping[str, int]) -> Dealt | None:
    """Of one that is of an expert in a list."""
    if dealt is None or not dealt.is_named:
        return dealt
    start = next((start for start in lists if name.startswith(start)), None)
    if start is None:
        return None
    return dealt._replace(level=plain_name(name[len(start) :]).count("."), of_place=lists[start])


def _mark(name: str, parameter: Tensor, shape: Shape, coordinate: int) -> Mark:
    given = cast(dict[str, Mark], getattr(parameter, _MARK, {}))
    for over in ("context", "pipeline"):
        if over in given and given[over].is_own and getattr(shape, over) > 1:
            raise UserError(
                f'parameter "{name}" is marked by shoal.sharded over {over}, which is not supported: each process has '
                "a part of its own in the dimensions tensor and expert only."
            )
    found = _placed(name, parameter, shape, coordinate) if is_divided(parameter) else _marked(parameter, given)
    all_have_it = "expert" in given and not given["expert"].is_own
    if not is_of_expert(parameter) or (all_have_it and shape.expert > 1):
        return found
    return replace(found, of_expert=shape.expert > 1, dealt=Dealt(given.get("expert", COMMON).dim))


def _marked(parameter: Tensor, given: dict[str, Mark]) -> Mark:
    if getattr(parameter, "tensor_model_parallel", False):
        return Mark(True, dim=int(getattr(parameter, "partition_dim", -1)),
                    stride=int(getattr(parameter, "partition_stride", 1)))  # fmt: skip
    if getattr(parameter, "sequence_parallel", False):
        return Mark(gradient="sum")
    return given.get("tensor", COMMON)


def _placed(name: str, parameter: Any, shape: Shape, coordinate: int) -> Mark:
    found, expected = COMMON, shape.places(coordinate, "tensor")
    dimensions = parameter.device_mesh.mesh_dim_names or ()
    for at, size, placement in _dimensions(parameter):
        cut = _cut_by(placement, parameter.dim())
        if size == 1:
            is_tensor = bool(dimensions) and dimensions[at] == "tensor"
            found = Mark(True, dim=cut.dim, stride=cut.stride) if is_tensor and cut is not None else found
            found = Mark(dealt=Dealt(placement.dim)) if _holds_experts(parameter) else found
            continue
        places = _along(parameter.device_mesh, at)
        of_expert = _holds_experts(parameter) and places == shape.places(coordinate, "expert")
        if places != expected and not of_expert:
            named = f"dimension {dimensions[at]!r:.60}" if dimensions else f"dimension {at}, without a name,"
            raise UserError(
                f'parameter "{name}" is a DTensor on a mesh whose {named} has the coordinates {list(places)} of a cell '
                f"of {shape}, and its dimension 'tensor' has {list(expected)} here; make it on cell.mesh[\"tensor\"], "
                'or a shard of experts on cell.mesh["expert"].'
            )
        if cut is None and not placement.is_replicate():
            raise UserError(f'parameter "{name}" is a DTensor with placement {placement}; expected Shard or Replicate.')
        if cut is not None:
            if not cut.divides(tuple(parameter.shape), size):
                raise UserError(
                    f'parameter "{name}" of shape {tuple(parameter.shape)} is a DTensor that is cut into {size} parts '
                    f"along dimension {cut.dim}{cut.in_pieces}, which are not equal; not supported yet."
                )
            own = Mark(True, dim=cut.dim, stride=cut.stride)
            found = Mark(of_expert=True, dealt=Dealt(cut.dim)) if of_expert else own
    return found


def _cut_by(placement: Any, dimensions: int) -> Cut | None:
    """How it divides a DTensor of so many dimensions among the places of one of its mesh; None: it does not. Of a fused
    tensor, which a strided shard divides, each place has a piece of each part (`split_factor`).
    """
    stride = getattr(placement, "split_factor", 1 if placement.is_shard() else 0)
    return Cut(placement.dim % dimensions, stride) if stride else None


def _holds_experts(tensor: Any) -> bool:
    """Whether a DTensor is a shard on the dimension of experts alone, by its name: on another mesh of these places
    gradients may be added up, as FSDP does.
    """
    return bool(tensor.device_mesh.mesh_dim_names == ("expert",) and tensor.placements[0].is_shard())


def ties(places: Sequence[nn.Module]) -> dict[str, Tie]:
    """Which parameters are copies of each other, by name. `places`: of a pipeline, what each has. Raises `UserError`
    for those that cannot be.
    """
    return ties_of([list(_tied_in(place)) for place in places])


def copies(module: nn.Module, classes: Collection[str]) -> dict[str, tuple[Copy, ...]]:
    """Of parameters that several stages at a place have, and that are marked: what further stages have, by the first
    one's name. `module`: of one place. `classes`: of units.
    """
    registered, unit_of = list[tuple[str, str]](), unit_of_name(module, classes)
    firsts, found = dict[int, str](), dict[str, tuple[Copy, ...]]()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = firsts.setdefault(id(parameter), name)
        stages = {one.partition(".")[0] for of, one in registered if of == first}
        is_copy = bool(getattr(parameter, _TIE, "")) and name.partition(".")[0] not in stages
        if parameter.requires_grad and (first == name or is_copy):
            registered.append((first, name))
    for order, (first, name) in enumerate(registered):
        if first != name:
            tie = getattr(module.get_parameter(first), _TIE)
            copy = Copy(tie, plain_name(name), order, unit_of(name))
            found[plain_name(first)] = (*found.get(plain_name(first), ()), copy)
    return found


def _tied_in(module: nn.Module) -> Iterator[TiedParameter]:
    for name, parameter in module.named_parameters():
        if tie := getattr(parameter, _TIE, ""):
            yield TiedParameter(plain_name(name), tie, tuple(parameter.shape), parameter.dtype)


# ---- DTensors


def is_divided(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """What of it lies in this process: a DTensor's part, and any other as it is."""
    if not is_divided(tensor):
        return tensor
    local = cast(Any, tensor)._local_tensor
    return cast(Tensor, local.wait() if hasattr(local, "wait") else local)  # one that a collective is still filling


def lie_in(
    parameter: Tensor,  # of its own shape
    memory: Tensor,  # of the shape of what lies in this process
    stays: bool = True,
) -> Callable[[], None]:
    """Gives what of it lies in this process that memory, which has its values; what is returned gives its own back.

    A DTensor's part gets a storage of its own where the memory `stays`: torch.compile cannot trace one that is a view
    of a larger storage. Where the memory comes and goes the part must go with it.
    """
    if not is_divided(parameter):
        own, parameter.data = parameter.data, memory
        return lambda: setattr(parameter, "data", own)
    part, before = from_dlpack(memory) if stays else memory.data, cast(Any, parameter)._local_tensor
    part.requires_grad_(local_of(parameter).requires_grad)
    cast(Any, parameter)._local_tensor = part
    return lambda: setattr(parameter, "_local_tensor", before)


@dataclass(frozen=True, slots=True)
class LocalGradient:
    """The gradient of the part of a parameter that lies in this process, or what becomes it."""

    tensor: Tensor
    is_partial: bool = False
    """It is to be added up over the places of the tensor dimension first."""
    part: Callable[[Tensor], Tensor] | None = None
    """What of the sum belongs to this process; None: all of it."""

    def own(self, total: Tensor) -> Tensor:
        """Of what the sum has become."""
        return total if self.part is None else self.part(total)


def local_gradient(parameter: Tensor, gradient: Tensor) -> LocalGradient:
    """What this process has of a gradient, whose placements may differ from its parameter's. Raises `UserError`."""
    local = local_of(gradient)
    if not (is_divided(parameter) and is_divided(gradient)):
        return LocalGradient(local)
    pairs = zip(_sized(parameter), _sized(gradient), strict=True)
    found = next(((size, mine, theirs) for (_, size, mine), (*_, theirs) in pairs), None)
    if found is None or found[1] == found[2]:
        return LocalGradient(local)
    (places, mine, theirs), index = found, _index(parameter)
    wanted, given = (_cut_by(one, parameter.dim()) for one in (mine, theirs))
    is_sum = theirs.is_partial() and theirs.reduce_op == "sum"
    if not (is_sum or given is not None or theirs.is_replicate()):
        raise UserError(f"a DTensor's gradient has placement {theirs}; expected Shard, Replicate or a sum.")
    if given is not None:  # a part of what all have: zeros elsewhere make it a part of a sum
        whole = local.new_zeros(parameter.shape)
        strips = given.strips(whole, index, places)
        for strip, values in zip(strips, local.split([one.shape[given.dim] for one in strips], given.dim), strict=True):
            strip.copy_(values)
        local = whole
    if wanted is None:
        return LocalGradient(local, is_partial=True)
    part = partial(wanted.part, place=index, places=places)
    if theirs.is_replicate():
        return LocalGradient(part(local))
    return LocalGradient(local, is_partial=True, part=part)


OverCell = Callable[[list[Tensor], tuple[int, ...]], None]
"""Adds tensors of one dtype up, in place, over those members of a cell that have the same tokens and stage; or over
these places of its pipeline. Raises `WorldChanged`.
"""


class SpreadGradients:
    """Which gradients of the lane at hand are parts of a sum over a cell, as behind layers that divide a sequence: by
    their marks, those of DTensors by their placements; and those of copies that several stages have. Parameters go by
    their number among all slots.
    """

    def __init__(self, layout: Layout) -> None:
        parameters = [slot.parameter for bucket in layout.buckets for slot in bucket.slots]
        self._names = [one.name for one in parameters]
        self._marked = {
            slot for slot, one in enumerate(parameters) if one.name in layout.part.summed and not one.wrapped
        }
        self._tied = sorted((one.tie, slot) for slot, one in enumerate(parameters) if one.tie is not None)
        self.begin()

    def begin(self) -> None:
        """A lane begins."""
        self._now = set(self._marked)

    def local(
        self,
        slot: int,
        parameter: nn.Parameter,  # of its own shape
        gradient: Tensor,  # of the same shape; a DTensor's has placements of its own
    ) -> Tensor:  # of the shape of the parameter's local part
        """What this process has of it, of a sum over the cell perhaps. Raises `UserError`."""
        if not is_divided(parameter):
            return gradient
        found = local_gradient(parameter, gradient)
        if found.is_partial and found.part is not None:
            raise UserError(
                f'the gradient of parameter "{self._names[slot]}" is a sum over the cell of which each process has a '
                "part of every shard; not supported yet. Give the parameter's input the layout Replicate()."
            )
        if found.is_partial:
            self._now.add(slot)
        return found.tensor

    def add_up(
        self,
        gradient_of: Callable[[int], Tensor],  # of its parameter's shape
        over_cell: OverCell,
    ) -> None:
        """The lane's backwards are over. Raises `WorldChanged`."""
        parts = [gradient_of(slot) for slot in sorted(self._now)]
        for dtype in sorted({part.dtype for part in parts}, key=str):
            over_cell([part for part in parts if part.dtype == dtype], ())
        for tie, slot in self._tied:
            over_cell([gradient_of(slot)], tie.places)


def _dimensions(tensor: Any) -> Iterator[tuple[int, int, Any]]:
    """The dimensions of its mesh: their number, size, and how it lies on it."""
    both = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return ((at, size, placement) for at, (size, placement) in enumerate(both))


def _sized(tensor: Any) -> Iterator[tuple[int, int, Any]]:
    """Those that have several places."""
    return (one for one in _dimensions(tensor) if one[1] > 1)


def _along(mesh: Any, at: int) -> tuple[int, ...]:
    """The coordinates that differ from this process in one dimension of a mesh; none where it is not in the mesh."""
    own = mesh.get_coordinate()
    if own is None:
        return ()
    return tuple(mesh.mesh[(*own[:at], slice(None), *own[at + 1 :])].tolist())


def _index(tensor: Any) -> int:
    """This process's place in the one dimension of its mesh that has several."""
    return int(next((tensor.device_mesh.get_local_rank(at) for at, *_ in _sized(tensor)), 0))
