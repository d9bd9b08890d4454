"""Module buffers (running means and the like) that are the same in every world.

Every lane starts from the step's buffers. Afterwards the persistent floating-point buffers that some lane changed are
the canonical mean over lanes, taken in the wider of float32 and their own dtype, other changed ones lane 0's value,
unless the script has declared another join (buffer_joins.py); unchanged ones are left alone, because the mean of equal
values is not always the value. Every member has the new ones before it votes; they are the module's at the commit.
Non-persistent buffers are the module's own. What the lanes have made is kept in lane_results.py, and joined by
buffer_exchange.py.

Large buffers mostly are constants (masks, tables), so they are not read in every lane: a tensor's version counter tells
whether it was written. Writes through `.data` are not counted; see `_look_closely`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from shoal.core.units import plain_name
from shoal.exchange.buffer_exchange import BufferExchange
from shoal.exchange.buffer_joins import DeclaredJoins, have_same_bits
from shoal.exchange.lane_results import LaneResults
from shoal.exchange.traffic import Traffic
from shoal.group.group import Group

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


def _buffers_of_norms(module: nn.Module) -> set[str]:
    """Names of the buffers that norm layers own: running statistics."""
    return {
        plain_name(f"{prefix}.{name}" if prefix else name)
        for prefix, part in module.named_modules()
        if isinstance(part, _NormBase) or "running_mean" in part._buffers
        for name in part._buffers
    }


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


class ModuleBuffers:
    """The step's buffers (`committed`), what the lanes made of them, and what the next commit brings (`pending`)."""

    def __init__(self, module: nn.Module, lanes: int, others: Sequence[nn.Module] = ()) -> None:
        """`others`: what other places of a pipeline have."""
        self._module = module
        found = persistent_buffers(module)
        _refuse_shared_elements(found)
        self.committed = {name: buffer.clone() for name, buffer in found.items()}
        own = (plain_name(name) for name, _ in module.named_buffers() if plain_name(name) not in found)
        elsewhere = [persistent_buffers(one) for one in others]
        self._most = max(map(len, (found, *elsewhere)))
        self.joins = DeclaredJoins(self.committed, own, elsewhere)
        """How lanes are joined, as far as the script has declared it."""
        self._results = LaneResults(self.committed, self.joins, lanes, _buffers_of_norms(module))
        self._exchange = BufferExchange(self.committed, self._results, self._most)
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
        self._results.clear()

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
        for name in now.keys() - changed:
            self._note_equal(name, now[name])
        self._results.add(lane, now, changed)

    def _has_changed(
        self,
        name: str,
        buffer: Tensor,  # of its own shape and dtype
    ) -> bool:
        return not self._is_unwritten(name, buffer) and not have_same_bits(buffer, self.committed[name])

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
            if not self._is_unwritten(name, now[name]) or have_same_bits(now[name], self.committed[name]):
                continue
            if not first:
                raise UserError(
                    f'buffer "{name}" was changed through `.data` (or numpy), and not from the first micro-batch on: '
                    "such writes cannot be noticed in every lane. Write it under torch.no_grad() without `.data`, or "
                    "register it with persistent=False."
                )
            self._uncounted.add(name)
            del self._unwritten[name]

    def exchange(self, group: Group, traffic: Traffic) -> None:
        """Leaves the buffers of the coming commit in `pending`, the same on every member."""
        self.pending = {}
        if self._most:
            self.pending = self._exchange.join(group, traffic)

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
        self.committed.update((name, buffer.clone()) for name, buffer in persistent_buffers(self._module).items())
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
