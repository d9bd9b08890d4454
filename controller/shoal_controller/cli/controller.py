"""`shoal controller`: a controller that serves until it is told to end. Workers go on training without it."""

from __future__ import annotations

from shoal_controller.cli.options import Grpc, Http, Store


async def controller(http: Http = None, grpc: Grpc = None, store: Store = None) -> int:
    """Serve jobs and their workers.

    Started again with the same store it goes on where the last one stopped; workers train on meanwhile.
    """
    from shoal_controller.cli.endings import DONE, INTERRUPTED
    from shoal_controller.cli.serve import interrupts, serving

    with interrupts() as heard:
        async with serving(http, grpc, store, shown=False):
            await heard.first.wait()
    return DONE if heard.terminated else INTERRUPTED
