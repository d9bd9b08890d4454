"""`shoal submit`: give a job spec (YAML or JSON) to a controller."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from shoal_protos.errors import UserError

from shoal_controller.cli.options import DEFAULT_URL, Url

if TYPE_CHECKING:
    import yaml


async def submit(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="Specification of a job.", show_default=False),
    ],
    url: Url = DEFAULT_URL,
) -> None:
    """Create a job from its specification."""
    from shoal_controller.cli.client import Client
    from shoal_controller.cli.tables import changed

    spec = read_spec(file)
    async with Client(url) as client:
        changed(await client.create(spec))


def read_spec(file: Path) -> dict[str, Any]:
    """The object in a YAML or JSON file (JSON by its suffix needs no YAML reader)."""
    try:
        text = file.read_text(encoding="utf-8")
        spec = _json(text) if file.suffix == ".json" else _yaml(text)
    except (OSError, ValueError, UserError) as error:
        raise UserError(f"{file} cannot be read as a job spec: {error}") from error
    if not isinstance(spec, dict):
        found = "nothing" if spec is None else type(spec).__name__
        raise UserError(f"{file} holds {found}, not a job spec; expected keys such as job and workers")
    for fault in _not_json(spec):
        raise UserError(f"{file} cannot be sent as a job spec: {fault}")
    return spec


def _not_json(spec: dict[Any, Any]) -> Iterator[str]:
    """What YAML can say and JSON cannot, by its key alone: a value may be a secret."""
    left: list[tuple[str, Any, frozenset[int]]] = [("", spec, frozenset())]
    while left:
        key, one, within = left.pop()
        if id(one) in within:
            yield f"`{key}` holds itself"
        elif isinstance(one, dict):
            yield from (f"the key `{name}` is no text; put it in quotes" for name in one if not isinstance(name, str))
            left += [(f"{key}.{name}" if key else str(name), entry, within | {id(one)}) for name, entry in one.items()]
        elif isinstance(one, list):
            left += [(f"{key}[{index}]", entry, within | {id(one)}) for index, entry in enumerate(one)]
        elif isinstance(one, float) and not math.isfinite(one):
            yield f"`{key}` is {one}; expected a finite number"
        elif not isinstance(one, str | int | float | None):
            yield f"`{key}` is read as a {type(one).__name__}; put it in quotes to give it as text"


def _json(text: str) -> object:
    from shoal_protos.strict_json import parsed_json

    return parsed_json(text, "the file")


def _yaml(text: str) -> object:
    import yaml
    from shoal_protos.strict_json import given_twice

    class SingleKeys(yaml.SafeLoader):
        """Refuses what YAML forbids and its reader takes: the same key twice."""

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for _, name in (key for key in keys if keys.count(key) > 1):
                raise UserError(given_twice(name, "the file"))
            return node

    try:
        return yaml.load(text, SingleKeys)
    except yaml.YAMLError as error:
        raise ValueError(_without_content(error)) from None
    except RecursionError:
        raise ValueError("the file is nested too deeply") from None


def _without_content(error: yaml.YAMLError) -> str:
    """What is wrong and where, without the lines of the file around it: they may hold a secret."""
    mark = getattr(error, "problem_mark", None)
    problem = re.sub(r"'[\w!*&][^']*'", "'…'", getattr(error, "problem", None) or "")
    place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    return f"it is not YAML{place}" + (f": {problem}" if problem else "")
