"""Parameters and gradients as flat buckets: the module's tensors are views of them from `initialize` on.

Nothing here knows who owns a block. Shapes: a flat is `(bucket.elements,)` of the bucket's dtype, gaps and padding
zero.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, repeat
from operator import attrgetter, is_
from typing import Protocol

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shoal.blocks.released import looks_at_no_value
from shoal.blocks.values import WholeValues
from shoal.cells.marks import OverCell, SpreadGradients, is_divided, lie_in, local_of
from shoal.core.cell_part import WHOLE, CellPart, Division
from shoal.core.laying_out import lay_out
from shoal.core.layout import FROZEN, Bucket, Layout, Stretch, Trainable
from shoal.core.units import named_parameters, unit_numbers
from shoal.optim.several import groups_by_parameter, only_group
from shoal.process.host_memory import memory_on

Flats = list[Tensor]  # each (elements,) of its bucket's dtype
"""One flat tensor per bucket, in bucket order."""
TAKEN_BYTES = 256 << 10
"""A smaller gradient is cleared before a lane at less cost than its first one is taken."""
MOST_RANGES = 4_096
"""Views of gradients that are kept: the same ones are asked for in every step of a world."""
BEFORE = "Do this before shoal.initialize; the layout is fixed from then on."
"""What to do where something that the layout knows was changed after the start."""

_GRAD, _REQUIRES, _VERSION = map(attrgetter, ("grad", "requires_grad", "_version"))
"""Mapped over all parameters in each lane: without a line of Python for each."""

HOST = torch.device("cpu")


def trainable(
    model: nn.Module, optimizer: torch.optim.Optimizer, units: Collection[str] = (), half: torch.dtype | None = None
) -> list[tuple[Trainable, nn.Parameter]]:
    """The parameters that get gradients, in registration order, each once (tied ones under their first name).

    `units`: the classes that `shoal.units` names; `half`: the half precision that parameters may have.

    Raises `UserError` for one that requires a gradient but is in no optimizer group, or in two optimizers, for a dtype
    without an exact optimizer state, and for separate parameters that share storage.
    """
    groups_of = groups_by_parameter(optimizer)
    unit_of = unit_numbers(model, units)
    found: list[tuple[Trainable, nn.Parameter]] = []
    for name, parameter in named_parameters(model):
        if not parameter.requires_grad:
            continue
        group = only_group(name, optimizer, groups_of.get(id(parameter), ()))
        if parameter.dtype not in (torch.float32, torch.float64, half):
            raise UserError(
                f'parameter "{name}" has dtype {parameter.dtype}; expected torch.float32 or torch.float64: '
                "model.float(), or from_pretrained(…, dtype=torch.float32). Half precision comes from the config, "
                '`bf16: {"enabled": true}` or `fp16: {"enabled": true}`, which keeps float32 master weights.'
            )
        if is_traceable_wrapper_subclass(parameter) and not is_divided(parameter):
            raise UserError(
                f'parameter "{name}" requires a gradient and is a {type(parameter).__name__}, which keeps its values '
                "in other tensors; expected a plain nn.Parameter. Freeze it with requires_grad_(False), or give the "
                "model as it was before it was quantised or sharded (the engine shards it by "
                "`zero_optimization.stage`)."
            )
        refuse_hooks(name, parameter, own=0)
        shape, unit = tuple(local_of(parameter).shape), unit_of[id(parameter)]
        info = Trainable(name, shape, parameter.dtype, group, unit, wrapped=is_divided(parameter))
        found.append((info, parameter))
    if not found:
        raise UserError("the model has no parameter that requires a gradient; there is nothing to train.")
    _refuse_shared_storage(found)
    return found


def frozen(model: nn.Module, units: Collection[str] = ()) -> list[tuple[Trainable, nn.Parameter]]:
    """The parameters that need no gradient and can lie in blocks, in registration order, each once. `units`: as for
    `trainable`.
    """
    unit_of = unit_numbers(model, units)
    return [
        (Trainable(name, tuple(parameter.shape), parameter.dtype, FROZEN, unit_of[id(parameter)]), parameter)
        for name, parameter in named_parameters(model)
        if not parameter.requires_grad and _can_lie_in_a_flat(parameter)
    ]


def _can_lie_in_a_flat(
    parameter: nn.Parameter,  # of its own shape
) -> bool:
    """Whether it is as it is there: with these strides, of no class that keeps its values elsewhere."""
    is_plain = type(parameter) is nn.Parameter and parameter.is_contiguous()
    return is_plain and parameter.dtype.is_floating_point and parameter.dtype.itemsize > 1


def plain_parts(
    name: str,
    tensor: Tensor,  # of any shape
) -> Iterator[tuple[str, Tensor]]:  # each of its own shape
    """The tensors whose memory has the values: itself, or those that a subclass wraps, as quantised weights are."""
    if not is_traceable_wrapper_subclass(tensor):
        yield name, tensor
        return
    for key in tensor.__tensor_flatten__()[0]:
        yield from plain_parts(f"{name}.{key}", getattr(tensor, key))


def _refuse_shared_storage(found: Sequence[tuple[Trainable, nn.Parameter]]) -> None:
    named = [(t.name, local_of(p)) for t, p in found if p.numel() and not p.is_meta]
    spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in named)
    for (_, stop, name), (start, _, other) in pairwise(spans):
        if start < stop:
            raise UserError(
                f'parameters "{name}" and "{other}" share storage without being tied. '
                "Make them one nn.Parameter, or give one of them its own memory with clone()."
            )


def lay_out_model(
    pairs: Sequence[tuple[Trainable, nn.Parameter]],
    without_values: torch.device = HOST,
    part: CellPart = WHOLE,
    stages: Sequence[Sequence[Trainable]] = (),
) -> tuple[Layout, list[nn.Parameter]]:
    """The layout, and the parameters in the order of its slots. `without_values`: where they are to lie if none has.
    `stages`: as for `lay_out`.
    """
    devices = (parameter.device for _, parameter in pairs if not parameter.is_meta)
    infos = _marked([one for one, _ in pairs], part)
    others = [_marked(of_stage, part) for of_stage in stages]
    layout = replace(lay_out(infos, part=part, stages=others), device=next(devices, without_values))
    by_name = {info.name: parameter for info, parameter in pairs}
    return layout, [by_name[slot.parameter.name] for bucket in layout.buckets for slot in bucket.slots]


def _marked(registered: Sequence[Trainable], part: CellPart) -> list[Trainable]:
    copies = {copy.order for one in registered for copy in part.copies.get(one.name, ())}
    orders = (order for order in range(len(registered) + len(copies)) if order not in copies)
    return [
        replace(one, division=Division(one.name in part.of_expert, one.name in part.own),
                summed=one.name in part.summed or one.name in part.ties, cut=part.cuts.get(one.name),
                adds=one.name in part.adding, order=order, tie=part.ties.get(one.name), dealt=part.dealt.get(one.name),
                copies=part.copies.get(one.name, ()))
        for order, one in zip(orders, registered, strict=True)
    ]  # fmt: skip


def by_bucket(
    layout: Layout,
    parameters: Sequence[nn.Parameter],  # each of its own shape, in the order of the slots
) -> list[list[nn.Parameter]]:  # by bucket
    """The parameters that lie in each bucket."""
    rest = iter(parameters)
    return [[next(rest) for _ in bucket.slots] for bucket in layout.buckets]


def empty_flats(layout: Layout) -> Flats:  # per bucket (elements,) of its dtype
    """Zeros in the layout's shape."""
    return [memory_on(layout.device, bucket.elements, bucket.dtype) for bucket in layout.buckets]


