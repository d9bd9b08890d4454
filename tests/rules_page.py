"""docs/rules.md as data: for the test that holds the page, and for the command that breaks every rule of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/rules.md"


@dataclass(frozen=True, slots=True)
class Rule:
    """One row. `held`: the ids of the tests that hold it."""

    text: str
    where: str
    held: tuple[str, ...]
    tried: str

    @property
    def is_open(self) -> bool:
        """Whether it cannot be tried here: its row says why."""
        return "**needs" in self.tried or "**not built" in self.tried


def rules() -> list[Rule]:
    """Every row of the page. A row of other columns has no `where` and holds nothing."""
    found = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if line.startswith("| ") and cells[0] != "rule":
            where, held, tried = (cells[1], cells[2], cells[3]) if len(cells) == 4 else ("", "", cells[-1])
            tests = re.findall(r"`(tests/[\w/]+\.py::\w+(?:\[[^]`]*\])?)`", held)
            found.append(Rule(cells[0], where, tuple(tests), tried))
    return found
