"""Connections that break between living workers: whom to quarantine when it is always the same two.

One break is weather: the world is built anew. After two generations broken by the same pair, with nobody lost, the one
that was named more often goes (a tie: the younger), and comes back only after a back-off that doubles.
"""

from __future__ import annotations

from collections import Counter

from shoal_protos.messages import MemberState, Status
from shoal_protos.plan import Plan, WorkerId
from shoal_protos.text import plural

from shoal_controller.core.machine.durable import LinkFault
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.job import Attempt
from shoal_controller.core.machine.phases.next_message import is_member
from shoal_controller.core.machine.turn import Turn

PATIENCE = 2
"""How many generations the same pair may break."""
FIRST_BACKOFF = 10.0
LONGEST_BACKOFF = 3600.0

Reports = tuple[tuple[WorkerId, WorkerId], ...]


def reports(turn: Turn, plan: Plan, building: bool) -> Reports:
    """Who of a world says that its connection to whom broke: in training, or while the world is being built."""
    found = []
    for member in plan.members:
        process = turn.process(member.worker)
        if process is None or not process.status.broken:
            continue
        status = process.status
        if building:
            built = status.promised == plan.generation and status.state in (MemberState.BUILDING, MemberState.READY)
            peers = [peer for peer in status.broken if built and is_member(plan, peer)]
        else:
            peers = _broken_in_training(plan, status)
        found += [(member.worker, peer) for peer in peers]
    return tuple(found)


def _broken_in_training(plan: Plan, status: Status) -> list[WorkerId]:
    """● A member that the planned change has not reached yet speaks of the world before: there it is stuck."""
    if status.state is not MemberState.TRAINING:
        return []
    behind = 0 < status.generation < plan.generation
    return [peer for peer in status.broken if behind or is_member(plan, peer)]


def sentence(broken: Reports) -> str:
    reporter, peer = broken[0]
    more = f" (and {plural(len(broken) - 1, 'more report')})" if len(broken) > 1 else ""
    return f"worker {reporter} says that its connection to {peer} broke{more}"


def judge(turn: Turn, attempt: Attempt) -> None:
    """All who may hold something have stopped: were all of the broken world among them, its reports count."""
    world = turn.world
    if not attempt.reports or world is None:
        return
    if any(not turn.record(member.worker).serves for member in world.members):
        return  # ● someone was lost: an abort breaks its peers' connections too
    durable = dict(turn.durable.link_faults)
    for pair in dict.fromkeys("|".join(sorted(pair)) for pair in attempt.reports):
        before = durable.get(pair, LinkFault(0, {}))
        named = Counter(before.blame_counts)
        named.update(peer for reporter, peer in attempt.reports if "|".join(sorted((reporter, peer))) == pair)
        durable[pair] = LinkFault(before.times + 1, dict(named))
    turn.keep(link_faults=durable)
    for pair, fault in durable.items():
        if fault.times >= PATIENCE:
            _quarantine_blamed(turn, pair, fault)
            return


def _quarantine_blamed(turn: Turn, pair: str, fault: LinkFault) -> None:
    roster = turn.durable.roster
    blamed = max(pair.split("|"), key=lambda worker: (fault.blame_counts.get(worker, 0), roster[worker].join_order))
    why = f"its connection to another member broke {fault.times} generations ({pair.replace('|', ' and ')})"
    quarantine(turn, blamed, why)


def quarantine(turn: Turn, worker: WorkerId, why: str) -> None:
    """It lives, and stays outside of worlds as long as they can do without it; then it comes back."""
    turn.mark(worker, quarantined=True, why=why)
    turn.keep(
        link_faults={name: other for name, other in turn.durable.link_faults.items() if worker not in name.split("|")}
    )
    turn.note(EventKind.LOST, f"worker {worker} is evicted for {back_off(turn, worker):g} s: {why}", worker)


def back_off(turn: Turn, worker: WorkerId) -> float:
    """No planned change takes it in for so many seconds."""
    address = turn.record(worker).address
    again = 0 if is_backing_off(turn, worker) else 1  # needed though it was evicted: the back-off runs already
    times = turn.durable.backoff_counts.get(address, 0) + again
    turn.keep(backoff_counts={**turn.durable.backoff_counts, address: times})
    if again:
        turn.keep(backoff_until={**turn.durable.backoff_until, address: turn.now + _backoff_seconds(times)})
    return _backoff_seconds(times)


def _backoff_seconds(times: int) -> float:
    return min(FIRST_BACKOFF * 2.0 ** (times - 1), LONGEST_BACKOFF)


def forget_departed(turn: Turn) -> None:
    """Link faults of workers that are gone."""
    roster = turn.durable.roster
    alive = {
        name: fault
        for name, fault in turn.durable.link_faults.items()
        if all(worker in roster and roster[worker].serves for worker in name.split("|"))
    }
    if len(alive) != len(turn.durable.link_faults):
        turn.keep(link_faults=alive)


def forget_old_backoffs(turn: Turn) -> None:
    """Back-offs that have been over for as long as they lasted, of addresses where nobody is any more."""
    durable = turn.durable
    if not durable.backoff_counts:
        return
    here = {record.address for record in durable.roster.values() if record.ending is None}
    kept = {
        address: times
        for address, times in durable.backoff_counts.items()
        if address in here or turn.now < durable.backoff_until.get(address, 0.0) + _backoff_seconds(times)
    }
    if len(kept) != len(durable.backoff_counts):
        turn.keep(backoff_counts=kept, backoff_until={a: at for a, at in durable.backoff_until.items() if a in kept})


def on_restart(turn: Turn) -> None:
    """A back-off goes on over a controller's restart. A clock that was set back makes none longer than it was."""
    times = turn.durable.backoff_counts
    until = {
        address: min(at, turn.now + _backoff_seconds(times[address]))
        for address, at in turn.durable.backoff_until.items()
    }
    turn.keep(backoff_until=until)


def is_backing_off(turn: Turn, worker: WorkerId) -> bool:
    return turn.now < turn.durable.backoff_until.get(turn.record(worker).address, 0.0)


def has_fault(turn: Turn, worker: WorkerId) -> bool:
    """Whether a worker is one of a pair whose connection broke: let another one build the group."""
    return any(worker in pair.split("|") for pair in turn.durable.link_faults)
