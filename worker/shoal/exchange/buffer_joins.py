"""How the lanes' values of a module's buffer become the step's, and what a script has declared of it. Pure.

Each lane starts from the step's value. "mean" and "sum" add up one *leaf* of each lane in the tree over lanes: the
lane's value, or what it has added. "lane0" is lane 0's value. "rows" puts the rows that lanes changed where they are,
and "writes" where they would be if the lanes had written a ring one after the other. What nobody has declared is a
mean where it is floating point, else lane 0's. Lanes are collected in lane_results.py, members in buffer_exchange.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from shoal_protos.errors import PeerError, UserError
from torch import Tensor

KINDS = ("writes", "rows", "sum", "mean", "lane0")
OF_ROWS = ("writes", "rows")
NOT_DECLARED = "no declaration"


@dataclass(frozen=True, slots=True)
class Join:
    """How one buffer is joined."""

    kind: str
    """One of `KINDS`."""
    modulo: int | None = None
    """A sum is counted modulo this number."""
    dim: int = 0
    """The dimension along which rows are counted."""
    pointer: str | None = None
    """The buffer that counts the rows written; None: those that changed are counted."""

    def __str__(self) -> str:
        modulo = f", modulo {self.modulo}" if self.modulo is not None else ""
        dim = f", dim {self.dim}" if self.dim else ""
        return self.kind + modulo + dim + (f', pointer "{self.pointer}"' if self.pointer is not None else "")

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """In which leaves of a buffer of this dtype are added up; None where it has no leaves."""
        if self.kind not in ("mean", "sum"):
            return None
        return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.int64

    def leaf(
        self,
        after: Tensor,  # of the buffer's shape and dtype: what a lane made of it
        before: Tensor,  # of its shape, in the dtype of the sum: the step's value
    ) -> Tensor:  # of its shape, in the dtype of the sum
        """What a lane that changed the buffer adds to the sum."""
        value = after.to(before.dtype, copy=True)
        return value if self.kind == "mean" else self._counted(value - before)

    def idle_leaf(
        self,
        before: Tensor,  # of the buffer's shape, in the dtype of the sum
    ) -> Tensor:  # the same
        """What one that did not change it adds."""
        return before if self.kind == "mean" else torch.zeros_like(before)

    def finish(
        self,
        leaves: Tensor,  # of the buffer's shape, in the dtype of the sum: all of them, added up
        before: Tensor,  # the same: the step's value
        lanes: int,
    ) -> Tensor:  # the same
        """The new value."""
        return leaves / lanes if self.kind == "mean" else self._counted(before + leaves)

    def _counted(
        self,
        value: Tensor,  # of the buffer's shape, in the dtype of the sum
    ) -> Tensor:  # the same
        return value if self.modulo is None else value % self.modulo


def undeclared(
    buffer: Tensor,  # of any shape and dtype
) -> Join:
    """How a buffer is joined of which nothing is declared."""
    return Join("mean" if buffer.is_floating_point() else "lane0")


WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes by the bytes of an element."""


def have_same_bits(
    one: Tensor,  # of any shape and dtype
    other: Tensor,  # the same
) -> bool:
    """Of two values of one buffer: a nan has those of itself, and -0.0 has others than 0.0."""
    return torch.equal(_words_of(one), _words_of(other))


def _words_of(
    value: Tensor,  # of any shape and dtype
) -> Tensor:  # of its shape, or with one dimension more
    parts = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    return parts.detach().view(WORDS[parts.itemsize]) if parts.is_floating_point() else parts


# ---- what a script declares


