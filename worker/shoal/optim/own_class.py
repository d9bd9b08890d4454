"""The optimizer's own class on whole tensors: for any that is deterministic and sees one tensor at a time.

The home of a tensor has a twin step on it, in its own shape; weights and state come back to all who hold its elements.
State with one value for each element of every tensor of the group is theirs. All other state of a tensor (rows and
columns of moments, counts, numbers, what only vectors have) is *odd*: its bytes are packed into the first elements of
the tensor, in keys of as few bytes an element as it takes. So blocks have it as they have all state: mirrored, filled,
checkpointed, in the fingerprint. What they keep is the used part (blocks/whole_tensors.py). A single value goes with
what it is, as a step may make another kind of it: a ratio of norms is 1 where one of them is zero.

`own_class_of` asks the class itself whether that holds: twins train a matrix and a row of numbers by themselves, again,
beside another tensor, and with all state packed and unpacked between two steps; what comes out is compared bit by bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.data.seeds import RandomState
from shoal.optim.hyper import Group, rated
from shoal.optim.probe import SWELLS, text_of
from shoal.optim.state_form import NUMBERS
from shoal.optim.twin import LEFT_OUT, changed_values, own, probing_twin_of, without_hooks_on_all
from shoal.optim.whole import UPDATES, Columns, Pieces

ODD = "odd bytes"
"""The keys of packed state: `odd bytes 0`, …"""
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Their dtypes: widest first, and all but the widest once."""
MOST_BYTES, SMALL = 12, 64
"""So many for each element of tensors of so many elements or more; smaller ones may take as many as they need. CAME
takes 8 and a few more for a matrix of one row.
"""
TRIAL_SHAPES = ((128, 160), (512,))
NOTHING = type(None)
SINGLE: tuple[type | torch.dtype, ...] = (
    NOTHING, *NUMBERS, torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64,
)  # fmt: skip
"""What a single value may be: None, a number, a tensor without dimensions."""
SINGLE_BYTES = 1 + 8
"""Its place in `SINGLE`, and the value."""


class NotWhole(Exception):
    """Why an optimizer may not run on whole tensors: the end of a sentence."""


@dataclass(frozen=True, slots=True)
class Odd:
    """An entry of a tensor's state that is not one value for each element. `dtype`: None: it is a single value."""

    key: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return SINGLE_BYTES if self.dtype is None else math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Schema:
    """Of the state of tensors of one shape. `elements`: dtypes by key."""

    elements: Mapping[str, torch.dtype]
    odd: tuple[Odd, ...]

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.odd)


def _schema(state: Mapping[str, Any], shape: Sequence[int], common: Collection[str] | None = None) -> Schema:
    """`common`: keys with one value for each element of all tensors of the group; None: not known yet. Raises
    `NotWhole` for state that is neither tensors nor numbers.
    """
    elements, odd = dict[str, torch.dtype](), list[Odd]()
    for key, value in sorted(state.items()):
        is_tensor = type(value) is Tensor and value.dim() > 0
        if is_tensor and value.shape == tuple(shape) and (common is None or key in common):
            elements[key] = value.dtype
        elif is_tensor:
            odd.append(Odd(key, value.dtype, tuple(value.shape)))
        elif _kind(value) in SINGLE:
            odd.append(Odd(key, None, ()))
        else:
            raise NotWhole(f"keeps {key!r} as a {type(value).__name__}, which no block could be given")
    return Schema(elements, tuple(odd))


def _form(schemas: Mapping[tuple[int, ...], Schema]) -> str:
    """The keys, and a digest of what lies where."""
    keys = {key for one in schemas.values() for key in (*one.elements, *(odd.key for odd in one.odd))}
    places = [(shape, sorted(one.elements.items()), one.odd) for shape, one in sorted(schemas.items())]
    digest = hashlib.sha256(repr(places).encode()).hexdigest()[:12]
    return f"{', '.join(sorted(keys)) or 'nothing'} of whole tensors ({digest})"


def _kind(value: Any) -> type | torch.dtype:
    return value.dtype if type(value) is Tensor else type(value)


