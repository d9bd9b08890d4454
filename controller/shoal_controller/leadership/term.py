"""The term of a leader: the shell with all jobs, the planner's process, and the store that only the leader may write.

All of it is made from the store for each term, and closed when the term ends, streams first, because their workers then
look for the next leader. Wiring only.

`FencedStore` adds the term's fence to the conditions of every write. While the lease has lapsed nothing is written. A
write of the last moment that is answered after it has an unknown outcome, so nothing is done on the strength of it
until the leader is sure again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from shoal_protos.errors import StoreError

from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.jobs.planner_process import PlannerProcess
from shoal_controller.jobs.ports import Outside, Record, SizeWriter
from shoal_controller.jobs.shell import Shell
from shoal_controller.jobs.streams import Streams
from shoal_controller.launchers.launcher import Launcher
from shoal_controller.leadership.controller_state import ControllerState
from shoal_controller.leadership.election import Leadership
from shoal_controller.store.store import (
    Changes,
    Compare,
    Entry,
    Fenced,
    Lease,
    Listing,
    Operation,
    Outcome,
    Revision,
    Store,
    UnknownOutcome,
)


@dataclass(frozen=True, slots=True)
class Means:
    """What every term of a controller is made of."""

    store: Store
    streams: Streams
    controller: ControllerState
    launchers: Mapping[str, Launcher]
    """Those that jobs may use. Each lets go of everything when a term ends."""
    record: Record
    forget_after_seconds: float
    fail: Callable[[BaseException], None]
    """Hears what ends the whole controller, and not this term alone."""
    prepared: Callable[[JobSpec], JobSpec]
    """A new job with what this controller sets for all."""
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
        places = means.controller.places
        shell.connect(
            Outside(
                means.streams, means.launchers, planner.answer, prepared=means.prepared, controllers=places,
                record=means.record,
            )
        )  # fmt: skip
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


class FencedStore:
    """A `Store` for one term."""

    def __init__(self, store: Store, leadership: Leadership) -> None:
        self._store = store
        self._leadership = leadership

    async def get(self, key: str) -> Entry | None:
        return await self._store.get(key)

    async def list(self, prefix: str, *, after: str = "", limit: int = 0) -> Listing:
        return await self._store.list(prefix, after=after, limit=limit)

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        """Raises `Fenced` where another controller was elected."""
        if self._leadership.trouble:
            raise StoreError(self._leadership.trouble)
        fence = self._leadership.fence
        outcome = await self._store.transact([fence, *compares], operations)
        if not outcome.succeeded:
            term = await self._store.get(fence.key)
            if term is None or term.modified != fence.modified:
                raise Fenced("another controller was elected; this one decides nothing any more")
        if self._leadership.trouble:
            raise UnknownOutcome(self._leadership.trouble)
        return outcome

    def lease(self, seconds: float) -> AbstractAsyncContextManager[Lease]:
        return self._store.lease(seconds)

    def watch(self, prefix: str, after: Revision) -> AbstractAsyncContextManager[AsyncIterator[Changes]]:
        return self._store.watch(prefix, after)

    async def close(self) -> None:
        """The store itself is others' too, and stays open."""
