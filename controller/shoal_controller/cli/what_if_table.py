"""What `shoal what-if` prints: all that was assumed, then a row for each job of the grid, and where its time went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal_protos.text import duration, plural

from shoal_controller.cli.options import Form
from shoal_controller.cli.output import echo
from shoal_controller.cli.tables import show, table_of, written
from shoal_controller.core.overview.idle_lanes import USE_SAID_FROM, WORDS
from shoal_controller.simulation.paces import Paces
from shoal_controller.simulation.sweep import GridRow, best
from shoal_controller.simulation.traces import Counts, TraceWindow

if TYPE_CHECKING:
    from rich.console import RenderableType

UNKNOWN = (
    "A death is noticed at once, by a refused connection; a lane that has been trained is not trained again.",
    "Not simulated: a network that gets slower with more workers, workers of different speed, steps that fills make "
    "longer, checkpoints that cannot be read.",
)


@dataclass(frozen=True, slots=True)
class Assumed:
    """What all figures rest on."""

    trace: str
    counts: Counts
    window: TraceWindow
    begin: float
    """Seconds of the trace before the window."""
    paces: Paces
    workers: int
    machines: int
    measured: str | None
    """The job whose figures were taken."""

    def sentences(self) -> list[str]:
        """Return it in sentences."""
        return [*self._of_trace(), *self._of_job(), *UNKNOWN]

    def _of_trace(self) -> list[str]:
        window, last = self.window, self.counts[-1][0]
        peak = max(there for _, there in self.counts)
        losses = sum(not move.comes for move in window.moves)
        again = f", which begins again every {duration(last)}" if self.begin + window.seconds > last else ""
        many = f", each of which stands for {self.machines / peak:.3g}" if self.machines > peak else ""
        return [
            f"Trace: {self.trace}, {plural(peak, 'machine')} at most{many}{again}.",
            f"The job sees {duration(window.seconds)} of it from {self.begin / 3600:g} h on, by the machines that it "
            f"has a use for: {window.mean():.1f} on average; {losses} go, {len(window.moves) - losses} come.",
        ]

    def _of_job(self) -> list[str]:
        paces = self.paces
        step = paces.lane * paces.of_lanes / self.workers + paces.overhead
        whence = f", as measured of job {self.measured}" if self.measured is not None else ""
        return [
            f"A step that {plural(self.workers, 'worker')} share evenly takes {step:.3g} s{whence}, "
            f"{paces.overhead:.3g} s of it beside the lanes; the batch is the same with any number of lanes.",
            f"A worker can train {paces.start:.3g} s after its machine comes. A group is built in {paces.group:g} s.",
            f"Training waits {paces.save:g} s for a checkpoint, which is whole {paces.write:g} s later and is read in "
            f"{paces.restore:g} s.",
        ]


def show_tried(tried: Sequence[GridRow], assumed: Assumed, form: Form) -> None:
    """Print the jobs of the grid, never without what was assumed."""
    chosen = best(tried)
    rows = [_row(one, one is chosen) for one in tried]
    if form is Form.TABLE:
        show(*assumed.sentences(), "", _table(rows), *_ending(rows, tried))
    else:
        echo(written({"assumed": assumed.sentences(), "jobs": rows}, form))


def _row(one: GridRow, is_best: bool) -> dict[str, Any]:
    """A job of the grid as JSON."""
    outcome, job = one.outcome, one.outcome.job
    each = one.cost_of_a_step
    return {
        "lanes": job.lanes, "mirrors": job.mirrors, "spares": job.spares, "min": job.least,
        "save_steps": job.save_steps, "goodput_ratio": outcome.goodput, "undisturbed_ratio": outcome.undisturbed,
        "steps": outcome.steps, "dollars_per_1000_steps": None if each is None else 1000 * each,
        "seconds_to_end": one.seconds, "dollars_to_end": one.cost,
        "worker_seconds": {use.value: seconds for use, seconds in outcome.uses.items()},
        "wanted_seconds": job.workers * outcome.seconds, "machine_seconds": outcome.machine_seconds,
        "losses": outcome.losses, "joins": outcome.joins, "worlds": outcome.worlds, "returns": outcome.returns,
        "lost_steps": outcome.lost_steps, "failure": outcome.failure, "best": is_best,
    }  # fmt: skip


def _lost(row: dict[str, Any]) -> str:
    """Where the wanted workers' time went that did not train."""
    parts = {use: row["worker_seconds"][use.value] / row["wanted_seconds"] for use in WORDS}
    most = sorted((use for use in WORDS if parts[use] >= USE_SAID_FROM), key=lambda use: -parts[use])
    found = [f"{parts[use]:.0%} {WORDS[use]}" for use in most]
    found += [f"{row['returns']} × back, {row['lost_steps']} steps"] if row["returns"] else []
    found += [f"failed: {row['failure']}"] if row["failure"] else []
    return ", ".join(found) or "–"


def _table(rows: Sequence[dict[str, Any]]) -> RenderableType:
    numbers = ["lanes", "mirrors", "spares", "min", "save", "goodput", "of what was there", "steps"]
    priced = any(row["dollars_per_1000_steps"] is not None for row in rows)
    timed = any(row["seconds_to_end"] is not None for row in rows)
    numbers += ["$ a 1,000"] * priced + ["done in"] * timed
    table = table_of(*numbers, "lost", "", numbers=numbers)
    for row in rows:
        cells = [row["lanes"], row["mirrors"], row["spares"], row["min"], row["save_steps"] or "–"]
        cells += [f"{row['goodput_ratio']:.1%}", f"{row['undisturbed_ratio']:.1%}", f"{row['steps']:,}"]
        dollars, seconds = row["dollars_per_1000_steps"], row["seconds_to_end"]
        cells += ["–" if dollars is None else f"{dollars:,.2f}"] * priced
        cells += ["–" if seconds is None else duration(seconds)] * timed
        table.add_row(*map(str, cells), _lost(row), "<- best" if row["best"] and len(rows) > 1 else "")
    return table


def _ending(rows: Sequence[dict[str, Any]], tried: Sequence[GridRow]) -> list[str]:
    """That nothing keeps what is asked for."""
    aims = tried[0].aims
    asked = [f"{duration(aims.deadline)} (--deadline)"] if aims.deadline is not None else []
    asked += [f"${aims.budget:,.2f} (--budget)"] if aims.budget is not None else []
    if not asked or any(row["best"] for row in rows):
        return []
    return ["", f"None of these makes {aims.steps:,} steps within {' and '.join(asked)}."]
