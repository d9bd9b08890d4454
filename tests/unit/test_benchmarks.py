"""`make bench`: what the benchmarks note becomes the tables of benchmarks/README.md, whatever fails on the way.

Programs of a few lines stand in for the benchmarks; nothing is measured here.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
import bench  # noqa: E402
from tables import Cell, Figure  # noqa: E402

MOST_LINES = 60
"""Of what is written by hand."""
NOTES = f"import sys; sys.path.append({str(BENCHMARKS)!r}); from tables import Figure, Cell, note"


def part(name: str, *programs: str, folder: Path, minutes: float = 1.0) -> bench.Part:
    """A part of programs with these lines."""
    runs = []
    for number, lines in enumerate(programs):
        place = folder / f"{name}{number}.py"
        place.write_text(f"{NOTES}\n{lines}\n")
        runs.append(bench.Run((str(place),), minutes))
    return bench.Part(name, tuple(runs), (bench.TARGETS, bench.PRICE))


def cells_of(markdown: str) -> list[list[str]]:
    """The rows of a table, without its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()[2:]]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    place = tmp_path / "README.md"
    place.write_text(f"before\n{bench.BEGIN}\n\n| of another run |\n\n{bench.END}\nafter\n")
    return place


def test_a_figure_is_met_missed_or_not_judged_by_its_median() -> None:
    rows = [
        Figure("met", "10M", [0.9, 1.0, 9.0], 1.0),
        Figure("missed", "10M", [0.9, 1.1, 1.2], 1.0),
        Figure("told", "10M", [5.0]),
    ]
    steps = bench.Part("steps", ())
    assert cells_of(bench.targets([steps], {"steps": rows})) == [
        ["met", "10M", "1", "1.000 (0.900–9.000, n 3)", "met"],
        ["missed", "10M", "1", "1.100 (0.900–1.200, n 3)", "**missed**"],
        ["told", "10M", "–", "5.000", ""],
    ]


def test_the_default_stands_first_in_its_part_and_other_mirrors_are_named() -> None:
    rows = [Figure("step", "10M", [1.0], mirrors=mirrors) for mirrors in (0, 1, 2)]
    two = [bench.Part("a", ()), bench.Part("b", ())]
    found = bench.targets(two, {"a": rows, "b": rows})
    assert [row[1] for row in cells_of(found)] == 2 * ["10M", "10M; mirrors 0", "10M; mirrors 2"]


def test_cells_of_several_programs_are_one_sample_and_those_that_miss_are_marked() -> None:
    table = bench.price(
        [
            Cell("DDP", None, "step", [1.0, 3.0], digits=1),
            Cell("stage 3", 1, "step", [2.0], digits=1),
            Cell("stage 3", 1, "of DDP's", [1.25], 1.2, digits=2),
            Cell("DDP", None, "step", [2.5], digits=1),
        ]
    )
    assert cells_of(table) == [["DDP", "–", "2.5", "–"], ["stage 3", "1", "2.0", "**1.25, not 1.2**"]]


def test_a_program_that_fails_or_hangs_leaves_a_row_and_the_others_go_on(tmp_path: Path, page: Path) -> None:
    first = part("first", "note(Figure('before', 's', [1.0])); sys.exit(3)", folder=tmp_path)
    hangs = part("hangs", "import threading; threading.Event().wait()", folder=tmp_path, minutes=0.001)
    last = part("last", "note(Figure('after', 's', [1.0], 2.0))", folder=tmp_path)
    assert not bench.run([first, hangs, last], page)
    table = page.read_text().partition("| what")[2]
    whys = ["", "**failed**: exit status 3", "**failed**: not done after 0.004 minutes", ""]
    rows = cells_of(f"| what{table.partition(bench.END)[0].rstrip()}")
    assert [row[0] for row in rows[::3]] == ["before", "after"]
    assert [row[3] if "failed" in row[3] else "" for row in rows] == whys


def test_what_an_hour_has_no_room_for_leaves_a_row(tmp_path: Path, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LONGEST_SECONDS", 0.0)
    assert not bench.run([part("late", "note(Figure('late', 's', [1.0]))", folder=tmp_path)], page)
    assert "**failed**: not begun: the hour of a run was over" in page.read_text()


def test_a_run_writes_what_is_between_the_markers_and_nothing_else(tmp_path: Path, page: Path) -> None:
    both = "note(Figure('a step', '10M', [1.0], 2.0), Cell('DDP', None, 'peak', [1.0]))"
    assert bench.run([part("steps", both, folder=tmp_path)], page)
    text = page.read_text()
    assert text.startswith(f"before\n{bench.BEGIN}\n\n") and text.endswith(f"\n\n{bench.END}\nafter\n")
    assert "a step" in text and "The price of a copy" in text and "of another run" not in text
    assert re.search(r"^\d{4}-\d\d-\d\d, 0 minutes, load before .*; commit .*Shoal .*Python .*PyTorch ", text, re.M)


def test_some_parts_are_printed_and_not_written(
    tmp_path: Path, page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_all = [part(name, f"note(Figure({name!r}, '10M', [1.0]))", folder=tmp_path) for name in ("one", "other")]
    monkeypatch.setattr(bench, "PARTS", of_all)
    monkeypatch.setattr(bench, "PAGE", page)
    before = page.read_text()
    assert bench.asked([]) == (of_all, page)
    assert bench.run(*bench.asked(["--only", "other"]))
    assert page.read_text() == before
    assert "| other |" in (printed := capsys.readouterr().out) and "| one |" not in printed


@pytest.mark.parametrize("text", ["", f"{bench.BEGIN}\n", f"{bench.END}\n{bench.BEGIN}\n"])
def test_a_page_without_both_markers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="put both back"):
        bench.written(text, "table")


def test_the_readme_is_short_has_the_markers_and_names_every_part() -> None:
    text = bench.PAGE.read_text()
    assert len(bench.written(text, "").splitlines()) <= MOST_LINES
    assert bench.written(text, "table") != text
    commands = re.findall(r"^\| `(\w+\.py).*\| (.*)\|$", text, re.MULTILINE)
    parts = {name for _, column in commands for name in re.findall(r"`(\w+)`", column)}
    assert parts == {one.name for one in bench.PARTS}
    programs = {name for name, _ in commands} | {run.command[0] for one in bench.PARTS for run in one.runs}
    assert [name for name in programs if not (BENCHMARKS / name).exists()] == []
