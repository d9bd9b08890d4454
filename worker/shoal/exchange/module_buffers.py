"""Module buffers (running means and the like) that are the same in every world.

Every lane starts from the step's buffers. Afterwards the persistent floating-point buffers that some lane changed are
the canonical mean over lanes, taken in the wider of float32 and their own dtype, other changed ones lane 0's value;
unchanged ones are left alone, because the mean of equal values is not always the value. Every member has the new ones
before it votes; they are the module's at the commit. Non-persistent buffers are the module's own. In a cell each
coordinate has buffers of its own, whose means are over the members there.

Large buffers mostly are constants (masks, tables), so they are not read in every lane: a tensor's version counter tells
whether it was written. Writes through `.data` are not counted; see `_look_closely`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from shoal_protos.errors import UserError
from shoal_protos.runs import Span
from torch import Tensor, nn

from shoal.core.tree import fold, push
from shoal.core.units import plain_name
from shoal.exchange.traffic import BUFFERS, Traffic
from shoal.group.group import Group, Work

LARGE_ELEMENTS = 1 << 14
"""Above it, a buffer that was not written is not read either."""


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:  # each of its own shape and dtype
    """Persistent buffers by name, each once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                found[plain_name(f"{prefix}.{name}" if prefix else name)] = buffer
    return found


ADVICE = (
    "Buffers are the same on all workers and in checkpoints, so they stay as they were: give it its shape and value "
    "before shoal.initialize, or register it with persistent=False."
)


