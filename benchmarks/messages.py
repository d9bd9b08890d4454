"""What a step sends, by computation: `python benchmarks/messages.py`. The real planner, layout and traffic; no network.

A row is one worker of a world (rank 0) of a GPT in stage 1 with one mirror, one lane each: pieces, messages sent and
received, bytes sent, bytes of partial sums that its whole host sends to other hosts, the largest share that an owner
has of a piece beside an even one, the CPU seconds that the routes take, once for a world, and the CPU milliseconds that
the code of reduction and hand-out takes in a step. That code is the real one, over tensors that have no memory (torch's
"meta") and a group whose messages are done at once: what is left is Python and the dispatch of its operations.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from shoal.blocks.values import WholeValues
from shoal.core.laying_out import lay_out
from shoal.core.layout import Layout, Trainable
from shoal.exchange import finite
from shoal.exchange.canonical import CanonicalReduction
from shoal.exchange.hand_out import HandOut
from shoal.exchange.pieces import elements_in
from shoal.exchange.traffic import Traffic
from shoal.group.group import GroupProgress
from shoal_controller.core.planning.planner import Candidate, PlanRequest, Terms, plan_start
from shoal_protos.plan import Member, Plan, Reason
from tables import Figure, note, show
from torch import Tensor

MODELS = {
    "10M": (320, 8, 256), "124M": (768, 12, 50_257), "1.3B": (2_048, 24, 50_257), "7B": (4_096, 32, 32_000),
}  # fmt: skip
"""Channels, layers, vocabulary."""
WORKERS = (4, 8, 64, 512)
MB = 1_000_000


def layout_of(model: str) -> Layout:
    """Unit by unit: embeddings, layers, the last norm."""
    channels, layers, vocabulary = MODELS[model]
    shapes: list[tuple[str, tuple[int, ...], int]] = [("tokens", (vocabulary, channels), 0)]
    shapes.append(("places", (1_024, channels), 0))
    for layer in range(1, layers + 1):
        for name, rows, columns in (("qkv", 3, 1), ("out", 1, 1), ("widen", 4, 1), ("narrow", 1, 4)):
            shapes.append((f"{layer}.{name}.weight", (rows * channels, columns * channels), layer))
            shapes.append((f"{layer}.{name}.bias", (rows * channels,), layer))
        shapes += [(f"{layer}.{norm}", (channels,), layer) for norm in ("w1", "b1", "w2", "b2")]
    shapes += [(f"norm.{part}", (channels,), layers + 1) for part in ("weight", "bias")]
    return lay_out([Trainable(name, shape, torch.float32, 0, unit) for name, shape, unit in shapes])


class Done:
    """A message that has arrived."""

    is_over = True

    def wait(self) -> None:
        """Returns at once."""


class InstantGroup:
    """A `Group` on which every message is done as it is posted."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.progress = 0, size, GroupProgress()

    def send(self, tensor: Tensor, to: int, tag: int) -> Done:
        return Done()

    def receive(self, tensor: Tensor, source: int, tag: int) -> Done:
        return Done()

    def wait(self, works: Sequence[Any]) -> None:
        """All are done."""

    def begin_wait(self, works: Sequence[Any]) -> Done:
        return Done()


def python_seconds(layout: Layout, traffic: Traffic) -> float:
    """CPU of a step's reduction and hand-out, the least of three steps."""
    flats = [torch.empty(bucket.elements, dtype=bucket.dtype, device="meta") for bucket in layout.buckets]
    copy = WholeValues(layout, flats)
    sums: Any = SimpleNamespace(live=copy, last=copy, finished=[copy], merge=lambda bucket: None)
    group: Any = InstantGroup(traffic.plan.world_size)
    least = float("inf")
    with patch.object(finite, "is_finite", lambda values: True):  # there are no values to look at
        for _ in range(3):
            begun = time.process_time()
            CanonicalReduction(group, traffic, sums, 0, lambda: None).finish()
            HandOut(group, copy, traffic, traffic.handed(0)).finish()
            least = min(least, time.process_time() - begun)
    return least


def row(model: str, workers: int, per_host: int) -> list[str]:
    layout = layout_of(model)
    candidates = [
        Candidate(Member(f"w{n}", f"i{n}", f"10.0.0.{n}:1"), f"host{n // per_host}", n) for n in range(workers)
    ]
    plan = plan_start(
        PlanRequest(
            Terms(workers, layout.blocks, mirrors=1, mirror_partners=4, fill_blocks_per_step=64), 1, Reason.START
        ),
        candidates,
    )
    begun = time.process_time()
    traffic = Traffic(plan, 0, layout)
    flows = [traffic.gathered, traffic.partials, traffic.mirrored(0), traffic.handed(0)]
    joint = traffic.joint
    seconds = time.process_time() - begun
    sent = [places for flow in flows for messages in flow.sends for _, places in messages]
    sent += [places for messages in joint for _, places in messages]
    received = sum(len(messages) for flow in flows for messages in flow.receives)
    shares = [[elements_in(places) for places in piece.owned] for piece in traffic.pieces]
    large = [sizes for sizes in shares if sum(sizes) > workers * layout.block_elements]
    worst = max((workers * max(sizes) / sum(sizes) for sizes in large), default=0.0)
    python_ms, where = 1e3 * python_seconds(layout, traffic), f"{model}, {workers} workers"
    note(
        Figure("Python of a step's exchange, CPU ms", where, [python_ms], digits=1),
        Figure("MB sent in a step", where, [4 * sum(map(elements_in, sent)) / MB], digits=0),
    )
    return [
        model, str(workers), str(len(layout.buckets)), str(len(traffic.pieces)), str(len(sent)), str(received),
        f"{4 * sum(map(elements_in, sent)) / MB:,.0f}", f"{4 * _leaving(plan, layout, per_host) / MB:,.0f}",
        f"{worst:.3f}" if large else "–", f"{seconds:.3f}", f"{python_ms:.1f}",
    ]  # fmt: skip


def _leaving(plan: Plan, layout: Layout, per_host: int) -> int:
    """Elements of partial sums that the first host sends to others."""
    elements = 0
    for rank in range(per_host):
        traffic = Traffic(plan, rank, layout)
        for flow, subtrees in (
            (traffic.partials.sends, len(traffic.lane_spans[rank])),
            (traffic.joint, len(traffic.joint_sum.left)),
        ):
            sent = (places for messages in flow for peer, places in messages if peer >= per_host)
            elements += subtrees * sum(map(elements_in, sent))
    return elements


def main() -> None:
    parser = argparse.ArgumentParser(description="What a step sends, by computation.")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--workers", nargs="+", type=int, default=list(WORKERS))
    parser.add_argument("--per-host", type=int, default=1, help="Workers that share a host.")
    given = parser.parse_args()
    head = [
        "model",
        "workers",
        "buckets",
        "pieces",
        "sends",
        "receives",
        "MB sent",
        "MB of sums leave the host",
        "largest share × n",
        "routes, CPU s",
        "Python of a step, CPU ms",
    ]
    show(
        "Messages of a step and worker",
        head,
        [row(*case, given.per_host) for case in product(given.models, given.workers)],
    )


if __name__ == "__main__":
    main()
