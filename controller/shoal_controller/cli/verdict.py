"""The end of the demo: what each change of the world cost, and whether the bits are equal."""

from __future__ import annotations

from rich.table import Table
from shoal_protos.rest import Json
from shoal_protos.text import number

from shoal_controller.cli.endings import DONE, FAILED
from shoal_controller.cli.tables import resizes_table, show


def conclude(disturbed: Json, undisturbed: Json) -> int:
    """Print the table and the verdict; the exit status of the demo."""
    equal = bool(disturbed["fingerprint"]) and disturbed["fingerprint"] == undisturbed["fingerprint"]
    show("", "[bold]World changes[/]", resizes_table(disturbed["generations"]), "", runs(disturbed, undisturbed), "")
    if equal:
        show("[bold green]The same bits:[/] both runs ended with equal weights and optimizer state.")
        return DONE
    show("[bold red]Different bits:[/] the two runs did not end with equal weights and optimizer state.")
    return FAILED


def runs(disturbed: Json, undisturbed: Json) -> Table:
    """Both runs, a line each; the fingerprints below each other."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name, report in (("disturbed", disturbed), ("undisturbed", undisturbed)):
        ended = f"step {report['steps']}, loss {number(report['final_loss'], 8)}"
        table.add_row(name, f"{ended}\n{report['fingerprint'] or 'no fingerprint'}")
    return table
