"""Query parameters that a request does not have are refused, as unknown keys of a body are: none is ignored.

A dependency of all routes below `/v1` (`routes.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from fastapi import Request
from shoal_protos.errors import UserError
from shoal_protos.validation import all_of


async def check_parameters(request: Request) -> None:
    """Raises `UserError` that names them all."""
    if not request.query_params:
        return
    known = _parameters(request.app.openapi(), request.scope["route"].name)
    if unknown := [name for name in request.query_params if name not in known]:
        raise UserError(all_of([_refused(name, known) for name in unknown], "the query"))


def _parameters(document: dict[str, Any], operation: str) -> list[str]:
    """Those in the query of an operation, as the OpenAPI document has them."""
    paths = document["paths"].values()
    asked = next(one for methods in paths for one in methods.values() if one["operationId"] == operation)
    return sorted(one["name"] for one in asked.get("parameters", ()) if one["in"] == "query")


def _refused(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    guess = f"; did you mean `{near[0]}`?" if near else "."
    return f"`{name[:80]}` is an unknown parameter{guess} Allowed in the query: {', '.join(known) or 'none'}"
