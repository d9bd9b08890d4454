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
from shoal.exchange.packing import as_bytes_tensor
from shoal.training.context import TrainingContext

GATHER = Request("gather")
SAMPLE = "sample"
RESERVED = (SAMPLE, "__metadata__")
"""The second one is safetensors' own."""
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
        """Those of a micro-batch. Raises `UserError` where they are too many, of other kinds than before, or not one
        for each sample.
        """
        for name, rows in named.items():
            refuse_metric("engine.gather", name, rows)
            if not isinstance(rows, Tensor) or rows.dim() == 0 or len(rows) != len(samples) or name in RESERVED:
                shape = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
                raise UserError(
                    f"engine.gather got {name} of shape {shape}; expected a tensor with one row for each of the "
                    f"{len(samples)} samples of the micro-batch"
                    + (", under another name." if name in RESERVED else ".")
                )
        if self._step != self._context.state.step:
            self._step, self._mine, self._bytes = self._context.state.step, [], 0
        kept = {name: _sendable(name, rows) for name, rows in named.items()}
        _check_kinds(self._mine[0] if self._mine else {}, kept)
        self._bytes += sum(len(name) + rows.nbytes for name, rows in kept.items())
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
        own = as_bytes_tensor(self._packed() if world.traffic.coordinates.speaks else b"")
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


def refuse_metric(call: str, name: str, value: object) -> None:
    """Raises `UserError` for an object that counts by itself, as those of torchmetrics: what it has counted is of the
    lanes that were here, which is another part of the samples in every world.
    """
    if all(callable(getattr(value, method, None)) for method in ("update", "compute", "reset")):
        raise UserError(
            f"{call} got {name}, a {type(value).__name__} that has seen this worker's lanes only. Gather what it is "
            "updated with (engine.gather(score=…, label=…)), and compute it from engine.gathers, which is the same on "
            "all workers."
        )


def _sendable(
    name: str,
    rows: Tensor,  # (samples, …)
) -> Tensor:  # the same, in host memory
    """Raises `UserError` for a kind of tensor that cannot be sent."""
    try:
        kept = rows.detach().cpu().contiguous()
        safetensors.torch.save({name: kept[:0]})
    except Exception as error:
        raise UserError(
            f"engine.gather got {name} of {rows.dtype} and {rows.layout}, which cannot be sent "
            f"({type(error).__name__}: {error}); gather plain numbers."
        ) from None
    return kept


def _check_kinds(
    before: dict[str, Tensor],  # each (samples, …)
    rows: dict[str, Tensor],  # likewise
) -> None:
    """Raises `UserError` where rows of one name differ in more than their number."""
    for name in sorted(before.keys() & rows.keys()):
        known, found = before[name], rows[name]
        if (known.shape[1:], known.dtype) != (found.shape[1:], found.dtype):
            raise UserError(
                f"engine.gather got {name} of {found.dtype} with rows of shape {tuple(found.shape[1:])}, and before, "
                f"in the same evaluation, of {known.dtype} with {tuple(known.shape[1:])}; pad rows to one shape for "
                "all batches, or gather a number for each sample."
            )


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Of the names that all have. Raises `UserError` where members have gathered rows of several kinds."""
    names = set.intersection(*map(set, parts))
    for part in parts[1:]:
        _check_kinds(parts[0], part)
    return {name: torch.cat([part[name] for part in parts]) for name in sorted(names)}


def _in_order(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One row for each sample: a lane may have been evaluated twice."""
    if not parts:
        return {}
    joined = _joined(parts)
    places = {sample: place for place, sample in enumerate(joined[SAMPLE].tolist())}
    order = torch.tensor([places[sample] for sample in sorted(places)], dtype=torch.int64)
    return {name: rows[order] for name, rows in joined.items()}
