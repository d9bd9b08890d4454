"""The mutants of `mutants.toml`: each breaks one rule of docs/rules.md by a small change of the product's text."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from rules_page import ROOT, Rule, rules

FILE = Path(__file__).with_name("mutants.toml")


@dataclass(frozen=True, slots=True)
class Mutant:
    """`before`, which stands once in `file`, becomes `after`; `rule` is how the rule's row begins."""

    rule: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...] = ()
    """Which tests have to notice, where not all of the row's are meant."""

    def broken_text(self) -> str:
        """The file with the rule broken. Raises `ValueError` where the mutant does not fit the code any more, or is not
        Python: what cannot be imported would be noticed by any test.
        """
        text = (ROOT / self.file).read_text()
        if text.count(self.before) != 1:
            raise ValueError(
                f"the mutant of {self.rule!r} looks for a text that stands {text.count(self.before)} times in "
                f"{self.file}, expected once: {self.before!r}"
            )
        broken = text.replace(self.before, self.after)
        try:
            compile(broken, self.file, "exec")
        except SyntaxError as error:
            raise ValueError(f"the mutant of {self.rule!r} is not Python: {error}") from None
        return broken

    def row(self) -> Rule:
        """The rule that it breaks. Raises `ValueError` where the page has no such row, or several."""
        found = [rule for rule in rules() if rule.text.startswith(self.rule)]
        if len(found) != 1:
            raise ValueError(f"{len(found)} rows of docs/rules.md begin with {self.rule!r}, expected one")
        return found[0]


def mutants() -> list[Mutant]:
    """All of them, in the page's order."""
    found = tomllib.loads(FILE.read_text())["mutant"]
    return [Mutant(**{**one, "tests": tuple(one.get("tests", ()))}) for one in found]
