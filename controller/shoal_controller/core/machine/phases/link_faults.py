"""Connections that break between living workers: whom to count out when it is always the same two.

One break is weather: the world is built anew. After two generations broken by the same pair, with nobody lost, the one
that was named more often goes (a tie: the younger), and comes back only after a back-off that doubles.
"""

from __future__ import annotations

from collections import Counter

from shoal_protos.messages import MemberState, Status
from shoal_protos.plan import Plan, WorkerId

from shoal_controller.core.machine.durable import Feud
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
    more = f" (and {len(broken) - 1} more reports)" if len(broken) > 1 else ""
    return f"worker {reporter} says that its connection to {peer} broke{more}"


def judge(turn: Turn, attempt: Attempt) -> None:
    """All who may hold something have stopped: were all of the broken world among them, its reports count."""
    world = turn.world
    if not attempt.reports or world is None:
        return
    if any(not turn.record(member.worker).serves for member in world.members):
        return  # ● someone was lost: an abort breaks its peers' connections too
    durable = dict(turn.durable.feuds)
    for pair in dict.fromkeys("|".join(sorted(pair)) for pair in attempt.reports):
        before = durable.get(pair, Feud(0, {}))
        named = Counter(before.named)
        named.update(peer for reporter, peer in attempt.reports if "|".join(sorted((reporter, peer))) == pair)
        durable[pair] = Feud(before.times + 1, dict(named))
    turn.keep(feuds=durable)
    for pair, feud in durable.items():
        if feud.times >= PATIENCE:
            _count_out(turn, pair, feud)
            return


def _count_out(turn: Turn, pair: str, feud: Feud) -> None:
    roster = turn.durable.roster
    blamed = max(pair.split("|"), key=lambda worker: (feud.named.get(worker, 0), roster[worker].order))
    why = f"its connection to another member broke {feud.times} generations ({pair.replace('|', ' and ')})"
    count_out(turn, blamed, why)


def count_out(turn: Turn, worker: WorkerId, why: str) -> None:
    """It lives, and stays outside of worlds as long as they can do without it; then it comes back."""
    turn.mark(worker, shunned=True, why=why)
    turn.keep(feuds={name: other for name, other in turn.durable.feuds.items() if worker not in name.split("|")})
    turn.note(EventKind.LOST, f"worker {worker} is counted out for {back_off(turn, worker):g} s: {why}", worker)


def back_off(turn: Turn, worker: WorkerId) -> float:
    """No planned change takes it in for so many seconds."""
    address = turn.record(worker).address
    again = 0 if avoided(turn, worker) else 1  # needed though it was counted out: the back-off runs already
    times = turn.durable.avoided.get(address, 0) + again
    turn.keep(avoided={**turn.durable.avoided, address: times})
    if again:
        turn.keep(avoided_until={**turn.durable.avoided_until, address: turn.now + _backoff(times)})
    return _backoff(times)


def _backoff(times: int) -> float:
    return min(FIRST_BACKOFF * 2.0 ** (times - 1), LONGEST_BACKOFF)


def forget(turn: Turn) -> None:
    """Feuds of workers that are gone."""
    roster = turn.durable.roster
    alive = {
        name: feud
        for name, feud in turn.durable.feuds.items()
        if all(worker in roster and roster[worker].serves for worker in name.split("|"))
    }
    if len(alive) != len(turn.durable.feuds):
        turn.keep(feuds=alive)


def forgive(turn: Turn) -> None:
    """Back-offs that have been over for as long as they lasted, of addresses where nobody is any more."""
    durable = turn.durable
    if not durable.avoided:
        return
    here = {record.address for record in durable.roster.values() if record.ending is None}
    kept = {
        address: times
        for address, times in durable.avoided.items()
        if address in here or turn.now < durable.avoided_until.get(address, 0.0) + _backoff(times)
    }
    if len(kept) != len(durable.avoided):
        turn.keep(avoided=kept, avoided_until={a: at for a, at in durable.avoided_until.items() if a in kept})


def restarted(turn: Turn) -> None:
    """A back-off goes on over a controller's restart. A clock that was set back makes none longer than it was."""
    times = turn.durable.avoided
    until = {
        address: min(at, turn.now + _backoff(times[address])) for address, at in turn.durable.avoided_until.items()
    }
    turn.keep(avoided_until=until)


def avoided(turn: Turn, worker: WorkerId) -> bool:
    return turn.now < turn.durable.avoided_until.get(turn.record(worker).address, 0.0)


def quarrels(turn: Turn, worker: WorkerId) -> bool:
    """Whether a worker is one of a pair whose connection broke: let another one build the group."""
    return any(worker in pair.split("|") for pair in turn.durable.feuds)
