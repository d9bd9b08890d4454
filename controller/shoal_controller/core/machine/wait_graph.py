"""The graph of who waits for whom, read from what workers say that they do: broken links and stragglers.

A connection between X and Y is broken where X waits at a position for Y, and Y stands beyond it or waits for X in turn:
at a position a member has posted all that its peers wait for there. Else whoever waits for Y waits for what Y waits
for. A chain that ends in the user's code says nothing about a connection. Called by the progress watch. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal_protos.activity import Activity
from shoal_protos.plan import WorkerId

Activities = Mapping[WorkerId, Activity]


@dataclass(frozen=True, slots=True)
class BrokenLink:
    """Two living workers whose connection carries nothing."""

    waiting: WorkerId
    peer: WorkerId
    seen: str
    """What shows it, as a sentence."""

    @property
    def ends(self) -> frozenset[WorkerId]:
        return frozenset((self.waiting, self.peer))


def broken_links(activities: Activities, limit_seconds: float) -> tuple[BrokenLink, ...]:
    """● Only who stands where it stands for longer than the limit counts: slow is not broken, and what workers say is
    not of one instant. Each pair once.
    """
    old = {worker: activity for worker, activity in activities.items() if activity.seconds > limit_seconds}
    found: dict[frozenset[WorkerId], BrokenLink] = {}
    for worker, activity in old.items():
        for peer in activity.waits_for:
            if peer in old and _in_vain(worker, activity, old[peer]):
                link = BrokenLink(worker, peer, _sentence(worker, activity, peer, old[peer]))
                found.setdefault(link.ends, link)
    return tuple(found.values()) or _ring(old)


def _in_vain(worker: WorkerId, activity: Activity, peer: Activity) -> bool:
    return worker in peer.waits_for or peer.position > activity.position


def _ring(old: Activities) -> tuple[BrokenLink, ...]:
    """Workers that wait for one another in a ring, all at one position: nobody of them is busy, so links are broken."""
    done: set[WorkerId] = set()
    for start in old:
        path: list[WorkerId] = []
        places: dict[WorkerId, int] = {}
        worker: WorkerId | None = start
        while worker is not None and worker not in done:
            if worker in places:
                ring = path[places[worker] :]
                pairs = zip(ring, [*ring[1:], ring[0]], strict=True)
                return tuple(BrokenLink(a, b, _sentence(a, old[a], b, old[b])) for a, b in pairs)
            places[worker] = len(path)
            path.append(worker)
            worker = next((peer for peer in old[worker].waits_for if peer in old), None)
        done.update(path)
    return ()


def _sentence(worker: WorkerId, activity: Activity, peer: WorkerId, other: Activity) -> str:
    waits = f"{worker} has waited for {peer} for {activity.seconds:.0f} s ({_where(activity)})"
    if worker in other.waits_for:
        return f"{waits}, and {peer} for {worker} for {other.seconds:.0f} s ({_where(other)})"
    return f"{waits}, and {peer} has been beyond that for {other.seconds:.0f} s ({_where(other)})"


def _where(activity: Activity) -> str:
    return f"generation {activity.generation}, {activity.phase.words}"


def stragglers(activities: Activities) -> dict[WorkerId, float]:
    """For whom the others wait in the end though it waits for nobody, and for how many seconds the first of them has.

    Where nobody waits at all, those who have come least far.
    """
    waiting: dict[WorkerId, list[WorkerId]] = {}
    for worker, activity in activities.items():
        for peer in activity.waits_for:
            waiting.setdefault(peer, []).append(worker)
    ends = [peer for peer in waiting if peer not in activities or not activities[peer].waits_for]
    found = {end: max(activities[worker].seconds for worker in _behind(end, waiting)) for end in ends}
    if not waiting:
        least = min((activity.position for activity in activities.values()), default=None)
        found = {worker: activity.seconds for worker, activity in activities.items() if activity.position == least}
    return found


def _behind(end: WorkerId, waiting: Mapping[WorkerId, list[WorkerId]]) -> set[WorkerId]:
    """Whose chains end there."""
    seen: set[WorkerId] = set()
    front = [end]
    while front:
        new = [worker for worker in waiting.get(front.pop(), ()) if worker not in seen]
        seen.update(new)
        front += new
    return seen
