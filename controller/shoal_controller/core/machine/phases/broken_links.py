"""Broken links between living workers: who goes, for how long, and what happens where nobody can be spared.

Of all broken links together the worker on most of them goes, at once (a tie: the younger), with a back-off that
doubles. Where neither end can be spared, because each is the only one that holds some blocks, the job is `stalled`,
names the pair and tries again, until `stall_seconds` are over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from shoal_protos.plan import Plan, WorkerId

from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.job import Attempt
from shoal_controller.core.machine.phases import link_faults, scaling
from shoal_controller.core.machine.phases.next_message import is_member
from shoal_controller.core.machine.spec import Phase
from shoal_controller.core.machine.turn import Turn
from shoal_controller.core.machine.wait_graph import BrokenLink


def sentence(links: Iterable[BrokenLink]) -> str:
    """Both ends of each link, and what was seen."""
    return "; ".join(f"workers {link.waiting} and {link.peer} cannot reach each other: {link.seen}" for link in links)


def most_blamed(turn: Turn, links: Iterable[BrokenLink]) -> list[WorkerId]:
    """The ends of the links: who is on most of them first, at a tie the younger."""
    named = Counter(end for link in links for end in link.ends)
    return sorted(named, key=lambda worker: (named[worker], turn.record(worker).join_order), reverse=True)


def judge(turn: Turn, attempt: Attempt, can_be_spared: Callable[[WorkerId], bool]) -> Attempt:
    """All who may hold something have stopped: one of those who cannot reach each other stays outside.

    Not where a third was waited for meanwhile: the links may carry again, and if not, the next group is not built.
    """
    are_recent = turn.now - attempt.links_seen_at <= turn.spec.progress_seconds
    links = [link for link in attempt.links if are_recent and all(turn.record(end).serves for end in link.ends)]
    if not links:
        return attempt if attempt.reports else replace(attempt, links=(), inseparable="")
    blamed = most_blamed(turn, links)
    spared = next((worker for worker in blamed if can_be_spared(worker)), None)
    if spared is not None:
        link_faults.quarantine(turn, spared, _why(spared, links))
        return replace(attempt, links=(), inseparable="")
    since = attempt.inseparable_since if attempt.inseparable else turn.now
    both = " and ".join(sorted(links[0].ends))
    why = f"{both} cannot reach each other, and both hold blocks that nobody else has; trying again"
    if not attempt.inseparable:
        turn.note(EventKind.STALLED, why, both=sorted(links[0].ends))
    elif turn.now - since > turn.spec.stall_seconds:
        scaling.give_up(turn, blamed[0], f"{_why(blamed[0], links)} for {turn.now - since:.0f} s (stall_seconds)")
        return replace(attempt, links=(), inseparable="")
    return replace(attempt, links=(), inseparable=why, inseparable_since=since)


def _why(worker: WorkerId, links: Iterable[BrokenLink]) -> str:
    others = sorted({end for link in links if worker in link.ends for end in link.ends} - {worker})
    return f"it cannot reach {', '.join(others)}"


def delay_most_blamed(turn: Turn, asked: frozenset[WorkerId], links: Iterable[BrokenLink]) -> frozenset[WorkerId]:
    """Nobody holds anything yet: whoever is on most of the links starts later. Returns the others."""
    blamed = most_blamed(turn, links)[0]
    seconds = link_faults.back_off(turn, blamed)
    turn.note(EventKind.KEPT_OUT, f"worker {blamed} may join in {seconds:g} s: {_why(blamed, links)}", blamed)
    return asked - {blamed}


def stall(turn: Turn, attempt: Attempt) -> None:
    """A job that tries again with two who could not reach each other is stalled, and says so."""
    if attempt.inseparable:
        turn.enter(Phase.STALLED, attempt.inseparable)


def keep_out(turn: Turn, world: Plan, links: Iterable[BrokenLink]) -> bool:
    """A planned change cannot be built: its joiner on most broken links comes again after a back-off. False: the links
    are between members.
    """
    joiners = [worker for worker in most_blamed(turn, links) if not is_member(world, worker)]
    if joiners and not link_faults.is_backing_off(turn, joiners[0]):
        seconds = link_faults.back_off(turn, joiners[0])
        turn.note(EventKind.KEPT_OUT, f"{sentence(links)}; {joiners[0]} may join again in {seconds:g} s", joiners[0])
    return bool(joiners)
