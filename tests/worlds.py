"""Small plans for tests of the worker's side: `recovery(1, "ab")`, `planned(2, 1, "abc")`; a letter is a worker."""

from __future__ import annotations

from dataclasses import replace

from shoal_protos.plan import Member, Plan, Reason, Recovery, Share, check_plan
from shoal_protos.runs import NO_BLOCKS, Runs, every

BLOCKS = 6


def member(worker: str) -> Member:
    return Member(worker, f"{worker}.1", f"127.0.0.1:{1000 + ord(worker[0])}")


def _shares(workers: str, blocks: int) -> tuple[Share, ...]:
    """Blocks in runs, lanes one each; a worker in capitals keeps nothing yet."""
    holders = [worker for worker in workers if worker.islower()]
    size = -(-blocks // len(holders))
    shares = {
        worker: Share((lane,), every(blocks) & Runs(((lane * size, (lane + 1) * size),)))
        for lane, worker in enumerate(holders)
    }
    return tuple(shares.get(worker, Share()) for worker in workers)


def recovery(generation: int, workers: str, step: int = 0) -> Plan:
    """A plan made from inventories."""
    plan = Plan(
        generation=generation,
        base=0,
        reason=Reason.KILL,
        lanes=sum(worker.islower() for worker in workers),
        blocks=BLOCKS,
        members=tuple(member(worker.lower()) for worker in workers),
        shares=_shares(workers, BLOCKS),
        fills=(),
        fill_blocks_per_step=1,
        builder=0,
        steps=True,
        recovery=Recovery(step, b"", (True,) * len(workers), (NO_BLOCKS,) * len(workers)),
    )
    check_plan(plan)
    return plan


def planned(generation: int, base: int, workers: str) -> Plan:
    """A planned change; joiners in capitals."""
    plan = replace(recovery(generation, workers), base=base, recovery=None, reason=Reason.JOIN)
    check_plan(plan)
    return plan


def share_of(plan: Plan, worker: str) -> Runs:
    """What a worker keeps in it."""
    rank = plan.rank_of(worker, f"{worker}.1")
    assert rank is not None
    return plan.shares[rank].keeps
