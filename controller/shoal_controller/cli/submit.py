"""`shoal submit`: give a job spec (YAML or JSON) to a controller."""

from __future__ import annotations

import math
import re
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from shoal_protos.errors import UserError
from shoal_protos.strict_json import DOCUMENT, MOST_BODY_BYTES, JsonPlace

from shoal_controller.cli.jobs import change
from shoal_controller.cli.options import DEFAULT_URL, Url

if TYPE_CHECKING:
    import yaml

MOST_BITS = 64
TOO_LARGE = f"it is larger than {MOST_BODY_BYTES} bytes, the most that a controller accepts"


def submit(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="Specification of a job.", show_default=False),
    ],
    url: Url = DEFAULT_URL,
) -> Coroutine[Any, Any, None]:
    """Create a job from its specification."""
    spec = read_spec(file)  # which may wait for a pipe: in a loop of asyncio Ctrl-C would wait too
    return change(url, "", lambda client: client.create(spec))


def read_spec(file: Path) -> dict[str, Any]:
    """The object in a YAML or JSON file (JSON by its suffix needs no YAML reader)."""
    try:
        text = _text(file)
        spec = _json(text) if file.suffix == ".json" else _yaml(text)
    except (OSError, ValueError, UserError) as error:
        raise UserError(f"{file} cannot be read as a job spec: {error}") from error
    if not isinstance(spec, dict):
        found = "nothing" if spec is None else type(spec).__name__
        raise UserError(f"{file} holds {found}, not a job spec; expected keys such as job and workers")
    if "apiVersion" in spec and "kind" in spec:
        raise UserError(
            f"{file} is a resource of Kubernetes, not a job spec; submit it with `kubectl apply --filename {file}`"
        )
    for fault in _not_json(spec):
        raise UserError(f"{file} cannot be sent as a job spec: {fault}")
    return spec


def _not_json(spec: dict[Any, Any]) -> Iterator[str]:
    """What YAML can say and JSON cannot, by its key alone: a value may be a secret."""
    left: list[tuple[JsonPlace, Any, frozenset[int]]] = [(DOCUMENT, spec, frozenset())]
    while left:
        place, one, within = left.pop()
        holders = within | {id(one)} if isinstance(one, dict | list) else within
        if id(one) in within:
            yield f"`{place.key}` holds itself"
        elif isinstance(one, dict):
            yield from (f"the key `{name}` is no text; put it in quotes" for name in one if not isinstance(name, str))
            left += [(JsonPlace(place, str(name)), entry, holders) for name, entry in one.items()]
        elif isinstance(one, list):
            left += [(JsonPlace(place, index), entry, holders) for index, entry in enumerate(one)]
        elif isinstance(one, float) and not math.isfinite(one):
            yield f"`{place.key}` is {one}; expected a finite number"
        elif isinstance(one, int) and one.bit_length() > MOST_BITS:
            yield f"`{place.key}` is a number of more than {MOST_BITS} bits"
        elif not isinstance(one, str | int | float | None):
            yield f"`{place.key}` is read as a {type(one).__name__}; put it in quotes to give it as text"


def _text(file: Path) -> str:
    with file.open("rb") as opened:
        content = opened.read(MOST_BODY_BYTES + 1)
    if len(content) > MOST_BODY_BYTES:
        raise UserError(TOO_LARGE)
    try:
        return content.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError:
        raise UserError("it is not text in UTF-8") from None


def _json(text: str) -> object:
    from shoal_protos.strict_json import parsed_json

    return parsed_json(text, "the file")


def _yaml(text: str) -> object:
    import yaml
    from shoal_protos.strict_json import given_twice

    class Strict(yaml.SafeLoader):
        """Refuses what YAML forbids and its reader takes, the same key twice; and what becomes too much of a short text
        by its aliases.
        """

        def __init__(self, text: str) -> None:
            super().__init__(text)
            self.sizes: dict[yaml.Node, int] = {}
            """Characters in all that was composed, those that an alias repeats counted again."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            node = super().compose_node(parent, index)
            if node is None:
                return None
            if node not in self.sizes:
                held = sum(self.sizes.get(one, 1) for one in _held_by(node))
                self.sizes[node] = held + (1 + len(node.value) if isinstance(node, yaml.ScalarNode) else 1)
            if self.sizes[node] > MOST_BODY_BYTES:
                raise UserError(f"{TOO_LARGE}, with all that its aliases repeat")
            return node

        def compose_mapping_node(self, anchor: Any) -> Any:
            node, seen = super().compose_mapping_node(anchor), set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if (key.tag, key.value) in seen:
                    raise UserError(given_twice(key.value, "the file"))
                seen.add((key.tag, key.value))
            return node

    try:
        return Strict(text).get_single_data()
    except yaml.YAMLError as error:
        raise ValueError(_without_content(error)) from None
    except RecursionError:
        raise ValueError("the file is nested too deeply") from None


def _held_by(node: yaml.Node) -> Iterator[yaml.Node]:
    """Names and values of a mapping, entries of a list."""
    for entry in node.value if isinstance(node.value, list) else ():
        yield from entry if isinstance(entry, tuple) else (entry,)


def _without_content(error: yaml.YAMLError) -> str:
    """What is wrong and where, without the lines of the file around it: they may hold a secret."""
    mark = getattr(error, "problem_mark", None)
    problem = re.sub(r"'[\w!*&][^']*'", "'…'", getattr(error, "problem", None) or "")
    place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    return f"it is not YAML{place}" + (f": {problem}" if problem else "")
