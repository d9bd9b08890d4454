"""The page of rules names tests and files that exist, and every rule that is switched off in the simulation."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from mutants.mutant import mutants
from rules_page import PAGE as FILE
from rules_page import ROOT, rules

PAGE = FILE.read_text()
SCENARIOS = {file.stem for file in (ROOT / "tests/simulation/scenarios").glob("*.txt")}
SHORT = {"worker/": "worker/shoal/", "core/": "controller/shoal_controller/core/", "protos/": "protos/"}


@cache
def functions_of(file: str) -> set[str]:
    """The functions of a test file."""
    body = ast.parse((ROOT / file).read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def switched_off() -> set[str]:
    """The rules of tests/simulation/mutations.py."""
    for node in ast.parse((ROOT / "tests/simulation/mutations.py").read_text()).body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.value, ast.Dict)
            and "MUTATIONS" in ast.dump(node.target)
        ):
            return {str(ast.literal_eval(key)) for key in node.value.keys if key is not None}
    raise AssertionError("MUTATIONS is not where it was")


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)(?:\[([^]`]*)\])?`", PAGE)
    assert len(named) > 60
    missing = [f"{file}::{name}" for file, name, _ in named if name not in functions_of(file)]
    known = {"test_rules.py": switched_off(), "test_scenarios.py": SCENARIOS}
    missing += [case for file, _, case in named if case and case not in known[Path(file).name]]
    assert missing == []


def test_every_rule_says_where_it_lives_and_what_holds_it_or_why_nothing_does() -> None:
    for rule in rules():
        opened = rule.tried.startswith(("**needs", "**not built"))
        assert (rule.where and rule.held and rule.tried) or opened, rule.text


def test_every_file_that_the_page_names_exists() -> None:
    for file in re.findall(r"`((?:worker|core|protos)/[\w/]+\.py)`", PAGE):
        short = next(start for start in SHORT if file.startswith(start))
        assert (ROOT / file.replace(short, SHORT[short], 1)).exists(), file


def test_every_rule_is_broken_by_a_mutant_that_fits_the_code() -> None:
    broken = {mutant.row().text for mutant in mutants() if mutant.broken_text()}
    assert [rule.text for rule in rules() if not rule.is_open and rule.text not in broken] == []


def test_no_mutant_uses_a_name_that_is_not_there(tmp_path: Path) -> None:
    """It would fail of itself, and break no rule."""
    for number, mutant in enumerate(mutants()):
        (tmp_path / f"{number}_{Path(mutant.file).name}").write_text(mutant.broken_text())
    ruff = Path(sys.executable).with_name("ruff")
    found = subprocess.run(
        [ruff, "check", "--isolated", "--select", "F821,F823", tmp_path], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout
