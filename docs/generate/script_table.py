"""Write docs/scripts.md from the table of scripts, their changed lines, and what `make scripts` has measured.

`make docs` runs it; a test says when the page is not current, or when a script is another than the measured one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from scripts.changed_lines import changed_lines  # noqa: E402
from scripts.table import SCRIPTS, Script  # noqa: E402

PAGE = ROOT / "docs" / "scripts.md"
MEASURED = ROOT / "tests" / "scripts" / "measured.json"

OPENING = """# Ten scripts, before and after

See how little a script changes, and that its result does not. Each script is in the repository twice: as its community
writes it, and as it trains elastically with Shoal. `make scripts` runs both and writes this table.

- **Changed lines** are lines of code that were added or changed. Deleted lines, comments, docstrings and changes of
  indentation alone are not counted (`git diff -w`). At most six may change; in the loop of nanoGPT, whose `get_batch`
  becomes a data set, twelve; in the loop of Diffusers, which averages weights and saves them, ten.
- **Loss** is the loss of the last optimizer step, over its whole batch. The original runs alone on the same samples
  with the same random numbers: `tests/scripts/original.py` gives its `DataLoader` the job's order. Sums in another
  order may differ in the last digits, so up to 1 in 10,000 is allowed, and half of the last digit that the original
  prints.
- **Fingerprints** cover parameters, optimizer state and buffers after the last step. They come from `shoal run` with
  one, two and three workers, and with three of which one is killed (SIGKILL) in the middle of a step. They are equal,
  bit for bit, and so are the weights that a script saves at its end.
"""

CLOSING = """
The losses and fingerprints are those of PyTorch {torch} on the CPU. Another version or another kind of CPU may give
different ones, which are again equal in every world. [Porting](porting.md) explains the changes.
"""

COLUMNS = ("script", "before", "changed lines", "steps", "loss before", "loss", "worlds of 1 to 3", "through a kill")
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"


def row(script: Script, measured: dict[str, Any]) -> str:
    """One script's."""
    changed = len(changed_lines(script.original.read_text(), script.port.read_text()))
    prints = [measured["fingerprints"][world][:12] for world in ("1", "2", "3", "killed")]
    equal = "equal" if len(set(prints[:3])) == 1 else "differ"
    killed = "equal" if prints[3] == prints[0] else "differs"
    cells = [
        f"{script.title}: `examples/{script.name}.py`",
        f"`tests/scripts/originals/{script.name}.py`",
        f"{changed} of {script.limit}",
        str(measured["steps"]),
        measured["original_loss"],
        f"{measured['loss']:.6f}",
        f"{equal} (`{prints[0]}`)",
        killed,
    ]
    return f"| {' | '.join(cells)} |\n"


def unmeasured(script: Script) -> str:
    """A script that is here, before `make scripts` was run for it."""
    changed = len(changed_lines(script.original.read_text(), script.port.read_text()))
    names = f"{script.title}: `examples/{script.name}.py` | `tests/scripts/originals/{script.name}.py`"
    return f"| {names} | {changed} of {script.limit} | {' | '.join(['not measured yet'] * 5)} |\n"


def page() -> str:
    """The page."""
    kept = json.loads(MEASURED.read_text())
    rows = [row(script, kept[script.name]) if script.name in kept else unmeasured(script) for script in SCRIPTS]
    torch = ", ".join(sorted({measured["torch"] for measured in kept.values()})) or "one version"
    return f"{OPENING}\n{HEAD}{''.join(rows)}{CLOSING.format(torch=torch)}"


if __name__ == "__main__":
    PAGE.write_text(page())