class DeclaredJoins:
    """The joins of one model's persistent buffers, by name."""

    def __init__(
        self,
        buffers: Mapping[str, Tensor],  # each of its own shape and dtype
        others: Iterable[str] = (),
        elsewhere: Sequence[Mapping[str, Tensor]] = (),  # each of its own shape and dtype
    ) -> None:
        """`others`: names of the buffers that are not persistent. `elsewhere`: by other places of a pipeline, the
        buffers there: each member declares those of all stages.
        """
        self._places, self._others = [buffers, *elsewhere], frozenset(others)
        self._buffers = {name: buffer for place in self._places for name, buffer in place.items()}
        self._undeclared = {name: undeclared(buffer) for name, buffer in buffers.items()}
        self.declared: dict[str, Join] = {}

    def __getitem__(self, name: str) -> Join:
        return self.declared.get(name) or self._undeclared[name]

    @property
    def texts(self) -> dict[str, str]:
        """What members compare."""
        return {name: str(self.declared[name]) for name in sorted(self.declared)}

    def declare(self, name: str, join: Join) -> None:
        """Raises `UserError` for a declaration that cannot be carried out, or that contradicts an earlier one."""
        self._check_name(name)
        _check(name, join, self._buffers[name])
        if join.pointer is not None:
            self._check_pointer(name, join)
        before = self.declared.setdefault(name, join)
        if before != join:
            raise UserError(f'buffer "{name}" is declared in two ways: {before}, and then {join}. Declare it once.')

    def check_same(self, theirs: Mapping[str, str]) -> None:
        """Raises `PeerError` where this script has declared otherwise than the job, which trains on without it.
        `theirs`: a member's `texts`.
        """
        mine = self.texts
        for name in sorted(mine.keys() | theirs.keys()):
            found, expected = (each.get(name, NOT_DECLARED) for each in (mine, theirs))
            if found != expected:
                raise PeerError(
                    f'this script joins the lanes of buffer "{name}" by {found}, the job by {expected}: engine.buffer '
                    "has to declare the same on all workers."
                )

    def _check_name(self, name: object) -> None:
        if isinstance(name, str) and name in self._buffers:
            return
        if isinstance(name, str) and name in self._others:
            raise UserError(
                f'engine.buffer got "{name}", which was registered with persistent=False: each worker keeps its own, '
                "and nothing is joined."
            )
        near = difflib.get_close_matches(name, self._buffers, 1) if isinstance(name, str) else []
        meant = f'; did you mean "{near[0]}"?' if near else "; expected a name of module.named_buffers()."
        raise UserError(f"engine.buffer got {name!r}, and the module has no persistent buffer of that name{meant}")

    def _check_pointer(self, name: str, join: Join) -> None:
        pointer, length = join.pointer, self._buffers[name].shape[join.dim]
        found = self.declared.get(pointer) if isinstance(pointer, str) else None
        if found is None or found.kind != "sum" or self._buffers[str(pointer)].numel() != 1:
            raise UserError(
                f'buffer "{name}" is declared with pointer={pointer!r}; expected the name of a buffer of one whole '
                'number that was declared with join="sum" before.'
            )
        if not any(name in place and pointer in place for place in self._places):
            raise UserError(
                f'buffer "{name}" is declared with pointer="{pointer}", which another process of a pipeline has; '
                "expected a buffer of its own stage."
            )
        if found.modulo not in (None, length):
            raise UserError(
                f'buffer "{name}" has {length} rows, and its pointer "{pointer}" is counted modulo {found.modulo}; '
                f"declare that with modulo={length}."
            )


def _check(
    name: str,
    join: Join,
    buffer: Tensor,  # of any shape and dtype
) -> None:
    if join.kind not in KINDS:
        expected = ", ".join(f'"{kind}"' for kind in KINDS)
        raise UserError(f'buffer "{name}" is declared with join={join.kind!r}; expected one of {expected}.')
    _check_summed(name, join, buffer.dtype)
    if join.kind in OF_ROWS and not buffer.dim():
        raise UserError(
            f'buffer "{name}" is declared with join="{join.kind}" and has no dimension, so it has no rows; a count is '
            'joined by "sum".'
        )
    most = buffer.dim() if join.kind in OF_ROWS else 1
    if type(join.dim) is not int or not 0 <= join.dim < most:
        raise UserError(
            f'buffer "{name}" of shape {tuple(buffer.shape)} is declared with join="{join.kind}" and dim={join.dim!r}; '
            'dim goes with "writes" and "rows", and is a whole number from 0 to one less than the dimensions.'
        )
    if join.pointer is not None and join.kind != "writes":
        raise UserError(f'buffer "{name}" is declared with pointer and join="{join.kind}"; it goes with "writes".')