class OwnClass:
    """The `WholeUpdate` of a group."""

    def __init__(self, optimizer: Optimizer, number: int, shapes: Sequence[tuple[int, ...]], wide: torch.dtype) -> None:
        """`shapes`: of the group's tensors. Raises `NotWhole`."""
        self._optimizer, self._number = optimizer, number
        self.steps_group = True
        self.name, self.keeps = type(optimizer).__name__, f"state of whole tensors of {type(optimizer).__name__}"
        tried = {shape: self._tried(shape, wide) for shape in dict.fromkeys(shapes)}
        alone = {shape: _schema(state, shape) for shape, state in tried.items()}
        for shape, schema in alone.items():
            elements = max(1, math.prod(shape))
            if schema.bytes > MOST_BYTES * elements and elements >= SMALL:
                numbers = sum(math.prod(one.shape) for one in schema.odd)
                raise NotWhole(f"keeps {numbers} numbers beside those of each element for a tensor of {elements}")
        of_each = [schema.elements for schema in alone.values()]
        self._elements = {
            key: dtype for key, dtype in (of_each[0] if of_each else {}).items()
            if all(one.get(key) == dtype for one in of_each)
        }  # fmt: skip
        """Dtypes by key."""
        self._schemas = {shape: _schema(state, shape, self._elements) for shape, state in tried.items()}
        most = max((-(-one.bytes // max(1, math.prod(shape))) for shape, one in self._schemas.items()), default=0)
        self._packed = {f"{ODD} {number}": dtype for number, dtype in enumerate(_words(most))}
        """The same, of odd state."""
        self.form = _form(self._schemas)

    def _tried(self, shape: tuple[int, ...], wide: torch.dtype) -> dict[str, Any]:
        """The state that one step makes."""
        zeros = torch.zeros(shape, dtype=wide, device="cpu")
        group = self._optimizer.param_groups[self._number]
        return self._step(zeros, torch.zeros_like(zeros), {}, group)[1]

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raises `UserError` for a parameter that was in no group when the optimizer was tried."""
        if tuple(shape) not in self._schemas:
            raise UserError(f'parameter "{name}" of shape {tuple(shape)} came into the optimizer after its trial.')

    def cost(self, shape: Sequence[int]) -> int:
        """Elements: a step goes through all of them some times."""
        return max(1, math.prod(shape))

    def columns(self, wide: torch.dtype) -> Columns:
        state = (*self._elements.values(), *self._packed.values())
        return Columns((wide, wide, *state), (wide, *state))

    def first_state(
        self,
        weights: Tensor,  # (elements,)
    ) -> dict[str, Tensor]:  # each (elements,)
        dtypes = {**self._elements, **self._packed}
        return {key: torch.zeros_like(weights, dtype=dtype) for key, dtype in dtypes.items()}

    def odd(self, shape: Sequence[int]) -> Mapping[str, int]:
        elements, left, found = max(1, math.prod(shape)), self._schemas[tuple(shape)].bytes, dict[str, int]()
        for key, dtype in self._packed.items():
            found[key] = min(elements, -(-left // dtype.itemsize))
            left = max(0, left - found[key] * dtype.itemsize)
        return found

    def part(
        self,
        pieces: Pieces,
        _: Group,
        _is_new: bool,
        into: Sequence[Tensor],  # by column (values of all pieces,)
    ) -> None:
        """Gradients, weights, state."""
        for place, values in zip(into, ([*pieces.scaled()], *self._columns_of(pieces)), strict=True):
            torch._foreach_copy_(place.split([one.numel() for one in values]), values)

    def _columns_of(self, pieces: Pieces) -> list[list[Tensor]]:  # of each piece (values,)
        """Weights, state."""
        return [pieces.weights, *(pieces.state[key] for key in (*self._elements, *self._packed))]

    def whole(
        self,
        sent: Sequence[Tensor],  # by column (values of the tensor,)
        shape: Sequence[int],
        group: Group,
        is_new: bool,
    ) -> list[Tensor]:  # by column (values of the tensor,)
        """Weights, state."""
        gradient, weights, *columns = sent
        here, schema = tuple(shape), self._schemas[tuple(shape)]
        elements = dict(zip(self._elements, columns, strict=False))
        state: dict[str, Any] = {}
        if not is_new:
            state = {key: elements[key].view(here).clone() for key in schema.elements}
            state |= dict(_unpacked(columns[len(self._elements) :], schema))
        made, state = self._step(weights.view(here).clone(), gradient.view(here).clone(), state, group)
        if _schema(state, here, self._elements) != schema:
            raise UserError(f"the state of optimizer {self.name} has other entries than after its first step.")
        returned = [state[key].reshape(-1) for key in self._elements]
        return [made.reshape(-1), *returned, *_packed(state, schema, columns[len(self._elements) :])]

    def _step(
        self,
        weights: Tensor,  # of the tensor's shape
        gradient: Tensor,  # of the tensor's shape
        state: dict[str, Any],
        group: Group,
    ) -> tuple[Tensor, dict[str, Any]]:  # of the tensor's shape
        """What the class makes of them, in one step of a twin."""
        twin = probing_twin_of(self._optimizer, as_it_is=True)
        parameter = nn.Parameter(weights)
        parameter.grad = gradient
        values = own({key: value for key, value in group.items() if key != "params"})
        twin.param_groups = [{**twin.param_groups[self._number], **values, "params": [parameter]}]
        if state:
            twin.state[parameter].update(state)
        with without_hooks_on_all():
            type(twin).step(twin)
        return parameter.detach(), dict(twin.state[parameter])

    def commit(
        self,
        pieces: Pieces,
        returned: Sequence[Tensor],  # by column (values of all pieces,)
        _: Group,
        _shape: Sequence[int],
    ) -> None:
        for places, column in zip(self._columns_of(pieces), returned, strict=True):
            torch._foreach_copy_(places, column.split([place.numel() for place in places]))


def _words(size: int) -> list[torch.dtype]:
    """Of so many bytes together."""
    widest, *others = WORDS
    return [widest] * (size // widest.itemsize) + [one for one in others if size & one.itemsize]


def _packed(
    state: Mapping[str, Any],
    schema: Schema,
    like: Sequence[Tensor],  # each (values,)
) -> list[Tensor]:  # each (values,) of the same dtype
    """Odd state, and zeros behind it."""
    if not like:
        return []
    whole, at = torch.zeros(sum(one.nbytes for one in like), dtype=torch.uint8, device=like[0].device), 0
    for one in schema.odd:
        value = state[one.key]
        flat = _single(value) if one.dtype is None else _bytes_of(value)
        whole[at : at + flat.numel()] = flat.to(whole.device)
        at += one.bytes
    return [part.view(one.dtype) for part, one in zip(whole.split([one.nbytes for one in like]), like, strict=True)]


def _unpacked(
    columns: Sequence[Tensor],  # each (values,)
    schema: Schema,
) -> Iterator[tuple[str, Any]]:
    """The inverse of `_packed`."""
    at, whole = 0, torch.empty(0, dtype=torch.uint8)
    if columns:
        whole = torch.cat([column.contiguous().view(torch.uint8) for column in columns])
    for one in schema.odd:
        flat = whole[at : at + one.bytes].clone()
        yield one.key, _value_of(flat) if one.dtype is None else flat.view(one.dtype).reshape(one.shape)
        at += one.bytes


def _bytes_of(
    value: Tensor,  # of any shape
) -> Tensor:  # (bytes,) uint8
    return value.detach().reshape(-1).contiguous().view(torch.uint8)


def _single(value: Any) -> Tensor:  # (bytes,) uint8
    """What it is, and itself."""
    kind = _kind(value)
    found = torch.tensor([SINGLE.index(kind)], dtype=torch.uint8, device="cpu")
    if kind in NUMBERS:
        value = torch.tensor(value, dtype=NUMBERS[type(value)], device="cpu")
    return found if value is None else torch.cat([found, _bytes_of(value).cpu()])


def _value_of(
    single: Tensor,  # (SINGLE_BYTES,) uint8
) -> Any:
    """The inverse of `_single`."""
    kind = SINGLE[int(single[0])]
    if kind is NOTHING:
        return None
    dtype = kind if isinstance(kind, torch.dtype) else NUMBERS[kind]
    value = single[1 : 1 + dtype.itemsize].clone().view(dtype).reshape(())
    return value if kind is dtype else value.item()


# ---- whether it may


def let_own_class_update(optimizer: Optimizer) -> str:
    """Marks an optimizer as one of whole tensors. Returns why it may be none; empty: it is one now."""
    if any(optimizer.state.values()):
        return "has state already, with which whole tensors cannot begin: call shoal.initialize before its first step"
    random = RandomState.save()
    try:
        updates = []
        for number, group in enumerate(optimizer.param_groups):
            dtypes = {one.dtype for one in group["params"]}
            wide = torch.float64 if torch.float64 in dtypes else torch.float32
            _try(optimizer, number, wide)
            updates.append(OwnClass(optimizer, number, [tuple(one.shape) for one in group["params"]], wide))
    except NotWhole as reason:
        return str(reason)
    except Exception as error:  # of the script's class, which may raise anything
        return f"fails on a whole tensor by itself ({type(error).__name__}: {error})"
    finally:
        random.restore()
    vars(optimizer)[UPDATES] = updates
    return ""


def _try(optimizer: Optimizer, number: int, wide: torch.dtype) -> None:
    """Raises `NotWhole`."""
    made = torch.Generator("cpu").manual_seed(5)
    dimensions = {min(2, max(1, one.dim())) for one in optimizer.param_groups[number]["params"]}
    for shape in (one for one in TRIAL_SHAPES if len(one) in dimensions):
        first, *gradients = torch.randn(1 + len(SWELLS), *shape, generator=made, dtype=wide, device="cpu")
        gradients = [gradient * swell for gradient, swell in zip(gradients, SWELLS, strict=True)]
        random = RandomState.save()
        alone, groups = _trained(optimizer, number, [first], gradients)
        if not random.is_here():
            raise NotWhole("draws random numbers, which are others in every world")
        if not alone[0].equal(_trained(optimizer, number, [first], gradients)[0][0]):
            raise NotWhole("comes to other weights when it is run again")
        beside, more = _trained(optimizer, number, [first, 3 * first], gradients)
        nothing = _trained(
            optimizer, number, [first.flatten()[:1] * 0], [gradients[0].flatten()[:1] * 0] * len(SWELLS)
        )[1]
        if not alone[0].equal(beside[0]) or any(changed_values(one[-1], groups[-1], number) for one in (more, nothing)):
            raise NotWhole(
                "reads several tensors together, as a norm over all gradients does (which `gradient_clipping` has)"
            )
        update, columns = OwnClass(optimizer, number, [shape], wide), [first.flatten()]
        state = list(update.first_state(columns[0]).values())
        for step, gradient in enumerate(gradients):
            weights, *state = update.whole([gradient.flatten(), columns[0], *state], shape, groups[step], not step)
            columns = [weights]
        if not alone[0].flatten().equal(columns[0]):
            raise NotWhole("keeps what neither tensors nor numbers of its state have")


def _trained(
    optimizer: Optimizer,
    number: int,
    tensors: Sequence[Tensor],  # each of one shape
    gradients: Sequence[Tensor],  # of the first; others' are multiples
) -> tuple[list[Tensor], list[dict[str, Any]]]:  # each of its shape
    """What they become, and the values of the group, before each step and after the last."""
    twin, parameters = probing_twin_of(optimizer, as_it_is=True), [nn.Parameter(one.clone()) for one in tensors]
    group = {**rated(twin.param_groups[number]), "params": parameters}
    twin.param_groups, values = [group], [own(group)]
    before = _attributes(twin)
    for gradient in gradients:
        for factor, parameter in enumerate(parameters):
            parameter.grad = gradient * (1 - 3 * factor)
        with without_hooks_on_all():
            type(twin).step(twin)
        values.append(own(group))
    lost = ", ".join(key for key, text in _attributes(twin).items() if before.get(key) != text)
    if lost:
        raise NotWhole(f"changes attribute {lost}, which neither tensors nor numbers of its state have")
    return [one.detach() for one in parameters], values


def _attributes(twin: Optimizer) -> dict[str, str]:
    """To be compared."""
    return {key: text_of(one) for key, one in vars(twin).items() if key not in LEFT_OUT}
