"""Writes docs/rules.md from the rules at the tests: `python docs/generate/rules.py` (`make docs`).

A test says when the page is not current.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "rules.md"
sys.path.insert(0, str(ROOT / "tests"))

from rule import SECTIONS, Rule, rules  # noqa: E402

OPENING = """\
# The rules that equal bits and progress depend on

<!-- Written by `make docs` from the rules at the tests; do not edit. -->

Each of these rules comes from an observed or an imagined failure; breaking it gives other bits, or a job that hangs.
Each therefore has a test that fails when the rule is broken. The tables name the modules that implement a rule, the
files of the tests that check it, and the number of edits of those modules, its *mutants*, that break it. A rule that
begins with "…" continues the one above it.

A rule stands at its test: `@rule("the rule", "its section", broken_by=Edit("module", "old", "new"))` of `tests/rule.py`
has its text and the edits that break it, and `@holds("how it begins")` names it at further tests. `make lint` checks
that each edit still fits its module; `make mutants` applies each in a copy and reports those that no test notices. If
you change a rule, break it again. A new rule needs a test, and an edit that the test notices.
"""
HEAD = "| rule | modules | tests | mutants |\n|---|---|---|---|"


def page() -> str:
    """The whole page."""
    return "\n".join([OPENING, *("\n".join(section(name)) for name in SECTIONS)])


def section(name: str) -> list[str]:
    """Its heading and its table."""
    return [f"## {name}\n", HEAD, *(row(one) for one in rules() if one.section == name), ""]


def row(rule: Rule) -> str:
    """One rule's: modules by the last two parts of their names, which no two of them share."""
    modules = (".".join(edit.module.split(".")[-2:]) for edit in rule.edits)
    tests = (Path(test.partition("::")[0]).stem for test in rule.tests)
    mutants = f"needs {rule.needs}" if rule.needs else len(rule.edits)
    return f"| {rule.text} | {names(modules)} | {names(tests)} | {mutants} |"


def names(given: Iterable[str]) -> str:
    """Each once, as code, in the order in which they come."""
    return ", ".join(f"`{name}`" for name in dict.fromkeys(given))


if __name__ == "__main__":
    PAGE.write_text(page())
