"""What a step sends, by computation: `python benchmarks/messages.py`. The real planner, layout and traffic; no network.

A row is one worker of a world (rank 0) of a GPT in stage 1 with one mirror, one lane each: pieces, messages sent and
received, bytes sent, bytes of partial sums that its whole host sends to other hosts, the largest share that an owner
has of a piece beside an even one, and the CPU seconds that the routes take, once for a world.
"""

from __future__ import annotations

import argparse
import time
from itertools import product

import torch
from shoal.core.layout import Layout, Trainable, lay_out
from shoal.exchange.pieces import elements_in
from shoal.exchange.traffic import Traffic
from shoal_controller.core.planning.planner import Candidate, PlanRequest, Terms, plan_start
from shoal_protos.plan import Member, Plan, Reason
from tables import show

MODELS = {
    "10M": (320, 8, 256), "124M": (768, 12, 50_257), "1.3B": (2_048, 24, 50_257), "7B": (4_096, 32, 32_000),
}  # fmt: skip
"""Channels, layers, vocabulary."""
WORKERS = (4, 8, 64)
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
    return [
        model, str(workers), str(len(layout.buckets)), str(len(traffic.pieces)), str(len(sent)), str(received),
        f"{4 * sum(map(elements_in, sent)) / MB:,.0f}", f"{4 * _leaving(plan, layout, per_host) / MB:,.0f}",
        f"{worst:.3f}", f"{seconds:.3f}",
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
    ]
    show(
        "Messages of a step and worker",
        head,
        [row(*case, given.per_host) for case in product(given.models, given.workers)],
    )


if __name__ == "__main__":
    main()
