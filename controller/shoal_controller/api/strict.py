"""Strict reading of requests: no part of a query or a body is ignored.

`check_parameters`, a dependency of all routes below `/v1`, refuses query parameters that are unknown or given twice.
`StrictRoute`, the class of the routes of every router that reads bodies, refuses a key given twice; the framework
raises that as its own error with ours as the cause, and `problems.py` answers it. `surrogate_faults`, called by
`models.py`, finds halves of surrogate pairs: JSON can escape them and pydantic accepts many, but they are not text
that can be stored or shown.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from shoal_protos.errors import UserError
from shoal_protos.strict_json import DOCUMENT, JsonPlace, parsed_json
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


class _StrictRequest(Request):
    async def json(self) -> Any:
        return parsed_json(await self.body(), "the body")


class StrictRoute(APIRoute):
    """A route whose body is read strictly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly


HALF = "is not valid text (a lone surrogate); send it as UTF-8"


def surrogate_faults(given: object) -> Iterator[str]:
    """A sentence for each value and each name that has some. However deeply they are nested: no recursion."""
    left: list[tuple[JsonPlace, object]] = [(DOCUMENT, given)]
    while left:
        place, one = left.pop()
        if isinstance(one, str) and not _is_text(one):
            yield f"{f'`{place.key}`' if place.key else 'the body'} {HALF}"
        elif isinstance(one, list):
            left += [(JsonPlace(place, index), entry) for index, entry in enumerate(one)]
        elif isinstance(one, dict):
            for name, entry in one.items():
                if _is_text(str(name)):
                    left.append((JsonPlace(place, str(name)), entry))
                else:
                    yield f"a name {f'in `{place.key}`' if place.key else 'at the top level'} {HALF}"


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
