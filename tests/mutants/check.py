"""`python tests/mutants/check.py` (make lint): what does not fit of the rules at the tests, a sentence each.

That a rule which is broken is still Python, and uses no name that is not there, is checked by a test: it takes longer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rule import ROOT, Rule, arranged, read


def problems(found: Sequence[Rule], held: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Of all rules, as `read` gives them."""
    named = [*held, *((start, one.tests[0]) for one in found for start in (one.text, one.after) if start)]
    for start, test in named:
        if (count := sum(one.text.startswith(start) for one in found)) != 1:
            yield f"{test}: {count} rules begin with {start!r}, expected one"
    full = arranged(found, held)
    for one in found:
        if one.text not in {placed.text for placed in full} or one.text.startswith("…") != bool(one.after):
            yield f"{one.tests[0]}: the rule is in no section, or has `after` without …, or … without: {one.text!r}"
    for one in full:
        yield from _problems_of(one)


def _problems_of(rule: Rule) -> Iterator[str]:
    if bool(rule.edits) == bool(rule.needs):
        yield f"{rule.tests[0]}: expected edits, or what the rule `needs` where it cannot be broken: {rule.text!r}"
    for edit in rule.edits:
        text = (ROOT / edit.file).read_text() if (ROOT / edit.file).is_file() else ""
        if text.count(edit.old) != 1:
            yield f"{rule.tests[0]}: {edit.module} has {text.count(edit.old)} times, expected once: {edit.old!r}"
        if not rule.tests_of(edit):
            yield f"{rule.tests[0]}: {edit.by!r} does not hold the rule: {rule.text!r}"


if __name__ == "__main__":
    sys.exit("\n".join(problems(*read())) or None)
