"""The scripts of docs/scripts.md: few lines changed, and measured as they are. `make scripts` measures them."""

from __future__ import annotations

import importlib.util
import json

import pytest
from scripts.changed_lines import changed_lines
from scripts.measuring import Measured
from scripts.run import MEASURED
from scripts.table import ROOT, SCRIPTS, Script, script
from tiers import check

pytestmark = check("builds the site")


@pytest.mark.parametrize("chosen", SCRIPTS, ids=lambda chosen: chosen.name)
def test_no_more_lines_of_a_script_are_changed_than_its_limit(chosen: Script) -> None:
    changed = changed_lines(chosen.original.read_text(), chosen.port.read_text())
    assert 0 < len(changed) <= chosen.limit, changed


@pytest.mark.parametrize("name", [one.name for one in SCRIPTS])
def test_the_figures_of_a_script_are_those_of_its_present_files(name: str) -> None:
    measured = json.loads(MEASURED.read_text()).get(name, {"files": "never measured"})
    assert measured["files"] == script(name).digest, f'run `make scripts ARGS="{name}"`'
    assert sorted(measured["fingerprints"]) == ["1", "2", "3", "killed"]
    assert len(set(measured["fingerprints"].values())) == 1


def test_a_loss_or_a_fingerprint_that_differs_is_named() -> None:
    prints = {"1": "a", "2": "a", "3": "a", "killed": "a"}
    assert Measured("", "0.5000", 0.50009, 8, prints).wrong() == []
    (loss,) = Measured("", "0.5000", 0.5002, 8, prints).wrong()
    assert loss.startswith("the loss is 0.5002, the original's 0.5000; they may differ by 0.0001")
    (nan,) = Measured("", "0.5000", float("nan"), 8, prints).wrong()
    assert nan.startswith("the loss is nan")
    (differ,) = Measured("", "0.5", 0.5, 8, {**prints, "killed": "b"}).wrong()
    assert differ.startswith("the fingerprints differ")
    (other,) = Measured("", "0.5", 0.5, 8, prints, {"1": "a", "2": "b"}).wrong()
    assert other.startswith("the weights that the script saved differ")


def test_the_page_is_current() -> None:
    found = importlib.util.spec_from_file_location("script_table", ROOT / "docs/generate/script_table.py")
    assert found and found.loader
    tool = importlib.util.module_from_spec(found)
    found.loader.exec_module(tool)
    assert tool.PAGE.read_text() == tool.page(), "run `make docs`"


def test_lines_that_are_added_or_changed_are_counted_and_those_that_only_moved_in_are_not() -> None:
    before = (
        '"""Before."""\nfor epoch in range(3):\n    for x in loader:\n        loss = f(x)  # the mean\n        a()\n'
    )
    after = '"""After, with more to say."""\n\nfor x in engine:\n    # why\n    loss = f(x)\n    b()\n'
    assert changed_lines(before, after) == ["for x in engine:", "b()"]
    assert changed_lines(before, before) == []
