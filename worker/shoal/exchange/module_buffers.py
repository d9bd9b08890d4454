"""Module buffers (running means and the like) that are the same in every world.

Every lane starts from the step's buffers. Afterwards the persistent floating-point buffers that some lane changed are
the canonical mean over lanes in fp32, other changed ones lane 0's value; unchanged ones are left alone, because the
mean of equal values is not always the value. Every member has the new ones before it votes; they are the module's at
the commit. Non-persistent buffers are the module's own.
"""

from __future__ import annotations

import torch
from shoal_protos.runs import Span
from torch import Tensor, nn

from shoal.core.tree import fold, push
from shoal.exchange.group import Group, Work
from shoal.exchange.routes import BUFFERS, Routes


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """By name, each once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


class ModuleBuffers:
    """The step's buffers (`committed`), what the lanes made of them, and what the next commit brings (`pending`)."""

    def __init__(self, module: nn.Module, lanes: int) -> None:
        self._module, self._lanes = module, lanes
        self.committed = {name: buffer.clone() for name, buffer in persistent_buffers(module).items()}
        self._floating = [name for name, value in self.committed.items() if value.is_floating_point()]
        self.pending: dict[str, Tensor] = {}
        self.clear()

    def clear(self) -> None:
        """Forget what this step's lanes have made."""
        self._changed = dict.fromkeys(self.committed, False)
        self._stack: list[tuple[Span, dict[str, Tensor]]] = []
        self._lane_0: dict[str, Tensor] = {}

    @torch.no_grad()
    def put_back(self) -> None:
        """The module's buffers are the step's again: before each lane."""
        if not self.committed:
            return  # most models have none, and looking for them walks the whole module
        for name, buffer in persistent_buffers(self._module).items():
            buffer.copy_(self.committed[name])

    @torch.no_grad()
    def lane_done(self, lane: int) -> None:
        """Takes in what this lane made of the buffers."""
        if not self.committed:
            return
        now = persistent_buffers(self._module)
        for name, value in now.items():
            self._changed[name] |= not torch.equal(value, self.committed[name])
        sums = {name: now[name].float().clone() for name in self._floating}
        push(self._stack, lane, sums, self._lanes, _add_sums)
        if lane == 0:
            self._lane_0 = {name: value.clone() for name, value in now.items() if name not in self._floating}

    def exchange(self, group: Group, routes: Routes) -> None:
        """Leaves the buffers of the coming commit in `pending`, the same on every member."""
        self.pending = {}
        if not self.committed:
            return
        flags = torch.tensor([self._changed[name] for name in self.committed], dtype=torch.uint8)
        anywhere = group.all_gather(flags).amax(dim=0).tolist()
        changed = [name for name, flag in zip(self.committed, anywhere, strict=True) if flag]
        self._average(group, routes, [name for name in changed if name in self._floating])
        self._copy_lane_0(group, routes, [name for name in changed if name not in self._floating])

    def _average(self, group: Group, routes: Routes, names: list[str]) -> None:
        if not names:
            return
        spans = [(span, rank) for rank in range(group.size) for span in routes.lane_spans[rank]]
        length = sum(self.committed[name].numel() for name in names)
        mine = torch.stack([torch.cat([sums[n].reshape(-1) for n in names]) for _, sums in self._stack] or [_NOTHING])
        received, works = {group.rank: mine}, list[Work]()
        for peer in routes.others:
            if routes.lane_spans[peer]:
                received[peer] = torch.empty(len(routes.lane_spans[peer]), length)
                works.append(group.receive(received[peer], peer, BUFFERS))
            if self._stack:
                works.append(group.send(mine, peer, BUFFERS))
        for work in works:
            work.wait()
        rows = [row.clone() for rank in range(group.size) if routes.lane_spans[rank] for row in received[rank]]
        root = 0
        for into, other in fold([span for span, _ in spans], self._lanes):
            rows[into] += rows[other]
            root = into
        at = 0
        for name in names:
            old = self.committed[name]
            self.pending[name] = (rows[root][at : at + old.numel()] / self._lanes).view(old.shape).to(old.dtype)
            at += old.numel()

    def _copy_lane_0(self, group: Group, routes: Routes, names: list[str]) -> None:
        first = next(r for r, spans in enumerate(routes.lane_spans) if spans and spans[0][0] == 0)
        works: list[Work] = []
        for name in names:
            if group.rank == first:
                value = self._lane_0[name].contiguous()
                works += [group.send(_as_bytes(value), peer, BUFFERS) for peer in routes.others]
            else:
                value = torch.empty_like(self.committed[name]).contiguous()
                works.append(group.receive(_as_bytes(value), first, BUFFERS))
            self.pending[name] = value
        for work in works:
            work.wait()

    @torch.no_grad()
    def commit(self) -> None:
        """The pending buffers are the step's, and the module's."""
        self.committed.update({name: value.clone() for name, value in self.pending.items()})
        self.pending = {}
        self.put_back()

    def refresh(self) -> None:
        """The step's buffers are what the module has now: another member's initial ones."""
        self.committed = {name: buffer.clone() for name, buffer in persistent_buffers(self._module).items()}

    def load(self, values: dict[str, Tensor]) -> None:
        """Takes over another member's committed buffers."""
        self.committed.update({name: value.clone() for name, value in values.items()})
        self.put_back()


_NOTHING = torch.empty(0)


def _add_sums(kept: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: kept[name] + new[name] for name in kept}


def _as_bytes(value: Tensor) -> Tensor:
    return value.reshape(-1).view(torch.uint8)
