"""Every promise to users is held by a test of `make test`, and each test is `make test`'s or `make check`'s."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tiers import FOLDERS, PROMISES, promise, sort_into_tiers
from times import by_file, seconds_by_test

TESTS = Path(__file__).resolve().parents[1]

REPORT = """<testsuites><testsuite>
<testcase classname="tests.unit.test_a" name="test_x[1]" time="0.5"/>
<testcase classname="tests.unit.test_b" name="test_y" time="2"/>
<testcase classname="tests.unit.test_a" name="test_z" time="1"/>
</testsuite></testsuites>"""


def held() -> set[str]:
    """The promises that stand at tests."""
    files = (file for folder in FOLDERS for file in (TESTS.parent / folder).glob("test_*.py"))
    calls = (node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
    return {
        ast.literal_eval(call.args[0])
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "promise"
    }


def test_every_promise_is_held_by_a_test_that_every_change_waits_for() -> None:
    assert held() == set(PROMISES)


def test_a_promise_that_nobody_was_given_cannot_be_held() -> None:
    with pytest.raises(AssertionError, match="none of PROMISES"):
        promise("a worker flies")


class Item:
    """A test as pytest collects it."""

    def __init__(self, nodeid: str, *marks: pytest.MarkDecorator, case: str = "") -> None:
        self.nodeid, self.marks = nodeid, [mark.mark for mark in marks]
        if case:
            self.callspec = type("CallSpec", (), {"id": case})

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return [mark for mark in self.marks if mark.name == name]

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)


def test_of_real_processes_only_what_holds_a_promise_runs_before_every_change() -> None:
    in_vote, unit = promise("a worker is killed", "in_vote"), "tests/unit/test_a.py::test_x"
    items = {
        "of another kind": Item("tests/integration/test_a.py::test_x"),
        "all cases": Item("tests/integration/test_a.py::test_y[a]", promise("a pod"), case="a"),
        "its case": Item("tests/integration/test_a.py::test_z[in_vote]", in_vote, case="in_vote"),
        "another case": Item("tests/integration/test_a.py::test_z[forward]", in_vote, case="forward"),
        "pure": Item(unit),
    }
    sort_into_tiers(list(items.values()))  # type: ignore[arg-type]
    assert [name for name, item in items.items() if item.iter_markers("check")] == ["of another kind", "another case"]


def test_times_are_shown_by_test_and_by_file(tmp_path: Path) -> None:
    (tmp_path / "test-unit.xml").write_text(REPORT)
    tests = seconds_by_test(tmp_path / "test-unit.xml")
    assert tests["tests/unit/test_a.py::test_x[1]"] == 0.5
    assert list(by_file(tests).items()) == [("tests/unit/test_b.py", 2.0), ("tests/unit/test_a.py", 1.5)]