def views(
    bucket: Bucket,
    flat: Tensor,  # (bucket.elements,) of the bucket's dtype
) -> list[Tensor]:  # each of its parameter's shape
    """The views of a flat that have the shapes of the bucket's parameters, in slot order."""
    return [flat[slot.start : slot.start + slot.parameter.elements].view(slot.parameter.shape) for slot in bucket.slots]


def all_views(
    layout: Layout,
    flats: Flats,  # per bucket (elements,) of its dtype
) -> list[Tensor]:  # each of its parameter's shape
    """The parameter-shaped views of all buckets, in slot order."""
    return [view for bucket, flat in zip(layout.buckets, flats, strict=True) for view in views(bucket, flat)]


def storage_key(
    tensor: Tensor,  # of any shape
) -> int:
    """The same for all views of one memory, whether there is any or not."""
    return int(tensor.untyped_storage()._cdata)


def adopt(
    layout: Layout,
    parameters: Sequence[nn.Parameter],  # each of its own shape, in the order of the slots
    flats: Flats | None = None,  # per bucket (elements,) of its dtype
) -> Flats:  # per bucket (elements,) of its dtype
    """Moves the parameters' values into flats and makes the parameters views of them. `flats`: such as come and go;
    None: `empty_flats`, which stay.
    """
    stays, flats = flats is None, flats or empty_flats(layout)
    with torch.no_grad():
        for parameter, view in zip(parameters, all_views(layout, flats), strict=True):
            if parameter.is_meta:
                give_memory(parameter, view)
                continue
            view.copy_(local_of(parameter))
            lie_in(parameter, view, stays)
    return flats


class FlatMemory(Protocol):
    """What is beneath flats that come and go."""

    flats: Flats
    """Per bucket (elements,) of its dtype."""

    def find(self, bucket: int) -> None:
        """Memory for what comes. Raises `OSError`, `RuntimeError`."""

    def give_back(self, bucket: int) -> None:
        """Where it has any of its own."""


def adopt_without_values(
    layout: Layout,
    parameters: Sequence[nn.Parameter],  # each of its own shape, in the order of the slots
    memory: FlatMemory,
) -> list[Callable[[], None]]:
    """Makes the parameters views of flats that have nothing beneath: values come when they are gathered. What is
    returned gives them back what they had.
    """
    given, give_back = iter(parameters), list[Callable[[], None]]()
    for bucket in layout.buckets:
        memory.find(bucket.index)  # of what is freed torch makes no views
        for view in views(bucket, memory.flats[bucket.index]):
            parameter = next(given)
            if parameter.is_meta:
                give_memory(parameter, view)
            else:
                give_back.append(lie_in(parameter, view, stays=False))
        memory.give_back(bucket.index)
    return give_back


def give_memory(
    parameter: nn.Parameter,  # of its own shape, on the meta device
    memory: Tensor,  # of the same shape
) -> None:
    """It stays the same object, in the module and in the optimizer."""
    real = nn.Parameter(torch.empty(0, dtype=memory.dtype), parameter.requires_grad)
    real.data = memory  # of a view that is made a parameter it would count the writes
    torch.utils.swap_tensors(parameter, real)


def in_order(layout: Layout, stretches: Iterable[Stretch]) -> Tensor:  # (blocks in them,) int64
    """Where the blocks of stretches, one after the other, have their numbers ascending: an index of values by block."""
    numbers = [torch.frombuffer(layout.numbers_of(stretch), dtype=torch.int64) for stretch in stretches]
    return torch.cat(numbers).argsort()


@looks_at_no_value
def drop_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Makes `.grad` None, as `zero_grad()` does: a script finds nothing that it could change."""
    for parameter in parameters:
        parameter.grad = None


def refuse_hooks(
    name: str,
    parameter: nn.Parameter,  # of its own shape
    own: int,
) -> None:
    """Raises `UserError` where the script hooks on accumulated gradients. `own`: so many such hooks are the engine's.

    It would change one lane's gradient or a sum of several, before it leaves or after, as stage and world have it.
    """
    if len(parameter._post_accumulate_grad_hooks or ()) > own:
        raise UserError(
            f'parameter "{name}" has a hook by register_post_accumulate_grad_hook, which finds other gradients in '
            "every world: some are of one micro-batch, some are sums, some have left. Use parameter.register_hook, "
            "which gets each micro-batch's gradient before it is added up, or `gradient_clipping`."
        )


def refuse_others(
    name: str,
    parameter: nn.Parameter,  # of its own shape
    own: Tensor | None,  # of the parameter's shape: the gradient that the engine has put there
) -> None:
    """Raises `UserError` where a parameter was frozen since the start, or has a gradient that is not the engine's."""
    if not parameter.requires_grad:
        raise UserError(
            f'parameter "{name}" was frozen after shoal.initialize; freeze parameters before it, '
            "the layout is fixed from then on."
        )
    if parameter.grad is not None and parameter.grad is not own and bool(parameter.grad.any()):
        raise UserError(
            f'parameter "{name}" has a gradient that engine.backward did not make. Call engine.backward(loss) '
            "in place of loss.backward(), once for the sum of all losses; drop what other backward passes "
            "leave with optimizer.zero_grad()."
        )


