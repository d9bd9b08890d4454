"""`shoal run --attach`: submit a job to the controller of a living run of this folder, and show it to its end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from shoal_protos.errors import UserError
from shoal_protos.living_runs import living_runs

from shoal_controller.cli.attend import end_watching, interrupted_before, report_end
from shoal_controller.cli.client import local_folder
from shoal_controller.cli.display import display, watch
from shoal_controller.cli.endings import INTERRUPTED
from shoal_controller.cli.output import echo
from shoal_controller.cli.printed import Printed
from shoal_controller.cli.runs import of_run
from shoal_controller.cli.serve import interrupts


async def attached(spec: dict[str, Any], report_file: Path | None, quiet: bool) -> int:
    """Return the exit status of `run`. Ctrl-C does not end the job. Raises `UserError` if no run lives here."""
    runs = living_runs(local_folder())
    if not runs:
        raise UserError(f"no shoal run lives in {local_folder()} to attach to; leave --attach out to begin one")
    job = spec["job"]
    with interrupts() as signals:
        async with of_run(runs[0]) as client:
            await client.create(spec)
            with display() as shown:
                watching = asyncio.create_task(
                    watch(client, job, shown, printed=None if quiet else Printed({})), name=f"watch {job}"
                )
                try:
                    if await interrupted_before(watching, signals.first):
                        echo(f"job {job} goes on with the controller of {runs[0]}; to end it: shoal cancel {job}")
                        return INTERRUPTED
                finally:
                    await end_watching(watching)
            return await report_end(client, watching.result(), report_file)
