"""`shoal controller`: a controller that serves until it is told to end. Workers go on training without it."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from shoal_protos.channel import CONTROLLER_GRPC_VARIABLES

from shoal_controller.cli.options import Adopt, Data, Grpc, Http, NoPage, Store

Open = typer.Option("--open", envvar="SHOAL_OPEN", help="Listen beyond this machine without a token.")


async def controller(
    http: Http = None,
    grpc: Grpc = None,
    store: Store = None,
    data: Data = None,
    open_to_all: Annotated[bool, Open] = False,
    no_page: NoPage = False,
    adopt: Adopt = False,
) -> int:
    """Serve jobs and their workers.

    With the same store, a controller continues where the last one stopped; workers keep training in between.
    """
    from contextlib import suppress

    from shoal_controller.cli.endings import DONE, INTERRUPTED, Interrupted
    from shoal_controller.cli.serve import Places, interrupts, serving
    from shoal_controller.process.descriptors import spare_what_lasts

    for name, value in CONTROLLER_GRPC_VARIABLES.items():
        os.environ.setdefault(name, value)  # before gRPC, which reads them when it is first used
    places = Places(http, grpc, store, data, open_to_all, no_page, adopt=adopt)
    with interrupts() as signals, suppress(Interrupted):
        async with serving(places, own=False, signals=signals):
            spare_what_lasts()
            await signals.first.wait()
    return DONE if signals.terminated else INTERRUPTED
