"""The documentation as a site: it builds without a warning, has every page, and asks no other host for anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import shoal
from shoal.training.engine import PUBLIC
from tiers import check

pytestmark = [pytest.mark.xdist_group("the site"), check("builds the site")]

ROOT = Path(__file__).resolve().parents[2]
LOADING = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}
"""Elements that a browser loads without being asked."""
NAMES_OF_A_PAGE = ("canonical", "alternate")
"""Relations of a link that loads nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a warning (a link that leads nowhere, a page that is not in `nav`) fails it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Loaded(HTMLParser):
    """What a page makes a browser load, and the names that it documents."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag in LOADING and given.get("rel") not in NAMES_OF_A_PAGE:
            self.urls.append(given.get(LOADING[tag], ""))
        if "doc-heading" in given.get("class", ""):
            self.names.add(given.get("id", ""))


def test_every_page_is_built(site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    built = {page.relative_to(site) for page in site.rglob("*.html")}
    assert pages - built == set()


def test_every_page_is_in_the_navigation_and_every_decision_in_its_list() -> None:
    named = set(re.findall(r"- ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages - named if not page.startswith("decisions/0")} == set()


def test_a_page_asks_no_other_host_for_anything(site: Path) -> None:
    urls = {(page.name, url) for page in site.rglob("*.html") for url in Loaded(page.read_text()).urls}
    assert {(page, url) for page, url in urls if re.match(r"(https?:)?//", url)} == set()
    styles = [style for style in site.rglob("*.css") if re.search(r"url\([\"']?(https?:)?//", style.read_text())]
    assert styles == []
    assert len(urls) > 100


def test_a_shell_completes_the_public_names_of_the_package_and_no_others() -> None:
    public = {*shoal.__all__, "callbacks", "client", "deepspeed", "integrations"}
    assert set(shoal.__all__) <= {name for name in dir(shoal) if not name.startswith("__")} <= public


def test_the_reference_has_the_public_names_and_no_others(site: Path) -> None:
    names = Loaded((site / "reference.html").read_text()).names
    engine = {f"shoal.Engine.{name}" for name in PUBLIC}
    public = {f"shoal.{name}" for name in shoal.__all__}
    assert {name for name in names if not name.startswith("shoal.callbacks")} == engine | public
