"""Logs of pods as an API server hands them on from a kubelet, for the cluster of `api_server.py`.

A pod's log is a file; `tailLines`, `limitBytes` and `follow` mean what they mean to a kubelet, which counts
`limitBytes` from the first of these lines on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from api_faults import Refused

LOOK_SECONDS = 0.02

Json = dict[str, Any]


async def served_log(
    request: web.Request, pod: Callable[[], Json | None], file: Path, open_answers: set[web.StreamResponse]
) -> web.StreamResponse:
    """The answer to a request for a pod's log. `pod`: as it is now, None once it is gone."""
    first = pod()
    assert first is not None
    _check(request, first)
    data = _from(file, 0)
    at = len(data)
    if "tailLines" in request.query:
        data = b"".join(data.splitlines(keepends=True)[-int(request.query["tailLines"]) :])
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    await response.prepare(request)
    await response.write(data[: int(request.query.get("limitBytes", len(data)))])
    open_answers.add(response)
    while request.query.get("follow") == "true" and request.transport and not request.transport.is_closing():
        now = pod()
        ends = now is None or now["status"]["phase"] in ("Succeeded", "Failed")
        if new := _from(file, at):
            await response.write(new)
            at += len(new)
        if ends:
            break
        await asyncio.sleep(LOOK_SECONDS)
    open_answers.discard(response)
    return response


def _check(request: web.Request, pod: Json) -> None:
    name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]["name"]
    if request.query.get("container", container) != container:
        raise Refused(400, "BadRequest", f"container {request.query['container']} is not valid for pod {name}")
    if pod["status"]["phase"] == "Pending":
        why = f'container "{container}" in pod "{name}" is waiting to start: ContainerCreating'
        raise Refused(400, "BadRequest", why)


def _from(file: Path, begin: int) -> bytes:
    if not file.exists():
        return b""
    with file.open("rb") as opened:
        opened.seek(begin)
        return opened.read()
