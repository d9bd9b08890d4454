"""Rules at their tests: each is broken by edits that fit the product, and held by tests and cases that exist."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mutants.check import problems
from mutants.run import Mutant, part
from rule import ROOT, SECTIONS, Edit, Rule, arranged, read, rules

SIMULATION = ROOT / "tests/simulation"
ROWS = Edit("shoal.exchange.finite", "ROW = 4_096", "ROW = 8_192")
FITS = Rule("A rule", SECTIONS[1], ROWS, tests=("tests/unit/test_x.py::test_x",))
SEQUEL = replace(FITS, text="… and more", after="A rule")


def mutants() -> Iterator[Mutant]:
    return (Mutant(one, edit) for one in rules() for edit in one.edits)


def switched_off() -> set[str]:
    """The rules of tests/simulation/mutations.py."""
    for node in ast.parse((SIMULATION / "mutations.py").read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "MUTATIONS":
            assert isinstance(node.value, ast.Dict)
            return {str(ast.literal_eval(key)) for key in node.value.keys if key is not None}
    raise AssertionError("MUTATIONS is not where it was")


def test_all_that_tests_say_of_rules_fits() -> None:
    assert len(rules()) > 300
    assert list(problems(*read())) == []


@pytest.mark.parametrize(
    ("found", "held", "sentences"),
    [
        ([FITS, SEQUEL, replace(SEQUEL, text="… and most", after="… and more")], [("A r", "test_y")], []),
        ([replace(FITS, broken_by=(), needs="CUDA")], [], []),
        ([FITS], [("Another", "test_y")], ["test_y: 0 rules begin with 'Another'"]),
        ([FITS, FITS], [], ["2 rules begin with 'A rule'"] * 2),
        ([FITS, replace(SEQUEL, after="Another")], [], ["0 rules begin with 'Another'", "in no section"]),
        ([FITS, replace(SEQUEL, after="")], [], ["… without"]),
        ([replace(FITS, section="Nowhere")], [], ["in no section"]),
        ([replace(FITS, broken_by=())], [], ["expected edits"]),
        ([replace(FITS, broken_by=replace(ROWS, old="ROW"))], [], ["finite has 4 times, expected once: 'ROW'"]),
        ([replace(FITS, broken_by=replace(ROWS, module="shoal.rows"))], [], ["shoal.rows has 0 times"]),
        ([replace(FITS, broken_by=replace(ROWS, by="test_y"))], [], ["'test_y' does not hold the rule"]),
    ],
)
def test_what_does_not_fit_is_named(found: list[Rule], held: list[tuple[str, str]], sentences: list[str]) -> None:
    named = list(problems(found, held))
    assert len(named) == len(sentences) and all(one in line for one, line in zip(sentences, named, strict=True)), named


def test_rules_go_by_section_and_sequels_follow_the_rule_that_they_go_on_from() -> None:
    first, last = replace(FITS, text="First", section=SECTIONS[0]), replace(FITS, text="Last")
    assert [one.text for one in arranged([FITS, last, SEQUEL, first], [])] == ["First", "A rule", "… and more", "Last"]


def test_one_test_has_to_notice_an_edit_where_it_is_named_else_any_of_the_rule() -> None:
    (one,) = arranged([FITS], [("A rule", "tests/unit/test_x.py::test_y")])
    assert one.tests_of(ROWS) == ["tests/unit/test_x.py::test_x", "tests/unit/test_x.py::test_y"]
    assert one.tests_of(replace(ROWS, by="test_y")) == ["tests/unit/test_x.py::test_y"]


def test_every_case_that_holds_a_rule_exists() -> None:
    known = {"test_rules.py": switched_off(), "test_scenarios.py": {f.stem for f in SIMULATION.rglob("*.txt")}}
    named = [test.partition("[") for one in rules() for test in one.tests if "[" in test]
    assert len(named) > 80
    assert [case for test, _, case in named if case[:-1] not in known[Path(test.partition("::")[0]).name]] == []


def test_every_rule_that_is_broken_is_still_python() -> None:
    """What cannot be imported would be noticed by any test."""
    for mutant in mutants():
        compile(mutant.broken_text(), mutant.edit.file, "exec")


def test_no_mutant_uses_a_name_that_is_not_there(tmp_path: Path) -> None:
    """It would fail of itself, and break no rule."""
    for number, mutant in enumerate(mutants()):
        (tmp_path / f"{number}_{Path(mutant.edit.file).name}").write_text(mutant.broken_text())
    ruff = Path(sys.executable).with_name("ruff")
    found = subprocess.run(
        [ruff, "check", "--isolated", "--select", "F821,F823", tmp_path], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout


def test_the_parts_of_a_run_are_all_of_it() -> None:
    everything = list(range(20))
    assert sorted(number for n in (1, 2, 3) for number in everything[part(f"{n}/3")]) == everything
    with pytest.raises(ValueError, match="4/3"):
        part("4/3")
