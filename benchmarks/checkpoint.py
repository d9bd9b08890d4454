"""What a checkpoint costs, and how long it takes to go on from one: `python benchmarks/checkpoint.py [--size 85M]`.

Four workers under a real controller, stage 1 with a mirror, AdamW; in the same processes the same model under FSDP2
with torch.distributed.checkpoint, and under plain DDP (sharded.py). Per round `DCP save`, `DCP async_save`, the same
with the niceness of Shoal's writer, DDP with DCP, and Shoal take turns (checkpoint_rounds.py). A plain step is the
median of three before and three after a save. Measured are:

- stall: how long training stands still for the save, on the worker where it is longest: the call of `save`, of
  `async_save` (with the `get_state_dict` that it needs), of Shoal's boundary at which the copy is made, and of the sums
  of all blocks before the vote after it;
- longest: the longest step from the save to its end, less a plain one;
- cost: the sum over all these steps of (step - plain step); CPU, of all processes, likewise;
- time to write: from the beginning of that call until the file is there that makes the checkpoint whole. Shoal's
  leader hears in the votes that all have written, so it writes the manifest after one vote more;
- bytes: what the checkpoint's folder takes on the disk, against parameters and both moments;
- restore: in process, imports, model and groups not counted, from all to all, in a world of 3 and one of 2: DCP's
  `get_state_dict`, `load` and `set_state_dict`; Shoal's `take_up` of a plan, which is looking at the place, reading,
  verifying (DCP verifies nothing), and handing parameters to everyone. Mirrors are filled later, beside training; FSDP2
  has none. Files are in the page cache for both. The first round of everything is not counted.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from statistics import median

import model
from cluster import Cluster, Job, end_cleanly
from sharded import state_bytes
from tables import Figure, note, show, spread, verdict

WORKERS = 4
SMALLER = (3, 2)
PATIENCE_SECONDS = 3600.0

Rounds = dict[str, list[dict[str, float]]]
"""By way: the figures of each round."""

TARGETS = (
    ("stall", "DCP save", 0.1),
    ("stall", "DCP async_save", 1.0),
    ("longest", "DCP async_save", 1.0),
    ("cost", "DCP async_save", 0.5),
    ("write", "DCP async_save", 1.5),
    ("write", "DCP async_save, nice", 1.5),
)
"""Figure, what it is compared with, and the greatest ratio."""
NAMES = {"stall": "the stall", "longest": "the longest step", "cost": "the cost", "write": "the time to write"}
"""Of figures, in README.md."""
MOST_BYTES = 1.01
"""Of the state."""
MOST_RESTORE = 1.0
"""Of DCP's."""


def measure(task: str, workers: int, mirrors: int, given: argparse.Namespace, folder: Path) -> Rounds:
    """One cluster's rounds."""
    arguments = ("--task", task, "--folder", str(folder), "--rounds", str(given.rounds))
    job = Job(
        size=given.size, workers=workers, lanes=WORKERS, mirrors=mirrors, script="checkpoint_rounds.py",
        arguments=arguments, spec={"workers": {"wanted": workers, "min": workers}},
    )  # fmt: skip
    with Cluster(job) as cluster:
        return dict(*cluster.results(".json", patience=PATIENCE_SECONDS))


def values(rounds: Rounds, way: str, figure: str) -> list[float]:
    return [one[figure] for one in rounds[way]]


def save_row(rounds: Rounds, way: str, state: int) -> list[str]:
    """One way's figures."""
    seconds = [spread(values(rounds, way, figure)) for figure in ("step", "stall", "longest", "cost")]
    work, write = (spread(values(rounds, way, figure), 2) for figure in ("processor", "write"))
    return [way, *seconds, work, write, f"{median(values(rounds, way, 'bytes')) / state:.4f}"]


def compared(rounds: Rounds, figure: str, way: str, other: str) -> tuple[float, float]:
    """A ratio of medians, and the median of the ratios of neighbouring rounds. The larger one is judged."""
    mine, theirs = values(rounds, way, figure), values(rounds, other, figure)
    ratio = median(mine) / median(theirs)
    return ratio, median(a / b for a, b in zip(mine, theirs, strict=True))


def judged(rounds: Rounds, figure: str, way: str, other: str, target: float) -> list[str]:
    ratio, neighbours = compared(rounds, figure, way, other)
    return [f"{figure} of {other}'s", f"{ratio:.3f}", f"{neighbours:.3f}", verdict(max(ratio, neighbours), target)]


def show_saves(rounds: Rounds, given: argparse.Namespace) -> None:
    state = state_bytes(model.build(given.size))
    head = ["", "step, s", "stall, s", "longest, s", "cost, s", "CPU, s", "to write, s", "bytes of state"]
    title = f"Saving {given.size} parameters ({state / 1e6:.0f} MB of state)"
    show(f"{title}, {WORKERS} workers, mirrors {given.mirrors}", head, [save_row(rounds, way, state) for way in rounds])
    rows = [judged(rounds, figure, "Shoal", other, target) for figure, other, target in TARGETS]
    share = median(values(rounds, "Shoal", "bytes")) / state
    rows.append(["bytes of the state", f"{share:.4f}", "–", verdict(share, MOST_BYTES)])
    show("Shoal's saves", ["", "ratio", "neighbours", "target"], rows)
    settings = f"{given.size}, {WORKERS} workers"
    for figure, other, target in TARGETS:
        of = max(compared(rounds, figure, "Shoal", other))
        note(Figure(f"a save: {NAMES[figure]}, of {other}'s", settings, [of], target, given.mirrors))
    note(Figure("a save: bytes on the disk, of the state", settings, [share], MOST_BYTES, given.mirrors, digits=4))


def show_restores(found: dict[int, Rounds], size: str, mirrors: int) -> None:
    rows = []
    for workers, rounds in found.items():
        of, where = max(compared(rounds, "seconds", "Shoal", "DCP load")), f"{size}, {WORKERS} → {workers} workers"
        note(Figure("a restore, of DCP load's", where, [of], MOST_RESTORE, mirrors))
        for way in rounds:
            ratio = judged(rounds, "seconds", way, "DCP load", MOST_RESTORE)[1:] if way == "Shoal" else ["", "", ""]
            seconds, work = (spread(values(rounds, way, figure), 2) for figure in ("seconds", "processor"))
            rows.append([f"{WORKERS}→{workers}, {way}", seconds, work, *ratio])
    head = ["", "restore, s", "CPU, s", "of DCP's", "neighbours", "target"]
    show(f"Restoring {size} parameters", head, rows)


def main() -> None:
    end_cleanly()
    parser = argparse.ArgumentParser(description="What a checkpoint costs.")
    parser.add_argument("--size", choices=list(model.SIZES), default="85M")
    parser.add_argument("--rounds", type=int, default=7, help="of each way (default 7)")
    parser.add_argument("--mirrors", type=int, default=1)
    parser.add_argument("--place", type=Path, help="where checkpoints are written (default: the temporary folder)")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="shoal-bench-checkpoints-", dir=given.place))
    try:
        show_saves(measure("save", WORKERS, given.mirrors, given, folder), given)
        restores = {workers: measure("restore", workers, given.mirrors, given, folder) for workers in SMALLER}
        show_restores(restores, given.size, given.mirrors)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
