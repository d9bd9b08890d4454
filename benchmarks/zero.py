"""Steps of every ZeRO stage against PyTorch's: `python benchmarks/zero.py [--size 10M] [--workers 4] [--stages 1 2]`.

Workers under a real controller, one lane each; in the same processes rounds of DDP, of DDP with
ZeroRedundancyOptimizer, of FSDP2 (parameters kept between forward and backward, or freed) and of Shoal take turns
(interleaved.py), and so do the clusters of all rows (turns.py), so a busy machine is busy for all alike. With
`--links MBIT` every worker is a host of its own, whose link is shaped in both directions (needs root, `ip`, `tc` and
`nft`); then rows follow each other. One invocation is one size and one world, all of whose processes need memory at the
same time; with `--beside ddp` a row takes one to three minutes.

Targets, by stage. 1: 1.01 of DDP. 2: 1.05 of stage 1. 3: 0.80 of FSDP2 that frees with four workers and 0.85 with two,
1.20 of DDP at 10M and 1.00 at 85M. Each with one mirror: 1.05 of without, so that stage 1 with one has 1.06 of DDP. On
links: 1.1 × (its bytes ÷ DDP's bytes) of DDP. Ratios are medians of the ratios of neighbouring rounds, also of two rows
of Shoal. CPU seconds hardly depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

import model
from cluster import Cluster, Hosts, Job, end_cleanly
from ddp import WAYS
from tables import Cell, Figure, note, show, spread
from turns import Turns
from wire import MB, QUEUE

PATIENCE_SECONDS = 1200.0
OF_DDP_BY_STAGE_1, OF_STAGE_1_BY_STAGE_2 = 1.01, 1.05
OF_FSDP2 = {2: 0.85, 4: 0.80}
"""By workers, the most that a step of stage 3 may take of one of FSDP2."""
OF_DDP = {"10M": 1.20, "85M": 1.00}
OF_WITHOUT_MIRRORS = 1.05
OF_BYTES = 1.1
WALL, PROCESSOR, SENT = 0, 1, 2
FSDP2 = "fsdp2 reshard"
PEERS = {"ddp": "DDP", FSDP2: "FSDP2"}
"""Ways of ddp.py that the price of a copy is told beside, and their names there."""

Rounds = dict[str, list[tuple[float, float, float]]]
"""By way: (wall seconds, CPU seconds, bytes sent by the host that sends most) per step of each round."""


Case = tuple[int, int]
"""Stage and mirrors."""
Found = dict[Case, Rounds]


@dataclass(frozen=True)
class World:
    """What all rows of a table share."""

    size: str
    workers: int
    links: int
    """Mbit/s of each; 0: none."""
    beside: tuple[str, ...]
    rounds: int
    steps: int

    def measure(self, cases: Sequence[Case]) -> Found:
        """One cluster's rounds for each case; the clusters take turns."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
            turns = [Turns(folder, number, len(cases)) for number in range(len(cases))]
            clusters = [
                stack.enter_context(self._cluster(stack, *case, turn)) for case, turn in zip(cases, turns, strict=True)
            ]
            results = [cluster.results(".json", patience=PATIENCE_SECONDS) for cluster in clusters]
        return {case: dict(*found) for case, found in zip(cases, results, strict=True)}

    def _cluster(self, stack: ExitStack, stage: int, mirrors: int, turn: Turns) -> Cluster:
        arguments = (
            "--workers",
            str(self.workers),
            "--stage",
            str(stage),
            "--turns",
            str(turn),
            "--beside",
            *self.beside,
        )
        arguments += ("--rounds", str(self.rounds), "--steps", str(self.steps))
        job = Job(
            size=self.size, workers=self.workers, lanes=self.workers, mirrors=mirrors, script="interleaved.py",
            arguments=arguments,
        )  # fmt: skip
        hosts = stack.enter_context(Hosts(self.workers)) if self.links else None
        if hosts is not None:
            for host in range(1, self.workers + 1):
                hosts.shape(host, 1_000 * self.links, QUEUE)
        return Cluster(job, hosts)


def ratios(rounds: Rounds, way: str, index: int = WALL) -> list[float]:
    """Of Shoal's rounds to another way's, each with its neighbour."""
    return [mine[index] / theirs[index] for mine, theirs in zip(rounds["shoal"], rounds[way], strict=True)]


def between(rounds: Rounds, other: Rounds) -> list[float]:
    """Of Shoal's rounds in one cluster to those in another, each with the one whose turn was nearest."""
    return [mine[WALL] / theirs[WALL] for mine, theirs in zip(rounds["shoal"], other["shoal"], strict=True)]


