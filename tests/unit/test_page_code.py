"""Every block of code of a page runs or is checked: Python and diffs run, JSON and YAML are read, commands exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from page_code import CLASSIC, CONFIG, RUN_ELSEWHERE, Block, after, before, blocks
from shoal.config.document import Document
from shoal.config.load import load_config
from shoal_controller.api.models import JobBody
from shoal_controller.cli.main import app
from tiers import check

pytestmark = check("runs the code of every page")

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ALL = [block for page in PAGES for block in blocks(page)]
RUNNER = ROOT / "tests" / "page_code.py"
DRAWN = ("", "mermaid")
"""Languages of blocks that are no code: pictures, what a command printed."""


def of(*languages: str) -> list[Any]:
    return [pytest.param(one, id=f"{one.page}:{one.line}") for one in ALL if one.language in languages]


def test_the_python_of_every_page_runs() -> None:
    command = [sys.executable, str(RUNNER), *map(str, PAGES)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert done.stdout.count(" ran\n") >= 20


@pytest.mark.parametrize("page", [page for page in RUN_ELSEWHERE if (ROOT / "docs" / page).exists()])
def test_a_page_whose_python_needs_a_controller_is_run_by_a_test_with_one(page: str) -> None:
    assert f"docs/{page}" in (ROOT / RUN_ELSEWHERE[page]).read_text().replace('" / "', "/")


def test_every_language_of_a_block_is_one_that_is_run_or_checked() -> None:
    known = {"python", "diff", "json", "yaml", "bash", "dockerfile", *DRAWN}
    assert [f"{one.page}:{one.line} {one.language}" for one in ALL if one.language not in known] == []


@pytest.mark.parametrize("block", [one for one in of("diff") if one.values[0].title])
def test_a_diff_of_a_script_is_that_of_the_script(block: Block) -> None:
    original, port = ROOT / "tests/scripts/originals" / block.title, ROOT / "examples" / block.title
    for code, file in ((before(block.code), original), (after(block.code), port)):
        rest = iter(line.strip() for line in file.read_text().splitlines())
        assert [line for line in code.split("\n") if line.strip() and line.strip() not in rest] == [], "in this order"


@pytest.mark.parametrize("block", of("json"))
def test_the_json_of_a_page_is_read_and_a_config_in_it_is_one(block: Block) -> None:
    text = block.code.strip()
    content = json.loads(text if text.startswith("{") else f"{{{text}}}")
    if set(content) & set(Document.model_fields):
        usual = CONFIG if "train_batch_size" not in content else {**CLASSIC, "shoal": {"max_steps": 4}}
        load_config({**usual, **content, "shoal": {**usual["shoal"], **content.get("shoal", {})}})


@pytest.mark.parametrize("block", of("yaml"))
def test_the_yaml_of_a_page_is_read_and_a_job_in_it_is_one(block: Block) -> None:
    content = yaml.safe_load(block.code)
    assert isinstance(content, dict)
    if "job" in content:
        JobBody.model_validate(content)


@pytest.mark.parametrize("block", of("bash", ""))
def test_the_commands_of_a_page_are_commands_with_their_flags(block: Block) -> None:
    if block.language == "bash":
        done = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    for line in block.code.replace("\\\n", " ").splitlines():
        for found in re.finditer(r"(?:^\s*(?:\$ )?|\s)shoal ((?:[a-z]+) ?[^|#;&]*)", line):
            if found.start() == 0 or line.lstrip().startswith(("SHOAL_", "$ ")):
                check(shlex.split(found[1]))


def check(words: list[str]) -> None:
    """A command of `shoal` and its flags."""
    command: Any = typer.main.get_command(app)
    while words and hasattr(command, "commands"):
        assert words[0] in command.commands, words
        command, words = command.commands[words[0]], words[1:]
    flags = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    given = [word.partition("=")[0].strip("[]") for word in words]
    own = given[: given.index("--")] if "--" in given else given
    assert [word for word in own if word.startswith("--") and word not in flags] == []
