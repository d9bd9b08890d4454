"""What a request of an operator would do, as one sentence, before it is made. Pure.

The machine itself is asked, on a copy of the job (`Runner.preview`): what it refuses is refused here with its own
sentence, and what it would change is read from the job before and after. Only the lanes are shared out here as the
planner would, which is asked later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import singledispatch

from shoal_protos.acts import Cancel, ConfirmLost, DrainWorker, OperatorRequest, Pause, Resume, Save, Scale
from shoal_protos.description import ROUNDS_FROM_STAGE
from shoal_protos.plan import Plan, WorkerId
from shoal_protos.runs import Runs
from shoal_protos.shape import ONE
from shoal_protos.text import at_step, plural

from shoal_controller.core.machine.spec import JobView, Phase, State
from shoal_controller.core.overview.amounts import duration, listed
from shoal_controller.core.overview.holdings import exposed_blocks
from shoal_controller.core.overview.idle_lanes import idle_sentence_with
from shoal_controller.core.planning.cells import pair, share_among
from shoal_controller.core.planning.lanes import NONE_IN_FLIGHT


@singledispatch
def preview(request: OperatorRequest, _before: JobView, _after: JobView, /) -> str:
    """Return what a request would do. The views: of the job as it is, and as it would be at once."""
    raise AssertionError(f"{type(request).__name__} has no preview")


# ---- one worker


@preview.register
def _drain(request: DrainWorker, before: JobView, after: JobView) -> str:
    return f"drain {request.worker}: {_drain_sentence(before, after, request.worker, request.grace_seconds)}"


@preview.register
def _loss(request: ConfirmLost, before: JobView, after: JobView) -> str:
    return f"confirm that {request.worker} is dead: {_loss_sentence(before, after, request.worker)}"


def _drain_sentence(before: JobView, after: JobView, worker: WorkerId, grace_seconds: float) -> str:
    world = before.world
    if not _is_here(before, worker):
        return f"it is silent, and is given up as if it were dead: {_loss_sentence(before, after, worker)}"
    if world is None or worker not in world.workers:
        return ", ".join(filter(None, ("it has no lanes and no blocks", _replacement_sentence(before, after))))
    stays = [member.worker for member in world.members if member.worker != worker and _serves(after, member.worker)]
    coordinate = _coordinates(world)[worker]
    if not any(_coordinates(world)[name] == coordinate for name in stays):
        saved = "its state is saved in a checkpoint first" if before.can_checkpoint else "nobody has its state then"
        at = f" at {before.cell.named(coordinate)}" if before.cell != ONE else ""
        return f"it is the last one{at}: no step runs without it, {saved}"
    only = _only_with(world, {worker})
    copied = f"{plural(len(only), 'block')} copied from it first (at most {duration(grace_seconds)})" if only else ""
    return ", ".join(
        filter(
            None,
            (_lanes_sentence(before, worker, stays), copied, "nothing is lost", _in_its_place(before, after, stays)),
        )
    )


def _loss_sentence(before: JobView, after: JobView, worker: WorkerId) -> str:
    world = before.world
    if world is None or worker not in world.workers:
        return "nobody waits for it any more"
    here = [member.worker for member in world.members if _is_here(after, member.worker)]
    stays = [name for name in here if _serves(after, name)] or here
    lost = exposed_blocks(world, world.workers - set(here))  # one that drains has its blocks until others have them
    if not lost:
        parts = [_lanes_sentence(before, worker, stays), "its blocks go on with their mirrors", "no step is lost"]
        return ", ".join(filter(None, (*parts, _in_its_place(before, after, stays))))
    back = before.last_checkpoint_step
    if back is not None:
        where = f"all go back to the checkpoint of step {back}"
    else:
        where = f"the job starts again from step 0{'' if before.traits.starts else ' when workers come'}"
    return f"{plural(len(lost), 'block')} {'has' if len(lost) == 1 else 'have'} no other copy: {where}"


def _lanes_sentence(view: JobView, worker: WorkerId, stays: Sequence[WorkerId]) -> str:
    """To whom its lanes go, as the planner will share them out among those who stay."""
    world = view.world
    assert world is not None
    lanes = world.lanes_by_worker[worker]
    if not lanes:
        return "it has no lanes"
    shared, had = lanes_among(view, world, stays), world.lanes_by_worker
    takers = [name for name in stays if set(shared[name]) & set(lanes) - set(had[name])]
    if not any(shared.values()):
        return "no cell is whole without it, so no step runs until there is one"
    return f"its {plural(len(lanes), 'lane')} {'goes' if len(lanes) == 1 else 'go'} to {listed(takers)}"


def lanes_among(view: JobView, world: Plan, stays: Sequence[WorkerId]) -> dict[WorkerId, tuple[int, ...]]:
    """The lanes of each, in a planned change: cells are paired and share them out as the planner will have it."""
    here, known, coordinates = (
        dict.fromkeys(stays),
        {worker.worker: worker for worker in view.workers},
        _coordinates(world),
    )
    number = {name: place for place, name in enumerate(here)}
    domains = {domain: place for place, domain in enumerate(sorted({known[name].domain for name in here}))}
    at = [[number[name] for name in here if coordinates[name] == place] for place in range(world.coordinates)]
    trainers = [members[: view.trainers or None] for members in at]
    left = [[number[name] for name in cell if name in here] for cell in world.workers_of_cells]
    hosts = [known[name].host or known[name].domain for name in here]
    cells = pair(trainers, hosts, left, view.cell.tight_parts)
    of = [domains[known[name].domain] for name in here]
    rounds = (view.stage or 0) >= ROUNDS_FROM_STAGE
    shared = share_among(cells, world.lanes, [NONE_IN_FLIGHT] * len(cells), of, rounds)
    lanes = {place: mine for cell, mine in shared.items() for place in cell}
    return {name: lanes.get(number[name], ()) for name in here}


def _coordinates(world: Plan) -> dict[WorkerId, int]:
    """The coordinate of every member."""
    return {member.worker: member.coordinate for member in world.members}


def _only_with(world: Plan, workers: Collection[WorkerId]) -> Runs:
    return exposed_blocks(world, frozenset(workers))


# ---- the job


@preview.register
def _pause(_: Pause, before: JobView, __: JobView) -> str:
    return f"pause: no step runs after step {before.step}, about; workers stay, and keep what they hold"


@preview.register
def _save(_: Save, __: JobView, ___: JobView) -> str:
    return "save a checkpoint: after the next step, beside training; it is listed once it is complete"


@preview.register
def _resume(_: Resume, __: JobView, after: JobView) -> str:
    return f"resume: {_resume_sentence(after)}"


@preview.register
def _cancel(_: Cancel, before: JobView, after: JobView) -> str:
    return f"cancel: {_cancel_sentence(before, after)}"


@preview.register
def _scale(_: Scale, before: JobView, after: JobView) -> str:
    if after.spares != before.spares:
        spares = f"{plural(after.spares, 'spare')} beside {plural(after.wanted, 'worker')}, in place of {before.spares}"
        return f"{spares}; training goes on meanwhile"
    if after.wanted == before.wanted:
        most = "its lanes" if after.max_workers is None else f"{after.max_workers}"
        return f"the job may have from {after.min_workers} to {most} workers; it goes on with {before.active}"
    idle = idle_sentence_with(after, after.wanted_cells + (0 if after.trainers else after.spares))
    return f"{_scale_sentence(before, after)}{f'; {idle}' if idle else ''}"


def _scale_sentence(before: JobView, after: JobView) -> str:
    change = f"scale from {before.wanted} to {plural(after.wanted, 'worker')}"
    leaving = [worker.worker for worker in after.workers if worker.state is State.DRAINING]
    known = {worker.worker for worker in before.workers if worker.state is State.DRAINING}
    if gone := [worker for worker in leaving if worker not in known]:
        leave = "leaves" if len(gone) == 1 else "leave"
        return f"{change}: {listed(gone)} {leave} once their lanes and blocks are with others, nothing is lost"
    if after.wanted < before.wanted:
        return f"{change}: nobody has to leave"
    missing = after.wanted - before.active
    if started := _new_workers(before, after):
        are = "is" if len(started) == 1 else "are"
        return f"{change}: {listed(started)} {are} started, while training goes on"
    if not before.traits.starts and missing > 0:
        return f"{change}: {plural(missing, 'worker')} may join (`shoal worker`); training goes on meanwhile"
    return f"{change}: training goes on meanwhile"


def _resume_sentence(after: JobView) -> str:
    """It trains at once only with a world that is large enough."""
    if after.active < after.min_workers:
        are = "is" if after.active == 1 else "are"
        return f"no step runs yet: {plural(after.active, 'worker')} {are} active, min_workers is {after.min_workers}"
    if after.phase is Phase.STALLED:
        return "training goes on once the job is no longer stalled"
    if after.world is None or after.phase is Phase.RESIZING:
        return f"training goes on from step {after.step}, about, once the job is no longer {after.phase.value}"
    return f"training goes on from step {after.step} with the same workers"


def _cancel_sentence(before: JobView, after: JobView) -> str:
    if before.phase.is_over:
        return "the job is over: it is forgotten, with its events and logs; its checkpoints stay"
    if after.phase.is_over:
        return f"no world trains: the job is over at once, {at_step(before.step)}"
    kept = f"; the last checkpoint is of step {before.last_checkpoint_step}" if before.last_checkpoint_step else ""
    none = "; it has no checkpoint" if before.last_checkpoint_step is None else ""
    ending = "1 worker ends after its step" if before.active == 1 else f"{before.active} workers end after their step"
    return f"{ending}, at about step {before.step}{kept}{none}"


def _serves(view: JobView, worker: WorkerId) -> bool:
    """Whether it stays in the job."""
    return any(w.worker == worker and w.state not in (State.LOST, State.LEFT, State.DRAINING) for w in view.workers)


def _is_here(view: JobView, worker: WorkerId) -> bool:
    """Whether it still has what it holds."""
    return any(w.worker == worker and w.state not in (State.LOST, State.LEFT) for w in view.workers)


def _new_workers(before: JobView, after: JobView) -> list[WorkerId]:
    known = {worker.worker for worker in before.workers}
    return [worker.worker for worker in after.workers if worker.worker not in known]


def _in_its_place(before: JobView, after: JobView, stays: Sequence[WorkerId]) -> str:
    """The worker that is started in place of one that goes; without one, how much of the others will idle."""
    world = before.world
    assert world is not None
    coordinates = _coordinates(world)
    at = Counter(coordinates[name] for name in stays)
    full = min(at[place] for place in range(world.coordinates))
    return _replacement_sentence(before, after) or idle_sentence_with(after, min(full, after.trainers or full))


def _replacement_sentence(before: JobView, after: JobView) -> str:
    started = _new_workers(before, after)
    return f"{listed(started)} {'is' if len(started) == 1 else 'are'} started in its place" if started else ""
