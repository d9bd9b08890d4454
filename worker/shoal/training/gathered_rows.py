"""Rows of an evaluation, one for each sample, that all members get: `engine.gather`, for metrics that are no means.

Each member keeps what its lanes gave and asks the next vote for the exchange; at that boundary all exchange what they
have of the newest evaluation. It is kept until a newer one begins, so an exchange that a change of the world broke is
made again whole. Rows lie in the order of their samples, so they have the same bits in every world.
"""

from __future__ import annotations

import safetensors.torch
import torch
from shoal_protos.errors import UserError
from torch import Tensor

from shoal.exchange.ballot import Request
from shoal.exchange.framing import as_bytes_tensor
from shoal.training.context import TrainingContext

GATHER = Request("gather")
SAMPLE = "sample"
MOST_BYTES = 64 << 20
"""Of one worker's rows of one evaluation."""


class GatheredRows:
    """`all`: those of the newest evaluation that was exchanged."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._step = -1
        """After which the evaluation took place whose rows are kept."""
        self._mine: list[dict[str, Tensor]] = []
        self._bytes = 0
        self.is_pending = False
        """Whether there are rows that no exchange has carried."""
        self.all: dict[str, Tensor] = {}  # each (samples, …)

    def add(self, samples: list[int], named: dict[str, Tensor]) -> None:
        """Those of a micro-batch. Raises `UserError` where they are not one for each sample, or too many."""
        for name, rows in named.items():
            if not isinstance(rows, Tensor) or rows.dim() == 0 or len(rows) != len(samples) or name == SAMPLE:
                shape = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
                raise UserError(
                    f"engine.gather got {name} of shape {shape}; expected a tensor with one row for each of the "
                    f"{len(samples)} samples of the micro-batch" + (", under another name." if name == SAMPLE else ".")
                )
        if self._step != self._context.state.step:
            self._step, self._mine, self._bytes = self._context.state.step, [], 0
        kept = {name: rows.detach().cpu().contiguous() for name, rows in named.items()}
        self._bytes += sum(rows.nbytes for rows in kept.values())
        if self._bytes > MOST_BYTES:
            raise UserError(
                f"engine.gather was given more than {MOST_BYTES >> 20} MiB on this worker in one evaluation; gather "
                "less for each sample (a score, not all of them), or report sums by engine.report."
            )
        self._mine.append({**kept, SAMPLE: torch.tensor(samples, dtype=torch.int64)})
        self.is_pending = True

    def exchange(self) -> None:
        """All members call it at the same boundary. Raises `WorldChanged`; then it is called again."""
        world = self._context.world
        assert world is not None
        own = as_bytes_tensor(self._packed())
        sizes = world.group.all_gather(torch.tensor([self._step, own.numel()], dtype=torch.int64, device="cpu"))
        longest = torch.zeros(int(sizes[:, 1].max()), dtype=torch.uint8, device="cpu")
        longest[: own.numel()] = own
        contents = world.group.all_gather(longest)
        newest = int(sizes[:, 0].max())
        found = [
            safetensors.torch.load(bytes(content[:size].numpy()))
            for content, (step, size) in zip(contents, sizes.tolist(), strict=True)
            if step == newest and size
        ]
        self.all = _in_order(found)
        self.is_pending = False

    def _packed(self) -> bytes:
        return safetensors.torch.save(_joined(self._mine)) if self._mine else b""


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Of the names that all have."""
    names = set.intersection(*map(set, parts))
    return {name: torch.cat([part[name] for part in parts]) for name in sorted(names)}


def _in_order(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One row for each sample: a lane may have been evaluated twice."""
    if not parts:
        return {}
    joined = _joined(parts)
    places = {sample: place for place, sample in enumerate(joined[SAMPLE].tolist())}
    order = torch.tensor([places[sample] for sample in sorted(places)], dtype=torch.int64)
    return {name: rows[order] for name, rows in joined.items()}
