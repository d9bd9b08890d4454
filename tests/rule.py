"""The rules that equal bits and progress depend on, each at a test that fails when it is broken.

`@rule` stands at a test, with edits of the product that break the rule; `@holds` at further tests of it. `rules` reads
both from the sources and runs no test: docs/generate/rules.py makes a page of them, tests/mutants/run.py every edit in
a copy, and tests/mutants/check.py (make lint) says what does not fit.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"shoal": "worker", "shoal_controller": "controller", "shoal_protos": "protos"}
SECTIONS = (
    "Arithmetic and layout", "A step", "Groups", "Devices", "A change of the world",
    "Cells", "Not marked in the design, but needed as much", "Data, evaluations and the doors",
)  # fmt: skip
Test = TypeVar("Test")


@dataclass(frozen=True, slots=True)
class Edit:
    """`old`, which stands once in a `module` of the product, becomes `new`: then a test of the rule fails, or `by`."""

    module: str
    old: str
    new: str
    by: str = ""

    @property
    def file(self) -> str:
        """Where the module is, from the repository's root."""
        return f"{FOLDERS.get(self.module.partition('.')[0])}/{self.module.replace('.', '/')}.py"


@dataclass(frozen=True, slots=True)
class Rule:
    """What a test, or one `case` of it, holds. A rule without edits `needs` what is not here; one that goes on ("…")
    from another stands `after` that, which begins so. `tests`: the ids of all that hold it, its own first.
    """

    text: str
    section: str
    broken_by: Edit | Sequence[Edit] = ()
    needs: str = ""
    after: str = ""
    case: str = ""
    tests: tuple[str, ...] = ()

    def __call__(self, test: Test) -> Test:
        return test

    @property
    def edits(self) -> Sequence[Edit]:
        return (self.broken_by,) if isinstance(self.broken_by, Edit) else self.broken_by

    def tests_of(self, edit: Edit) -> list[str]:
        """One of these has to notice the edit."""
        return [test for test in self.tests if edit.by in ("", test.partition("::")[2])]


rule = Rule


def holds(starts: str | Sequence[tuple[str, str]]) -> Callable[[Test], Test]:
    """The test holds the rule that starts so; or its cases do, by RULES of its file: pairs of a case and a start."""
    return lambda test: test


def _decorators() -> Iterator[tuple[str, Any]]:
    """In the order of files and lines: a test's id, and its rule, or the pairs of case and start that it holds."""
    names = {"Edit": Edit, "rule": Rule, "holds": lambda starts: [("", starts)] if isinstance(starts, str) else starts}
    for file in sorted(Path(__file__).parent.rglob("test_*.py")):
        if "from rule import" in (source := file.read_text()):
            for node in ast.parse(source).body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RULES":
                    names["RULES"] = ast.literal_eval(node.value)
                for call in getattr(node, "decorator_list", ()):
                    if isinstance(call, ast.Call) and ast.unparse(call.func) in names:
                        given = eval(compile(ast.Expression(call), file, "eval"), names)
                        yield f"{file.relative_to(ROOT)}::{node.name}", given


@cache
def read() -> tuple[list[Rule], list[tuple[str, str]]]:
    """The rules as they stand at their own tests, and how the others begin that tests hold."""
    found, held = [], []
    for test, given in _decorators():
        if isinstance(given, Rule):
            found.append(replace(given, tests=(f"{test}[{given.case}]" if given.case else test,)))
        else:
            held += [(start, f"{test}[{case}]" if case else test) for case, start in given]
    return found, held


def arranged(found: Sequence[Rule], held: Sequence[tuple[str, str]]) -> list[Rule]:
    """Section by section, each rule with all its tests, and followed by those that go on from it."""
    full = [replace(one, tests=(*one.tests, *(t for start, t in held if one.text.startswith(start)))) for one in found]

    def with_sequels(first: Rule) -> list[Rule]:
        sequels = (one for one in full if one.after and first.text.startswith(one.after))
        return [first, *(each for one in sequels for each in with_sequels(one))]

    firsts = (one for name in SECTIONS for one in full if one.section == name and not one.after)
    return [each for one in firsts for each in with_sequels(one)]


def rules() -> list[Rule]:
    """All of them, arranged."""
    return arranged(*read())