def _check_summed(name: str, join: Join, dtype: torch.dtype) -> None:
    is_whole = not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
    if join.kind == "sum" and not (is_whole or dtype.is_floating_point):
        raise UserError(f'buffer "{name}" is declared with join="sum" and has {dtype}, which cannot be summed here; '
                        "expected real or whole numbers.")  # fmt: skip
    if join.kind == "mean" and not dtype.is_floating_point:
        raise UserError(f'buffer "{name}" is declared with join="mean" and has {dtype}; expected floating point.')
    if join.modulo is None:
        return
    if join.kind != "sum" or not is_whole or type(join.modulo) is not int or join.modulo < 1:
        raise UserError(
            f'buffer "{name}" of {dtype} is declared with join="{join.kind}" and modulo={join.modulo!r}; expected a '
            'whole number of at least 1, with join="sum", for a buffer of whole numbers.'
        )


# ---- rows


@dataclass(frozen=True, slots=True)
class LaneRows:
    """Rows of one buffer that one lane has written."""

    at: Tensor  # (rows,) int64: where, ascending in the order of the ring
    values: Tensor  # (rows, a row's elements), of the buffer's dtype


def written_rows(
    join: Join,
    before: Tensor,  # of the buffer's shape and dtype
    after: Tensor,  # the same
    stretch: tuple[int, int] | None,
) -> LaneRows:
    """What a lane made of a buffer that is joined by rows. `stretch`: the first row and the number of those that its
    pointer tells of. Raises `ValueError`, with what was found, where they are not one part of a ring.
    """
    rows = after.movedim(join.dim, 0)
    length, changed = len(rows), _changed_rows(before.movedim(join.dim, 0), rows)
    at = changed
    if stretch is not None:
        first, count = stretch
        _check_stretch(changed, first, count, length)
        at = (torch.arange(count, device=changed.device) + first) % max(1, length)
    elif join.kind == "writes":
        _check_ring(changed, length)
    return LaneRows(at, rows[at].unsqueeze(-1).flatten(1))


def _changed_rows(
    before: Tensor,  # (rows, …)
    after: Tensor,  # the same
) -> Tensor:  # (rows changed,) int64, ascending
    differ = (before != after) & ~((before != before) & (after != after))  # a nan is one, whatever bits it has
    return differ.unsqueeze(-1).flatten(1).any(dim=1).nonzero().flatten()


def _check_stretch(
    changed: Tensor,  # (rows changed,) int64
    first: int,
    count: int,
    length: int,
) -> None:
    if not 0 <= count <= length:
        raise ValueError(f"wrote {count} rows by the pointer, of {length}")
    outside = changed[(changed - first) % max(1, length) >= count]
    if len(outside):
        raise ValueError(f"changed row {int(outside[0])}, and its pointer tells of {count} rows from {first} on")


def _check_ring(
    changed: Tensor,  # (rows changed,) int64, ascending
    length: int,
) -> None:
    if len(changed) >= length > 0:
        raise ValueError(f"changed all {length} rows, or more rows than there are")
    gaps = (changed.diff(append=changed[:1] + length) != 1).nonzero().flatten().tolist()
    if len(gaps) > 1:
        raise ValueError(
            f"changed row {int(changed[gaps[0]])} and row {int(changed[gaps[0] + 1])}, and not all between"
        )


def join_rows(
    join: Join,
    before: Tensor,  # of the buffer's shape and dtype
    lanes: Sequence[LaneRows],
) -> Tensor:  # the same
    """The new value. `lanes`: all that have written, in the order of their numbers."""
    joined = before.clone()
    rows, moved = joined.movedim(join.dim, 0), 0
    for lane in lanes:
        at = (lane.at + moved) % max(1, len(rows))
        rows.index_copy_(0, at, lane.values.view(len(at), *rows.shape[1:]))
        if join.kind == "writes":
            moved += len(at)
    return joined