def _refuse_shared_elements(
    buffers: dict[str, Tensor],  # each of its own shape and dtype
) -> None:
    for name, buffer in buffers.items():
        if any(stride == 0 and size > 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
            raise UserError(
                f'buffer "{name}" is expanded: its elements share memory and cannot be written back. Register it '
                "with .contiguous(), or with persistent=False."
            )


@dataclass(frozen=True, slots=True)
class _LaneSum:
    """Sums of a subtree of lanes: of the buffers that one of them changed, by name; others kept their value."""

    lanes: int
    changed: dict[str, Tensor]  # each of its buffer's shape, in the dtype of the sum

    def of(
        self,
        name: str,
        unchanged: Tensor,  # of the buffer's shape, in the dtype of the sum: the value that it had before
    ) -> Tensor:  # the same
        """The sum of one buffer."""
        sum_of_changed = self.changed.get(name)
        return sum_of_changed if sum_of_changed is not None else _sum_of_equals(unchanged, self.lanes)


def _sum_of_equals(
    value: Tensor,  # of the buffer's shape, in the dtype of the sum
    count: int,
) -> Tensor:  # the same
    """`count` equal leaves, added in the tree's shape: the left child is the largest power of two below `count`."""
    if count == 1:
        return value
    left = 1 << (count - 1).bit_length() - 1
    return _sum_of_equals(value, left) + _sum_of_equals(value, count - left)


class ModuleBuffers:
    """The step's buffers (`committed`), what the lanes made of them, and what the next commit brings (`pending`)."""

    def __init__(self, module: nn.Module, lanes: int) -> None:
        self._module, self._lanes = module, lanes
        found = persistent_buffers(module)
        _refuse_shared_elements(found)
        self.committed = {name: buffer.clone() for name, buffer in found.items()}
        self._sum_dtypes = {
            name: torch.promote_types(value.dtype, torch.float32)
            for name, value in self.committed.items()
            if value.is_floating_point()
        }
        self.pending: dict[str, Tensor] = {}
        self._unwritten: dict[str, tuple[Tensor, int]] = {}
        """Buffers by name: the tensor that had the committed value, and its version counter then."""
        self._uncounted: set[str] = set()
        """Buffers whose writes the version counter does not tell."""
        self._kept: dict[str, Tensor] = {}
        """What the micro-batch at hand started from, where that is not the committed value."""
        self._looked = 0
        self._parts = list(module.modules())
        self.clear()

    def _found(self) -> dict[str, Tensor]:  # each of its own shape and dtype
        """The module's buffers now. Raises `UserError` where they are not those of the start."""
        now = persistent_buffers(self._module)
        for name in sorted(now.keys() ^ self.committed.keys()):
            change = "was added" if name in now else "is gone"
            raise UserError(f'buffer "{name}" {change} since shoal.initialize. {ADVICE}')
        for name, value in now.items():
            before = self.committed[name]
            if value.shape != before.shape or value.dtype != before.dtype:
                raise UserError(
                    f'buffer "{name}" has shape {tuple(value.shape)} and {value.dtype}; at shoal.initialize it had '
                    f"{tuple(before.shape)} and {before.dtype}. {ADVICE}"
                )
        return now

    def check(self) -> None:
        """Raises `UserError` where a module without buffers has got one: lanes look at no buffers there."""
        if not self.committed and any(part._buffers for part in self._parts):
            self._found()

    def clear(self) -> None:
        """Forget what this step's lanes have made."""
        self._changed = dict.fromkeys(self.committed, False)
        self._stack: list[tuple[Span, _LaneSum]] = []
        self._lane_0: dict[str, Tensor] = {}

    @torch.no_grad()
    def put_back(self) -> None:
        """The module's buffers are the step's again: before each lane."""
        self._kept = {}
        if not self.committed:
            return  # most models have none, and looking for them walks the whole module
        for name, buffer in self._found().items():
            if not self._looked or not self._is_unwritten(name, buffer):
                buffer.copy_(self.committed[name])
                self._note_equal(name, buffer)

    def begin_micro_batch(self) -> None:
        """Keeps what a lane's further micro-batch starts from, in case that it is given up."""
        if self.committed:
            now = self._found()
            self._kept = {name: value.clone() for name, value in now.items() if not self._is_unwritten(name, value)}

    @torch.no_grad()
    def undo_micro_batch(self) -> None:
        """The module's buffers are those that the micro-batch at hand started from."""
        if not self.committed:
            return
        for name, buffer in self._found().items():
            buffer.copy_(self._kept.get(name, self.committed[name]))

    @torch.no_grad()
    def lane_done(self, lane: int) -> None:
        """Takes in what this lane made of the buffers. Raises `UserError` for a write that cannot be noticed."""
        if not self.committed:
            return
        now = self._found()
        self._look_closely(now)
        changed = [name for name, value in now.items() if self._has_changed(name, value)]
        for name in changed:
            self._changed[name] = True
        for name in now.keys() - changed:
            self._note_equal(name, now[name])
        sums = {n: now[n].to(self._sum_dtypes[n], copy=True) for n in changed if n in self._sum_dtypes}
        push(self._stack, lane, _LaneSum(1, sums), self._lanes, self._add)
        if lane == 0:
            self._lane_0 = {name: now[name].clone() for name in changed if name not in self._sum_dtypes}

    def _has_changed(
        self,
        name: str,
        buffer: Tensor,  # of its own shape and dtype
    ) -> bool:
        return not self._is_unwritten(name, buffer) and not torch.equal(buffer, self.committed[name])

    def _note_equal(
        self,
        name: str,
        buffer: Tensor,  # of its own shape and dtype, with the committed value
    ) -> None:
        if buffer.numel() > LARGE_ELEMENTS and name not in self._uncounted:
            self._unwritten[name] = (buffer, buffer._version)

    def _is_unwritten(
        self,
        name: str,
        buffer: Tensor,  # of its own shape and dtype
    ) -> bool:
        """Whether a large buffer has the committed value, as far as its version counter tells."""
        before, version = self._unwritten.get(name, (None, -1))
        return before is buffer and version == buffer._version

    def _look_closely(
        self,
        now: dict[str, Tensor],  # each of its own shape and dtype
    ) -> None:
        """One large buffer a lane, in turn; in the first lane all of them: was it written past its version counter?"""
        large = [name for name, value in now.items() if value.numel() > LARGE_ELEMENTS and name not in self._uncounted]
        first, self._looked = not self._looked, self._looked + 1
        for name in large if first else large[self._looked % len(large) :][:1] if large else ():
            if not self._is_unwritten(name, now[name]) or torch.equal(now[name], self.committed[name]):
                continue
            if not first:
                raise UserError(
                    f'buffer "{name}" was changed through `.data` (or numpy), and not from the first micro-batch on: '
                    "such writes cannot be noticed in every lane. Write it under torch.no_grad() without `.data`, or "
                    "register it with persistent=False."
                )
            self._uncounted.add(name)
            del self._unwritten[name]

    def _add(self, kept: _LaneSum, new: _LaneSum) -> _LaneSum:
        wide = {n: self._wide(n) for n in kept.changed.keys() | new.changed.keys()}
        sums = {name: kept.of(name, value) + new.of(name, value) for name, value in wide.items()}
        return _LaneSum(kept.lanes + new.lanes, sums)

    def _wide(self, name: str) -> Tensor:  # of the buffer's shape, in the dtype of the sum
        """The committed value in the dtype of the sum."""
        return self.committed[name].to(self._sum_dtypes[name])

    def exchange(self, group: Group, traffic: Traffic) -> None:
        """Leaves the buffers of the coming commit in `pending`, the same on every member."""
        self.pending = {}
        if not self.committed:
            return
        changes = [self._changed[name] for name in self.committed]
        flags = torch.tensor(changes, dtype=torch.uint8, device="cpu")  # (buffers,)
        anywhere = group.all_gather(flags)[list(traffic.coordinates.mates)].amax(dim=0).tolist()
        changed = [name for name, flag in zip(self.committed, anywhere, strict=True) if flag]
        for dtype in (torch.float32, torch.float64):
            names = [name for name in changed if self._sum_dtypes.get(name) is dtype]
            if names:
                self._average(group, traffic, names)
        self._copy_lane_0(group, traffic, [name for name in changed if name not in self._sum_dtypes])

    def _average(self, group: Group, traffic: Traffic, names: list[str]) -> None:
        """The canonical mean of buffers that are summed in one dtype."""
        dtype = self._sum_dtypes[names[0]]
        spans = [(span, rank) for rank in range(group.size) for span in traffic.lane_spans[rank]]
        length = sum(self.committed[name].numel() for name in names)
        wide = {name: self._wide(name) for name in names}
        rows = [torch.cat([sums.of(n, wide[n]).reshape(-1) for n in names]) for _, sums in self._stack]
        device = wide[names[0]].device
        mine = torch.stack(rows or [torch.empty(0, dtype=dtype, device=device)])  # (own subtrees, elements of all)
        received, works = {group.rank: mine}, list[Work]()
        for peer in traffic.other_mates:
            if traffic.lane_spans[peer]:
                received[peer] = torch.empty(len(traffic.lane_spans[peer]), length, dtype=dtype, device=device)
                works.append(group.receive(received[peer], peer, BUFFERS))
            if self._stack:
                works.append(group.send(mine, peer, BUFFERS))
        group.wait(works)
        rows = [row.clone() for rank in range(group.size) if traffic.lane_spans[rank] for row in received[rank]]
        root = 0
        for into, other in fold([span for span, _ in spans], self._lanes):
            rows[into] += rows[other]
            root = into
        at = 0
        for name in names:
            old = self.committed[name]
            self.pending[name] = (rows[root][at : at + old.numel()] / self._lanes).view(old.shape).to(old.dtype)
            at += old.numel()

    def _copy_lane_0(self, group: Group, traffic: Traffic, names: list[str]) -> None:
        first = traffic.plan.trainer_of(0, traffic.layout.part.coordinate)
        works: list[Work] = []
        for name in names:
            if group.rank == first:
                value = self._lane_0.get(name, self.committed[name]).contiguous()
                works += [group.send(_as_bytes(value), peer, BUFFERS) for peer in traffic.other_mates]
            else:
                value = torch.empty_like(self.committed[name]).contiguous()
                works.append(group.receive(_as_bytes(value), first, BUFFERS))
            self.pending[name] = value
        group.wait(works)

    @torch.no_grad()
    def commit(self) -> None:
        """The pending buffers are the step's, and the module's."""
        self._take_over(self.pending)
        self.pending = {}

    def give_up(self) -> None:
        """The step's lanes have made nothing that stays."""
        self.pending = {}
        self.clear()
        self.put_back()

    def refresh(self) -> None:
        """The step's buffers are what the module has now: another member's initial ones."""
        self.committed = {name: buffer.clone() for name, buffer in persistent_buffers(self._module).items()}
        self._unwritten = {}

    def load(
        self,
        values: dict[str, Tensor],  # each of its own shape and dtype
    ) -> None:
        """Takes over another member's committed buffers."""
        self._take_over(values)

    def _take_over(
        self,
        values: dict[str, Tensor],  # each of its own shape and dtype
    ) -> None:
        for name, value in values.items():
            self.committed[name] = value.to(self.committed[name].device, copy=True)
            self._unwritten.pop(name, None)
        self.put_back()


def _as_bytes(
    value: Tensor,  # contiguous, of any shape and dtype
) -> Tensor:  # (bytes,) uint8
    return value.reshape(-1).view(torch.uint8)
