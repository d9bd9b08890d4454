"""The bodies of requests are read as strictly as files are: a key that is given twice is refused, not dropped.

Every router whose routes have bodies makes them of this class. The framework raises what reading a body raises as its
own error, with ours as the cause; `problems.py` answers with that.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from shoal_protos.strict_json import parsed_json


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
