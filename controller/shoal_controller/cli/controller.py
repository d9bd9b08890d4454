"""`shoal controller`: a controller that serves until it is told to end. Workers go on training without it."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal_controller.cli.options import Data, Grpc, Http, Store

Open = typer.Option("--open", envvar="SHOAL_OPEN", help="Listen beyond this machine without a token.")


async def controller(
    http: Http = None,
    grpc: Grpc = None,
    store: Store = None,
    data: Data = None,
    open_to_all: Annotated[bool, Open] = False,
) -> int:
    """Serve jobs and their workers.

    With the same store, a controller continues where the last one stopped; workers keep training in between.
    """
    from shoal_controller.cli.endings import DONE, INTERRUPTED
    from shoal_controller.cli.serve import Places, interrupts, serving

    with interrupts() as signals:
        async with serving(Places(http, grpc, store, data, open_to_all), own=False):
            await signals.first.wait()
    return DONE if signals.terminated else INTERRUPTED
