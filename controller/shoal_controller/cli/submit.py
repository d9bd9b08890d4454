"""`shoal submit`: give a job spec (YAML or JSON) to a controller."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from shoal_protos.errors import UserError

from shoal_controller.cli.options import DEFAULT_URL, Url


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
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as a job spec: {error}") from error
    if not isinstance(spec, dict):
        raise UserError(f"{file} holds {type(spec).__name__}, not a job spec; expected keys such as job and workers")
    return spec


def _json(text: str) -> object:
    import json

    return json.loads(text)


def _yaml(text: str) -> object:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
