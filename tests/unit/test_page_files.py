"""What the page is made of: the files in the package, read as text. In a browser: tests/integration/test_page.py."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

FILES = Path(__file__).resolve().parents[2] / "controller" / "shoal_controller" / "page" / "files"
MOST_BYTES = 240_000
"""Of all that the page can load. The aim was 300 kB."""
LONGEST_MODULE = 300
"""Lines."""
ANYWHERE = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser")
"""What would make markup or code of a text."""


def modules() -> list[Path]:
    return sorted(FILES.glob("*.js"))


def test_the_library_is_the_one_that_npm_has() -> None:
    note = json.loads((FILES / "uplot" / "version.json").read_text())
    found = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted((FILES / "uplot").iterdir())
        if file.name != "version.json"
    }
    assert note["sha256"] == found, "refresh it with `make page-library`, never by hand"
    assert (note["name"], note["license"]) == ("uplot", "MIT")
    assert note["version"] in (FILES / "uplot" / "uPlot.iife.min.js").read_text()[:200]


def test_the_page_is_small() -> None:
    assert sum(file.stat().st_size for file in FILES.rglob("*") if file.is_file()) < MOST_BYTES


def test_no_module_is_longer_than_one_can_read_at_once() -> None:
    lengths = {file.name: len(file.read_text().splitlines()) for file in modules()}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_MODULE} == {}


def test_every_module_says_what_it_is() -> None:
    assert [file.name for file in modules() if not file.read_text().startswith("// ")] == []


def test_no_module_makes_markup_or_code_of_a_text() -> None:
    assert {file.name: found for file in modules() if (found := ANYWHERE.findall(file.read_text()))} == {}


def test_nothing_names_another_host() -> None:
    texts = {file: file.read_text() for file in FILES.rglob("*") if file.suffix in (".js", ".css", ".html", ".svg")}
    found = {file.name: set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", text)) for file, text in texts.items()}
    namespace, home = "http://www.w3.org", "https://github.com"  # uPlot's notice names its home
    assert {name: hosts - {namespace, home} for name, hosts in found.items() if hosts - {namespace, home}} == {}


def test_the_first_file_has_no_script_nor_style_of_its_own() -> None:
    text = (FILES / "index.html").read_text()
    assert re.findall(r"<style|\sstyle=|\son[a-z]+=|javascript:", text) == []
    assert re.findall(r"<script(?![^>]*\ssrc=\"/page/)", text) == []


def test_every_file_that_is_named_exists_and_every_module_is_used() -> None:
    named = set(re.findall(r'(?:src|href)="/page/([^"]+)"', (FILES / "index.html").read_text()))
    for file in modules():
        named |= set(re.findall(r'(?:from |import\()"\./([a-z_]+\.js)"', file.read_text()))
        named |= set(re.findall(r'"/page/([^"]+)"', file.read_text()))
    assert [name for name in sorted(named) if not (FILES / name).is_file()] == []
    assert [file.name for file in modules() if file.name not in named] == []


def test_the_list_of_jobs_waits_for_no_module_that_the_first_file_has_not_named() -> None:
    """Else each one costs another way to the controller and back, and those of the view of one job as well."""
    needed, more = {"main.js"}, ["main.js"]
    while more:
        text = (FILES / more.pop()).read_text()
        more += set(re.findall(r'from "\./([a-z_]+\.js)"', text)) - needed
        needed |= set(more)
    (listed,) = re.findall(r"const MODULES = \[(.*?)\];", (FILES / "start.js").read_text(), re.DOTALL)
    assert [f"{name}.js" for name in re.findall(r"\w+", listed)] == sorted(needed)
    assert "job_view.js" not in needed
