"""Query parameters that a request does not have are refused, as unknown keys of a body are, and so is one that is given
twice: none is ignored.

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
    faults = [_refused(name, known) for name in request.query_params if name not in known]
    faults += [
        f"`{name}` is given more than once in the query; keep one"
        for name, is_list in known.items()
        if not is_list and len(request.query_params.getlist(name)) > 1
    ]
    if faults:
        raise UserError(all_of(faults, "the query"))


def _parameters(document: dict[str, Any], operation: str) -> dict[str, bool]:
    """Those in the query of an operation, as the OpenAPI document has them, and whether each is a list."""
    paths = document["paths"].values()
    asked = next(one for methods in paths for one in methods.values() if one["operationId"] == operation)
    queries = [one for one in asked.get("parameters", ()) if one["in"] == "query"]
    return {one["name"]: _is_list(one["schema"]) for one in sorted(queries, key=lambda one: one["name"])}


def _is_list(schema: dict[str, Any]) -> bool:
    return any(kind.get("type") == "array" for kind in (schema, *schema.get("anyOf", ())))


def _refused(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    guess = f"; did you mean `{near[0]}`?" if near else "."
    return f"`{name[:80]}` is an unknown parameter{guess} Allowed in the query: {', '.join(known) or 'none'}"
