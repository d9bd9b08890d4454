"""The end of the demo: what each change of the world cost, and whether the bits are equal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from shoal_controller.cli.client import Json
from shoal_controller.cli.endings import DONE, FAILED
from shoal_controller.cli.tables import amount, number, seconds, show


def conclude(disturbed: Json, undisturbed: Json) -> int:
    """Print the table and the verdict; the exit status of the demo."""
    equal = bool(disturbed["fingerprint"]) and disturbed["fingerprint"] == undisturbed["fingerprint"]
    show("", resizes(disturbed["generations"]), "", runs(disturbed, undisturbed), "")
    if equal:
        show("[bold green]The same bits:[/] both runs ended with equal weights and optimizer state.")
        return DONE
    show("[bold red]Different bits:[/] the two runs did not end with equal weights and optimizer state.")
    return FAILED


def resizes(generations: Sequence[Json]) -> Table:
    """Every change of the disturbed job's world. From peers: in the pause, and by fills beside training."""
    table = Table(title="World changes", title_justify="left")
    columns = (
        "gen",
        "reason",
        "workers",
        "at step",
        "pause",
        "promoted",
        "in pause",
        "by fills",
        "checkpoint",
        "steps lost",
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "reason" else "right", no_wrap=True)
    for world in generations:
        row = (
            world["generation"],
            world["reason"],
            world["workers"],
            world["from_step"],
            seconds(world["pause_seconds"]),
        )
        moved = (amount(world["bytes"][source]) for source in ("pause", "fill", "checkpoint"))
        table.add_row(*map(str, row), str(world["promoted_blocks"]), *moved, str(world["lost_steps"]))
    return table


def runs(disturbed: Json, undisturbed: Json) -> Table:
    """Both runs, a line each; the fingerprints below each other."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name, report in (("disturbed", disturbed), ("undisturbed", undisturbed)):
        ended = f"step {report['steps']}, loss {number(report['final_loss'], 8)}"
        table.add_row(name, f"{ended}\n{report['fingerprint'] or 'no fingerprint'}")
    return table