def of_ddp_at_most(world: World, rounds: Rounds, stage: int, mirrors: int) -> float | None:
    """None: nothing is asked. A mirror may cost a step of stage 1 what it may cost any."""
    if world.links:
        return round(OF_BYTES * median(ratios(rounds, "ddp", SENT)), 3)
    if stage == 1 and mirrors <= 1:
        return round(OF_DDP_BY_STAGE_1 * OF_WITHOUT_MIRRORS**mirrors, 3)
    return OF_DDP.get(world.size) if stage == 3 else None


def of_fsdp2_at_most(world: World, stage: int) -> float | None:
    return OF_FSDP2.get(world.workers) if stage == 3 and not world.links else None


def judged(world: World, found: Found, stage: int, mirrors: int) -> list[Figure]:
    """What is asked of a row."""
    rounds, settings = found[stage, mirrors], f"{world.size}, {world.workers} workers"
    settings += f", {world.links} Mbit/s" if world.links else ""
    step = f"a step of stage {stage}"
    figures = []
    if (most := of_ddp_at_most(world, rounds, stage, mirrors)) is not None:
        figures.append(Figure(f"{step}, of DDP's", settings, ratios(rounds, "ddp"), most, mirrors))
    if stage == 2 and (1, mirrors) in found and not world.links:
        of = between(rounds, found[1, mirrors])
        figures.append(Figure(f"{step}, of stage 1's", settings, of, OF_STAGE_1_BY_STAGE_2, mirrors))
    if (most := of_fsdp2_at_most(world, stage)) is not None and FSDP2 in rounds:
        figures.append(Figure(f"{step}, of FSDP2's", settings, ratios(rounds, FSDP2), most, mirrors))
    if mirrors == 1 and (stage, 0) in found and not world.links:
        of = between(rounds, found[stage, 0])
        figures.append(Figure(f"{step}, of one's without a mirror", settings, of, OF_WITHOUT_MIRRORS))
    return figures


def note_price(world: World, found: Found) -> None:
    """What README.md says of what a copy costs."""
    for (stage, mirrors), rounds in found.items():
        for way in (one for one in PEERS if one in rounds):
            note(Cell(PEERS[way], None, "step, s", [one[WALL] for one in rounds[way]]))
        note(Cell(f"stage {stage}", mirrors, "step, s", [one[WALL] for one in rounds["shoal"]]))
        most = {"ddp": of_ddp_at_most(world, rounds, stage, mirrors), FSDP2: of_fsdp2_at_most(world, stage)}
        for way in (one for one in PEERS if one in rounds):
            of = ratios(rounds, way)
            note(Cell(f"stage {stage}", mirrors, f"step of {PEERS[way]}'s", of, most[way]))


def row(world: World, found: Found, stage: int, mirrors: int) -> list[str]:
    rounds = found[stage, mirrors]
    others = [
        f"{median(ratios(rounds, way)):.3f} ({median(ratios(rounds, way, PROCESSOR)):.3f})" for way in world.beside
    ]
    sent = [f"{median(one[SENT] for one in rounds['shoal']) / MB:.0f}"] if world.links else []
    asked = (f"{one.measured}: {median(one.values):.3f}, {one.verdict}" for one in judged(world, found, stage, mirrors))
    return [
        str(stage), str(mirrors), spread([one[WALL] for one in rounds["shoal"]]), *others, *sent, "; ".join(asked),
    ]  # fmt: skip


def main() -> None:
    end_cleanly()
    parser = argparse.ArgumentParser(description="Steps of every ZeRO stage.")
    parser.add_argument("--size", choices=list(model.SIZES), default="10M")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--stages", nargs="+", type=int, choices=[1, 2, 3], default=[1, 2, 3])
    parser.add_argument("--mirrors", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--links", type=int, default=0, metavar="MBIT", help="Mbit/s of each; 0: this host's loopback")
    parser.add_argument("--beside", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="of a round")
    given = parser.parse_args()
    if given.links and not Hosts.can_be_had():
        sys.exit("--links needs network namespaces: root, and the commands ip, tc and nft.")
    beside = tuple(dict.fromkeys(["ddp", *given.beside]))
    world = World(given.size, given.workers, given.links, beside, given.rounds, given.steps)
    title = f"A step, {world.size}, {world.workers} workers" + (f", {world.links} Mbit/s" if world.links else "")
    head = ["stage", "mirrors", "step, s", *(f"of {way} (CPU)" for way in beside)]
    head += ["MB sent", "target"] if world.links else ["target"]
    cases = list(product(given.stages, given.mirrors))
    found: Found = {}
    for together in [[case] for case in cases] if given.links else [cases]:
        found |= world.measure(together)
    note(*(figure for case in found for figure in judged(world, found, *case)))
    note_price(world, found)
    show(title, head, [row(world, found, *case) for case in found])


if __name__ == "__main__":
    main()
