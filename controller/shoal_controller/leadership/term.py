"""What a leader has for as long as it leads: the shell with all jobs, and the planner's process.

Made anew for each term, from what lies in the store; all of it is gone when the next leader is elected, streams first:
their workers look for it. Wiring only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from shoal_controller.launchers.launcher import Launcher
from shoal_controller.leadership.controller_state import ControllerState
from shoal_controller.leadership.election import Leadership
from shoal_controller.leadership.fenced_store import FencedStore
from shoal_controller.planner_process import PlannerProcess
from shoal_controller.ports import Outside, SizeWriter
from shoal_controller.sessions.streams import Streams
from shoal_controller.shell import Shell
from shoal_controller.store.store import Fenced, Store


@dataclass(frozen=True, slots=True)
class Means:
    """What every term of a controller is made of."""

    store: Store
    streams: Streams
    controller: ControllerState
    launchers: Mapping[str, Launcher]
    """Those that jobs may use. Each lets go of everything when a term ends."""
    forget_after_seconds: float
    fail: Callable[[BaseException], None]
    """Hears what ends the whole controller, and not this term alone."""
    resources: Callable[[Shell], AbstractAsyncContextManager[SizeWriter]] | None = None
    """What makes jobs from a cluster's resources, for as long as its context lasts; None: nothing does."""


@asynccontextmanager
async def leading(means: Means, leadership: Leadership) -> AsyncIterator[None]:
    """Lead within this context."""
    async with AsyncExitStack() as ends:
        store = FencedStore(means.store, leadership)
        shell = Shell(store, forget_after_seconds=means.forget_after_seconds, lapsed=lambda: leadership.trouble)
        for launcher in means.launchers.values():
            ends.push_async_callback(launcher.release)
        planner = PlannerProcess()
        ends.push_async_callback(planner.stop)
        shell.connect(Outside(means.streams, means.launchers, planner.answer, controllers=means.controller.places))
        shell.stopped.add_done_callback(lambda stopped: _on_stopped(stopped.result(), leadership, means.fail))
        ends.push_async_callback(shell.stop)
        await shell.start()
        ends.callback(means.streams.cut)
        means.controller.lead(leadership, shell)
        ends.callback(means.controller.leave)
        if means.resources is not None:
            means.controller.sizes = await ends.enter_async_context(means.resources(shell))
        yield


def _on_stopped(error: BaseException, leadership: Leadership, fail: Callable[[BaseException], None]) -> None:
    """One that was overtaken follows from now on; what else stops a shell is a bug."""
    if isinstance(error, Fenced):
        leadership.given_up.set()
    else:
        fail(error)
