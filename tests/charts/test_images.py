"""The images' recipes: versions are fixed, nobody is root, an init is process 1, and the controller's has no torch.

`make images` builds and starts them (tests/images/run.py).
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from charts.rendering import ROOT

RECIPES = sorted((ROOT / "deploy").glob("*.Dockerfile"))


def steps(recipe: Path) -> list[list[str]]:
    """Instructions and their words, arguments with defaults filled in."""
    text = re.sub(r"\\\n", " ", "\n".join(line for line in recipe.read_text().splitlines() if not line.startswith("#")))
    defaults = dict(re.findall(r"^ARG (\w+)=(.*)$", text, flags=re.MULTILINE))
    for name, value in defaults.items():
        text = text.replace(f"${{{name}}}", value)
    return [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]


def of_kind(recipe: Path, kind: str) -> list[str]:
    return [rest for instruction, rest in steps(recipe) if instruction == kind]


@pytest.fixture(params=RECIPES, ids=lambda recipe: recipe.stem)
def recipe(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


def test_there_is_one_recipe_for_controllers_and_one_for_workers() -> None:
    assert [one.stem for one in RECIPES] == ["controller", "worker"]


def test_it_has_two_stages_of_fixed_versions(recipe: Path) -> None:
    images = [image.split()[0] for image in of_kind(recipe, "FROM")]
    assert len(images) == 2
    assert [image for image in images if not re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", image)] == []
    packages = [word for run in of_kind(recipe, "RUN") for word in shlex.split(run) if "tini" in word]
    assert [word for word in packages if "=" not in word] == []


def test_what_is_imported_is_compiled_when_it_is_installed(recipe: Path) -> None:
    installs = [run for run in of_kind(recipe, "RUN") if "pip install" in run]
    assert installs and [run for run in installs if "--no-compile" in run] == []


def test_nobody_is_root_and_an_init_is_process_1(recipe: Path) -> None:
    user, group = map(int, of_kind(recipe, "USER")[-1].split(":"))
    assert user > 0 and group > 0
    (entry,) = of_kind(recipe, "ENTRYPOINT")
    assert entry.startswith('["tini"')


def test_what_is_copied_is_in_the_repository_and_in_the_context(recipe: Path) -> None:
    shown = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    for copied in of_kind(recipe, "COPY"):
        if not copied.startswith("--from"):
            sources = copied.split()[:-1]
            assert set(sources) <= shown
            assert [source for source in sources if not (ROOT / source).exists()] == []


def test_the_controllers_image_has_no_torch() -> None:
    controller, worker = (recipe.read_text() for recipe in RECIPES)
    assert "[controller" in controller and "torch==" not in controller and "worker," not in controller
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text() and "ARG TORCH=2.13.0" in worker
