"""What a shell completes beyond commands and flags: names of jobs and workers, asked of the controller.

Called by typer when the shell asks (`--install-completion`). Somebody has just pressed Tab: what does not answer at
once completes nothing, and no error is shown.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from shoal_protos.rest import Json

    from shoal_controller.cli.client import Client

PATIENCE_SECONDS = 1.0


def job_names(context: typer.Context, incomplete: str) -> list[str]:
    """Jobs whose names begin so."""
    jobs = _asked(context, lambda client: client.jobs())
    return [job["job"] for job in jobs if job["job"].startswith(incomplete)]


def worker_names(context: typer.Context, incomplete: str) -> list[str]:
    """Workers of the job before it that are not gone, and whose names begin so."""
    job = str(context.params.get("job") or "")
    workers = _asked(context, lambda client: client.workers(job)) if job else []
    there = [worker["worker"] for worker in workers if worker["state"] not in ("lost", "left")]
    return [name for name in there if name.startswith(incomplete)]


def _asked(context: typer.Context, ask: Callable[[Client], Awaitable[list[Json]]]) -> list[Json]:
    """What a controller answers; empty where it does not."""
    import asyncio

    from shoal_protos.errors import ShoalError

    from shoal_controller.cli.options import DEFAULT_URL
    from shoal_controller.cli.runs import clients_of

    url = str(context.params.get("url") or os.environ.get("SHOAL_URL") or DEFAULT_URL)

    async def asked() -> list[Json]:
        found = []
        for one in clients_of(url, str(context.params.get("job") or "")):
            async with asyncio.timeout(PATIENCE_SECONDS), one as client:
                found += await ask(client)
        return found

    with suppress(ShoalError, TimeoutError, OSError):
        return asyncio.run(asked())
    return []
