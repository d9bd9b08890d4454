"""The pages hold what they say: links lead somewhere, generated pages are current, commands that are named exist."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import typer
from shoal.session.settings import VARIABLES
from shoal_controller.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
LONGEST_SENTENCE = 45
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "benchmarks/README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def tool(name: str) -> ModuleType:
    """A script of `docs/generate/` as a module."""
    found = importlib.util.spec_from_file_location(name, ROOT / "docs" / "generate" / f"{name}.py")
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("name", ["phases", "events", "controller", "rest", "command", "rules"])
def test_a_page_that_is_made_from_the_code_is_current(name: str) -> None:
    assert (ROOT / f"docs/{name}.md").read_text() == tool(name).page(), "run `make docs`"


def test_every_decision_is_in_the_list() -> None:
    listed = set(re.findall(r"\((\d{4}-[\w-]+\.md)\)", (ROOT / "docs/decisions/index.md").read_text()))
    assert listed == {page.name for page in PAGES if re.match(r"\d{4}-", page.name)}


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop().resolve()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            waiting += [page.parent / target for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())]
    assert [str(page.relative_to(ROOT)) for page in PAGES if page.resolve() not in reached] == []


def test_every_command_that_a_page_names_exists() -> None:
    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    named = {name for page in PAGES for name in re.findall(r"\bshoal ([a-z]+(?:-[a-z]+)*)\b(?!:)", code_of(page))}
    assert named - known == set()


def test_every_variable_of_a_workers_environment_is_explained() -> None:
    table = (ROOT / "docs" / "network.md").read_text()
    assert [name for name in VARIABLES.values() if f"`{name}`" not in table] == ["SHOAL_FAULT"]


def code_of(page: Path) -> str:
    """What a page shows as code."""
    text = page.read_text()
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.DOTALL))


def test_every_make_target_that_a_page_names_exists() -> None:
    targets = set(re.findall(r"^([a-z]+(?:-[a-z]+)*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)", code_of(page))}
    assert named - targets == set()
    assert {"demo", "test"} <= named


def test_every_heading_that_the_code_cites_exists() -> None:
    files = [file for folder in ("controller", "worker", "protos", "tests") for file in (ROOT / folder).rglob("*.py")]
    cited = {
        (page, heading)
        for file in files
        for page, heading in re.findall(r'(docs/[\w/-]+\.md),? \(?"([^"\n]+)"', file.read_text())
    }
    assert len(cited) > 4
    lost = [(page, heading) for page, heading in cited if f"# {heading}\n" not in (ROOT / page).read_text()]
    assert lost == []


def test_every_command_of_a_scenario_is_on_its_page() -> None:
    commands = re.findall(r"def do_(\w+)", (ROOT / "tests/simulation/script.py").read_text())
    shown = " ".join(re.findall(r"`([^`\n]+)`", (ROOT / "docs/simulation.md").read_text()))
    assert [command for command in commands if not re.search(rf"\b{command}\b", shown)] == []


def sentences(page: Path) -> Iterator[str]:
    """The sentences of its paragraphs, items and cells; code in a sentence counts as one word."""
    text = re.sub(r"^ *```.*?^ *```$|<!--.*?-->", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "Code", text))
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\.) )| \| ", text):
        yield from re.split(r"(?<=[.!?])[)*\]]*\s+(?=[\[(*]*[A-Z\d])", part)


def test_no_sentence_of_a_page_is_long() -> None:
    pages = {ROOT / "README.md", *(ROOT / "docs").glob("*.md")} - {ROOT / "docs/rules.md"}  # a rule is one sentence
    found = [(page.name, sentence) for page in sorted(pages) for sentence in sentences(page)]
    assert [one for one in found if len(one[1].split()) > LONGEST_SENTENCE] == []
    assert len(found) > 2000


def test_the_changelog_can_be_read_at_once() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert len(lines) <= 40, "edit entries in place; a fix of what nobody has had is no entry"
    assert max(map(len, lines)) <= 120
