"""Which controller leads: any number of them share a store, and one at a time decides.

Each keeps one lease alive. On it lie where it is reached (`/controllers/at/ID`) and, of the one that leads,
`/controllers/leader`: the key goes with the lease, and whoever writes it next is elected. `/controllers/term` is
written with each election and by nothing else, so the revision at which it was written is the fence of all that this
leader writes (`term.py`). A leader whose lease has lapsed (the store was away, this process frozen) leads on
only if nobody was elected meanwhile. What a leader does is not here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict, dataclass

import structlog
from shoal_protos.errors import StoreError
from shoal_protos.text import of_shoal

from shoal_controller.process.tasks import end_task, first_of, guarded, only_logged
from shoal_controller.store.store import Compare, Damaged, Lease, Put, Revision, Store, follow

PREFIX = "/controllers/"
PLACES = f"{PREFIX}at/"
LEADER = f"{PREFIX}leader"
TERM = f"{PREFIX}term"

LEASE_SECONDS = 2.0
"""After so long without a sign of life a leader is no longer one: the shortest that etcd grants."""

PAUSE_SECONDS = 0.5
"""Before a store that has failed is asked again."""
WARN_SECONDS = 60.0
"""Between two warnings of the same."""

CONFLICT_SECONDS = 10.0
"""The place of a controller that died, and was started again at the same address, lies in the store for less."""

log = structlog.get_logger("shoal.leadership")


@dataclass(frozen=True, slots=True)
class ControllerPlace:
    """A controller, as others reach it."""

    id: str
    """Random, of this process."""
    http: str
    grpc: str
    scheme: str = "http"
    """`https` where its REST speaks TLS."""
    release: str = ""
    """The release of Shoal that it runs; empty: one from before releases were named."""
    format: int = 0
    """Format of the records that it writes; 0: not known."""

    @property
    def url(self) -> str:
        """Of its REST."""
        return f"{self.scheme}://{self.http}"

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()


class Leadership:
    """One term of this controller: its fence, and how sure it is."""

    def __init__(self, term: Revision, lease: Lease) -> None:
        self.fence = Compare(TERM, term)
        """Holds for as long as nobody else is elected."""
        self.lease = lease
        """The present one. Others may follow it."""
        self.why_lapsed = ""
        """What the store said to the last attempt at another lease."""
        self.given_up = asyncio.Event()
        """Set by whoever leads: it cannot go on."""

    @property
    def lapsed_seconds(self) -> float:
        """How long somebody else may have been elected already; 0: surely nobody."""
        return max(0.0, asyncio.get_running_loop().time() - self.lease.valid_until)

    @property
    def trouble(self) -> str:
        """What keeps this controller from deciding, as a sentence; empty while it surely leads."""
        if not (seconds := self.lapsed_seconds):
            return ""
        why = f" ({self.why_lapsed})" if self.why_lapsed else ""
        return (
            f"this controller's lease ended {seconds:.0f} s ago, and the store has not given it another one{why}; "
            "nothing is decided until it does, or another controller leads"
        )


class Election:
    """This controller among the others of its store. `run` stands for election until it is cancelled."""

    def __init__(
        self, store: Store, me: ControllerPlace, term_of: Callable[[ControllerPlace], Awaitable[Revision]]
    ) -> None:
        """`term_of`: in which term another controller says that it leads; 0: in none."""
        self._store = store
        self._me = me
        self._term_of = term_of
        self._found: Mapping[str, ControllerPlace] = {}
        self._news = asyncio.Event()
        self._leader_seen = asyncio.get_running_loop().time()
        self._warned, self._warn_again_at = ("", ""), 0.0
        self.conflict = ""
        """Another controller says that it is reached where this one is, as a sentence; empty where none does."""
        self.hindrance = ""
        """Why this controller cannot stand for election, as a sentence; empty while it can. What it reads in its store
        meanwhile, who leads too, may have been true once: of an embedded store on a full disk an earlier life, say.
        """

    # ---- what is known

    @property
    def leader(self) -> ControllerPlace | None:
        """Who leads, as far as is known."""
        return self._found.get(LEADER)

    @property
    def places(self) -> tuple[ControllerPlace, ...]:
        """All controllers of this store, the one that leads first."""
        others = sorted((one for key, one in self._found.items() if key != LEADER), key=lambda one: one.id)
        return tuple(dict.fromkeys([*filter(None, [self.leader]), *others]))

    @property
    def newer(self) -> ControllerPlace | None:
        """A controller that writes records of a later format than this one reads; None: there is none."""
        later = [one for one in self.places if one.format > self._me.format]
        return max(later, key=lambda one: (one.format, one.id), default=None)

    @property
    def outdated(self) -> str:
        """Why this controller lets another one lead, as a sentence; empty where it need not."""
        if (newer := self.newer) is None:
            return ""
        return (
            f"this controller is of {of_shoal(self._me.release)} and reads records of the store up to format "
            f"{self._me.format}; the one at {newer.http} is of {of_shoal(newer.release)} and writes format "
            f"{newer.format}, so this one does not stand for election while that one is there"
        )

    @property
    def leaderless_seconds(self) -> float:
        """How long nobody has been known to lead."""
        return 0.0 if self.leader is not None else asyncio.get_running_loop().time() - self._leader_seen

    @property
    def is_own(self) -> bool:
        """Whether it is this controller that leads, or has just led."""
        return self.leader is not None and self.leader.id == self._me.id

    async def until_another_leads(self) -> None:
        """Returns when another controller is known to lead."""
        while self.leader is None or self.is_own:
            await self._news.wait()

    async def until_not_led_by(self, place: ControllerPlace) -> None:
        """Returns when this one is no longer known to lead."""
        while self.leader == place:
            await self._news.wait()

    # ---- the election

    async def run(self, lead: Callable[[Leadership], AbstractAsyncContextManager[object]]) -> None:
        """Stand for election, and lead within the context of `lead` for as long as it is this controller's turn: for
        ever. Raises `Damaged` where the store can be of use to nobody.
        """
        following = guarded("controllers", follow(self._store, PREFIX, self._on_controllers), only_logged)
        comparing = guarded("addresses", self._compare_addresses(), only_logged)
        try:
            while True:
                try:
                    await self._stand(lead)
                except Damaged:
                    raise
                except StoreError as error:
                    self.hindrance = f"this controller cannot stand for election: {error}"
                    self._warn("this controller stands for election again", str(error))
                await asyncio.sleep(PAUSE_SECONDS)
        finally:
            await end_task(comparing)
            await end_task(following)

    def _warn(self, event: str, why: str) -> None:
        """What lasts is tried again twice a second, and told again once a minute."""
        now = asyncio.get_running_loop().time()
        if (event, why) != self._warned or now >= self._warn_again_at:
            log.warning(event, why=why)
            self._warned, self._warn_again_at = (event, why), now + WARN_SECONDS

    async def _stand(self, lead: Callable[[Leadership], AbstractAsyncContextManager[object]]) -> None:
        async with AsyncExitStack() as held:
            lease = await held.enter_async_context(self._store.lease(LEASE_SECONDS))
            await self._store.transact([], [self._place(lease)])
            self.hindrance = ""
            if not (term := await self._win(lease)):
                return
            leadership = Leadership(term, lease)
            log.info("this controller leads", term=term)
            async with AsyncExitStack() as ends:  # before its lease does: whoever is elected next meets no trace of it
                await _unless_lost(lease, ends.enter_async_context(lead(leadership)))
                self._warned = ("", "")
                while await self._until_doubtful(leadership):
                    log.warning("the store was late to renew this lease", means="nothing is decided until it has")
                    if not await self._lead_on(leadership, held):
                        break
            log.info("this controller leads no longer", term=term)

    async def _win(self, lease: Lease) -> Revision:
        """The term to which it is elected. 0: its lease is lost."""
        while not lease.lost.is_set():
            news = self._news
            found = await self._store.get(LEADER)
            if found is not None and found.lease == lease.id:
                return found.modified
            if found is None and self.outdated:  # what the other one has written this one cannot serve
                self._warn("this controller does not stand for election", self.outdated)
            elif found is None:
                mine = Put(LEADER, self._me.encoded(), lease.id)
                outcome = await self._store.transact([Compare(LEADER)], [mine, Put(TERM, self._me.encoded())])
                if outcome.succeeded:
                    return outcome.revision
            await first_of(lease.lost.wait(), news.wait(), asyncio.sleep(LEASE_SECONDS))
        return 0

    async def _until_doubtful(self, leadership: Leadership) -> bool:
        """Returns when the lease is over, or the key on it has gone or is another's (True), or when the leader has
        given up (False). Keys may go without their lease: by an operator's hand, or with a backup that is restored.
        """
        lease = leadership.lease
        while not (leadership.given_up.is_set() or lease.lost.is_set()):
            displaced = asyncio.Event()
            await first_of(lease.lost.wait(), leadership.given_up.wait(), self._until_displaced(displaced))
            if displaced.is_set() and not await self._has_key(lease):
                break
        return not leadership.given_up.is_set()

    async def _has_key(self, lease: Lease) -> bool:
        """Whether the leader's key surely lies on this lease."""
        try:
            found = await self._store.get(LEADER)
        except StoreError as error:
            log.warning("it is not known who leads", error=str(error))
            return False
        return found is not None and found.lease == lease.id

    async def _until_displaced(self, displaced: asyncio.Event) -> None:
        """What is followed may lag behind: so first it says that this controller leads, and then no longer."""
        while not self.is_own:
            await self._news.wait()
        while self.is_own:
            await self._news.wait()
        displaced.set()

    async def _lead_on(self, leadership: Leadership, held: AsyncExitStack) -> bool:
        """Whether it may, as nobody was elected since its lease was over. Waits for a store that is away."""
        while not leadership.given_up.is_set():
            await held.pop_all().aclose()  # one that is lost is not revoked: its keys may lie on another one
            try:
                lease = await held.enter_async_context(self._store.lease(LEASE_SECONDS))
                found = await self._store.get(LEADER)
                guards = [leadership.fence, Compare(LEADER, found.modified if found is not None else 0)]
                mine = Put(LEADER, self._me.encoded(), lease.id)
                outcome = await self._store.transact(guards, [mine, self._place(lease)])
                if outcome.succeeded:
                    leadership.lease, leadership.why_lapsed, self._warned = lease, "", ("", "")
                    log.info("this controller leads on", term=leadership.fence.modified)
                    return True
                term = await self._store.get(TERM)
                if term is None or term.modified != leadership.fence.modified:
                    return False
            except StoreError as error:
                leadership.why_lapsed = str(error)
                self._warn("this controller has no lease", str(error))
                if await self._is_overtaken(leadership):
                    return False
            await asyncio.sleep(PAUSE_SECONDS)
        return False

    async def _is_overtaken(self, leadership: Leadership) -> bool:
        """Whether a neighbour leads, which a controller that is cut off from the store cannot read there."""
        neighbours = [one for one in self.places if one.id != self._me.id]
        terms = await asyncio.gather(*map(self._term_of, neighbours))
        return any(term > leadership.fence.modified for term in terms)

    async def _compare_addresses(self) -> None:
        """Whoever asks one of two controllers with one address may reach the other: no harm, but of no use."""
        while True:
            while not (before := self._at_own_address()):
                await self._news.wait()
            await asyncio.sleep(CONFLICT_SECONDS)
            while lasting := before & self._at_own_address():
                found = next(iter(lasting))
                shared = " and ".join(sorted({found.http, found.grpc} & {self._me.http, self._me.grpc}))
                self.conflict = (
                    f"another controller of this store says, as this one does, that it is reached at {shared}: what is "
                    "meant for one may reach the other. Give each its own --http, --grpc and SHOAL_ADVERTISE"
                )
                log.error("two controllers have one address", why=self.conflict, other=found.id)
                await self._news.wait()
            self.conflict = ""

    def _at_own_address(self) -> set[ControllerPlace]:
        own = {self._me.http, self._me.grpc}
        return {one for one in self.places if one.id != self._me.id and own & {one.http, one.grpc}}

    def _place(self, lease: Lease) -> Put:
        return Put(f"{PLACES}{self._me.id}", self._me.encoded(), lease.id)

    def _on_controllers(self, entries: Mapping[str, bytes]) -> None:
        if self.leader is not None:
            self._leader_seen = asyncio.get_running_loop().time()
        found = {key: _place_of(value) for key, value in entries.items() if key != TERM}
        self._found = {key: one for key, one in found.items() if one is not None}
        self._news.set()
        self._news = asyncio.Event()


def _place_of(value: bytes) -> ControllerPlace | None:
    """None for one that cannot be read: of a later version, say. It is not known where that one is."""
    try:
        fields = json.loads(value)
        id_, http, grpc = (str(fields[name]) for name in ("id", "http", "grpc"))
        scheme = "https" if fields.get("scheme") == "https" else "http"
        return ControllerPlace(id_, http, grpc, scheme, str(fields.get("release", "")), int(fields.get("format", 0)))
    except (ValueError, TypeError, KeyError) as error:
        log.warning("a controller's place cannot be read", error=str(error))
        return None


async def _unless_lost(lease: Lease, beginning: Awaitable[object]) -> None:
    """Raises `StoreError` where the lease is lost meanwhile: what waits for the store to take a write would wait for
    ever, as only a term that has begun gets another lease.
    """
    losing = asyncio.create_task(lease.lost.wait(), name="a term begins")
    patience = asyncio.timeout(None)
    try:
        async with patience:
            losing.add_done_callback(lambda task: None if task.cancelled() else patience.reschedule(0.0))
            await beginning
    except TimeoutError as error:
        if not patience.expired():
            raise
        raise StoreError("this controller's lease was lost before its term had begun") from error
    finally:
        losing.cancel()
