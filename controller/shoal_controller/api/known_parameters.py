"""Query parameters that a request does not have are refused, as unknown keys of a body are: none is ignored.

A dependency of all routes below `/v1` (`routes.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from fastapi import Request
from shoal_protos.errors import UserError
from shoal_protos.validation import all_of


def check_parameters(request: Request) -> None:
    """Raises `UserError` that names them all."""
    if not request.query_params:
        return
    operation = request.app.openapi()["paths"][request.scope["route"].path][request.method.lower()]
    known = sorted(one["name"] for one in operation.get("parameters", ()) if one["in"] == "query")
    if unknown := [name for name in request.query_params if name not in known]:
        raise UserError(all_of([_refused(name, known) for name in unknown], "the query"))


def _refused(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    guess = f"; did you mean `{near[0]}`?" if near else "."
    return f"`{name[:80]}` is an unknown parameter{guess} Allowed in the query: {', '.join(known) or 'none'}"