def moved(name: str) -> UserError:
    """What is raised where this parameter is not where, or what, it was laid out as."""
    return UserError(
        f'parameter "{name}" got new memory after shoal.initialize (module.to, .double, .half, '
        f"vector_to_parameters, or an assignment to .data), and would not be trained. {BEFORE}"
    )


class Gradients(WholeValues):
    """One copy of all gradients: flats, and the views that become the parameters' `.grad`.

    To a gradient that is there autograd adds by itself. Before a lane only small ones are cleared: the first of a large
    one is taken from its parameter as backward makes it (training/reducing.py), and all of those in half precision are.
    """

    def __init__(self, layout: Layout) -> None:
        flats = [memory_on(layout.device, bucket.elements, bucket.wide_dtype) for bucket in layout.buckets]
        super().__init__(layout, flats)
        self._views = all_views(layout, self.flats)
        slots = [(bucket, slot.parameter) for bucket in layout.buckets for slot in bucket.slots]
        are_other = [bucket.has_masters or parameter.wrapped for bucket, parameter in slots]
        self.are_whole = not any(are_other)
        """Whether each parameter's gradient lies here from the beginning on."""
        self._left = [None if is_other else view for view, is_other in zip(self._views, are_other, strict=True)]
        """What becomes `.grad`: a parameter in half precision can have none in full, and a DTensor no plain one."""
        self._spread = SpreadGradients(layout) if layout.is_in_parts else None
        self._names = [parameter.name for _, parameter in slots]
        self._large = [slot for slot, view in enumerate(self._views) if view.nbytes >= TAKEN_BYTES]
        self.taken = frozenset(self._large) | {slot for slot, left in enumerate(self._left) if left is None}
        """The slots whose gradients are taken from their parameters; to the others autograd adds."""
        self._cleared = [
            part for bucket, flat in zip(layout.buckets, flats, strict=True) for part in _small(bucket, flat)
        ]
        self._ranges: dict[tuple[int, int, int], Tensor] = {}
        self._missing: set[int] = set()
        """The slots whose views hold whatever was there before the lane."""
        self._put = [*self._left]
        """What is `.grad` when a backward begins."""

    def range(self, bucket: int, start: int, stop: int) -> Tensor:  # (stop - start,)
        place = bucket, start, stop
        known = self._ranges.get(place)
        if known is None:
            if len(self._ranges) == MOST_RANGES:
                self._ranges.clear()  # those of worlds that are over
            known = self._ranges[place] = super().range(*place)
        return known

    def zero(self) -> None:
        torch._foreach_zero_(self.flats)
        self._missing.clear()
        self._put = [*self._left]

    def begin(self) -> None:
        """A lane begins: no parameter has a gradient. Small ones have zeros, and so has what lies between them."""
        self._missing.update(self._large)
        if self._spread is not None:
            self._spread.begin()
        self._put = [*self._left]
        for slot in self._large:
            self._put[slot] = None
        if self._cleared:
            torch._foreach_zero_(self._cleared)

    def complete(self, parameters: Sequence[nn.Parameter] = ()) -> None:
        """Parameters without a gradient have one of zeros, also as `.grad` where they are given."""
        for slot in self._missing:
            self._views[slot].zero_()
            self._put[slot] = self._left[slot]
            if parameters:
                parameters[slot].grad = self._left[slot]
        self._missing.clear()

    def put_back(self, parameters: Sequence[nn.Parameter]) -> None:
        """Before a backward. Makes `.grad` what there is of the lane's gradient, to which autograd adds: `zero_grad()`
        drops it. Raises `UserError` where `requires_grad` or the dtype was changed since the start, and where there are
        gradients that are not the engine's.
        """
        if not all(map(is_, map(_GRAD, parameters), repeat(None))) or not all(map(_REQUIRES, parameters)):
            for name, parameter, view in zip(self._names, parameters, self._views, strict=True):
                refuse_others(name, parameter, view)
        for name, parameter, put in zip(self._names, parameters, self._put, strict=True):
            try:
                parameter.grad = put
            except RuntimeError as error:  # torch compares shape, dtype and device with the parameter's own
                raise moved(name) from error

    def take(
        self,
        slot: int,
        parameter: nn.Parameter,  # of its own shape
    ) -> None:
        """What a backward has just made, by the parameter's number among all slots. Raises `UserError` where the
        parameter is not as it was laid out.
        """
        gradient = parameter.grad
        if gradient is None or gradient is self._left[slot]:
            return
        try:
            parameter.grad = self._left[slot]
        except RuntimeError as error:
            raise moved(self._names[slot]) from error
        self.add(slot, gradient if self._spread is None else self._spread.local(slot, parameter, gradient))

    def made(self, bucket: int) -> dict[int, Tensor]:  # by place, each of its parameter's shape
        """The gradients of a bucket."""
        return dict(enumerate(views(self._layout.buckets[bucket], self.flats[bucket])))

    def sum_over_cell(self, over_cell: OverCell) -> None:
        """The lane's backwards are over: what is spread over the cell is added up. Raises `WorldChanged`."""
        if self._spread is not None:
            self._spread.add_up(self._views.__getitem__, over_cell)

    def add(
        self,
        slot: int,
        gradient: Tensor,  # of its parameter's shape and dtype
    ) -> None:
        """To what there is of a parameter's."""
        view = self._views[slot]
        if slot in self._missing:
            self._missing.remove(slot)
            self._put[slot] = self._left[slot]
            put_first(gradient, view)
        else:
            add_to(gradient, view)

    def are_in_place(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether no `.grad` is another tensor; None counts as in place."""
        gradients = [parameter.grad for parameter in parameters]
        return all(map(is_, gradients, self._views)) or all(
            gradient is None or gradient is view for gradient, view in zip(gradients, self._views, strict=True)
        )


def _small(
    bucket: Bucket,
    flat: Tensor,  # (bucket.elements,)
) -> list[Tensor]:  # each (elements,)
    """All of a bucket but its large gradients."""
    parts, at = list[Tensor](), 0
    for slot in bucket.slots:
        if slot.parameter.elements * flat.itemsize >= TAKEN_BYTES:
            parts.append(flat[at : slot.start])
            at = slot.start + slot.parameter.elements
    return [part for part in (*parts, flat[at:]) if part.numel()]


def versions(
    tensors: Iterable[Tensor],  # each of any shape
) -> list[int]:
    """How often each was written to: other numbers than before tell that something was."""
    return list(map(_VERSION, tensors))


def put_first(
    gradient: Tensor,  # of any shape and dtype
    view: Tensor,  # of the same shape
) -> None:
    """Leaves 0 + `gradient` in `view`: it has the bits of an accumulation into zeros (−0.0 becomes +0.0), and neither
    has to find zeros there nor reads them.
    """
    if gradient.is_sparse:
        add_to(gradient, view.zero_())
    elif is_added_at_once(gradient, view):
        torch.add(gradient, 0.0, out=view)
    else:
        view.copy_(gradient).add_(0.0)


def add_to(
    gradient: Tensor,  # of any shape and dtype
    view: Tensor,  # of the same shape
) -> None:
    """As autograd adds to one that is there: of `embedding(…, sparse=True)` row by row, also those that come twice."""
    if gradient.is_sparse and gradient.dtype != view.dtype:
        gradient = gradient.to_dense()
    view.add_(gradient if is_added_at_once(gradient, view) else gradient.to(view.dtype))


def is_added_at_once(
    gradient: Tensor,  # of any shape and dtype
    view: Tensor,  # of the same shape
) -> bool:
    """Whether no cast comes before. The host adds a mixed pair several times slower than it casts and adds; an H100 in
    0.4 to 0.6 of the time of both. The bits are the same.
    """
    return gradient.dtype == view.dtype or view.device != HOST
