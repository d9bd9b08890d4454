"""The invariants: looked at where they can break, and after every batch of the machine.

A broken one raises `Violation` with the simulation's event log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal_controller.core.machine.durable import Durable, Standing, WorkerRecord
from shoal_controller.core.machine.events import Event
from shoal_controller.core.machine.job import Job
from shoal_controller.core.machine.phases.scaling import LAST_ONE
from shoal_controller.core.machine.spec import Phase
from shoal_protos.acts import DrainWorker
from shoal_protos.checkpoint import CheckpointRef
from shoal_protos.messages import Ending, Open, PlanMessage, Prepare
from shoal_protos.plan import Plan, Reason

from .symbols import right

if TYPE_CHECKING:
    from .simulation import Simulation
    from .worker import SimWorker


MOST_LATE = 8
"""Steps after the last one: where all who have left their loop by the engine's counter are gone, the others go on."""
MOST_NUMBERS = 1_000
"""By which numbers grow between two writes, at most."""
UNREACHABLE_SECONDS = 0.9
"""After so long a silence must have been seen; by a controller whose ticks are late, two ticks later."""

WELL_SECONDS = 3.0
"""Whoever could be reached for so long has been heard."""


class Violation(Exception):
    """An invariant is broken: the first word is the invariant, the log tells how."""

    def __init__(self, sentence: str, log: list[str]) -> None:
        super().__init__(sentence)
        self.sentence, self.log = sentence, log


class Watch:
    """See the module's text."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.opened: dict[int, Plan] = {}
        self.stored_plans: set[int] = set()
        self.plans: dict[int, Plan] = {}
        self.top = 0
        self.shown = 0
        self.ended_unheard = False
        self.freed: dict[int, set[int]] = {}
        self.incarnations: dict[str, str] = {}
        self.commits = 0
        self.began_at: dict[int, int] = {}
        self.floor = 0
        self.was_put_back = False
        self.believed_beside = 0
        """Deaths of most members that were believed at once, because their host answered at another port."""
        """The store was, and gives numbers and ids again."""
        self.called_dead: set[str] = set()
        """Incarnations that an operator gave up while they were silent, alive or not."""

    def violated(self, sentence: str, *about: object) -> None:
        words = " ".join(map(str, (sentence, *about)))
        self.simulation.say("VIOLATION", words)
        raise Violation(words, self.simulation.log)

    def put_back(self, durable: Durable) -> None:
        """The store is an older one: what no living worker knows of is given again, and people see the step of then."""
        self.was_put_back = True
        known = max(
            [
                durable.last_generation,
                *(max(w.membership.newest_known, w.membership.newest_planned) for w in self.simulation.workers()),
            ]
        )
        self.opened = {number: plan for number, plan in self.opened.items() if number <= known}
        self.plans = {number: plan for number, plan in self.plans.items() if number <= known}
        self.simulation.worlds.forget_after(known)
        self.incarnations = {one.worker: one.incarnation for one in durable.roster.values() if one.incarnation}
        self.shown = min(self.shown, durable.step)
        self.simulation.promises.put_back()

    # ---- the training side

    def trains(self, worker: SimWorker, parameters: dict[int, int], step: int) -> None:
        """Whoever has lanes has the right parameters."""
        expected = right(step)
        model = sorted(self.simulation.model_at(worker.coordinate))
        wrong = [block for block in model if parameters.get(block) != expected[block]]
        if wrong and not (self.simulation.bits.outstanding or self._is_given_up(worker)):
            self.violated("a trainer has wrong parameters", worker, "step", step, wrong)

    def committed(self, worker: SimWorker, step: int, blocks: dict[int, int]) -> None:
        """Right bits, and by one world: one that was given up may finish the step that all had voted, and no more."""
        expected = right(step)
        wrong = [block for block, value in blocks.items() if value != expected[block]]
        generation = worker.membership.generation
        bits = self.simulation.bits
        if wrong and not (bits.outstanding or self._is_given_up(worker)):
            self.violated("a block has wrong bits", worker, "step", step, wrong)
        bits.committed(worker, step)
        for later, begins in self.began_at.items() if worker.incarnation not in self.called_dead else ():
            if later > generation >= self.floor and step > begins + 1 and blocks:
                self.violated(
                    "two worlds train", worker, "commits", step, "in", generation, "while", later, "has", begins
                )
        self.top = max(self.top, step)
        self.commits += 1

    def _is_given_up(self, worker: SimWorker) -> bool:
        """Whether it has a flipped bit's state, perhaps, of a world before all went back, which it has not heard."""
        return self.simulation.bits.undone and worker.membership.generation < self.floor

    def promotes(self, worker: SimWorker, blocks: dict[int, int], keeps: frozenset[int], step: int) -> None:
        """A plan makes owners and mirrors only of those who hold valid bits."""
        expected = right(step)
        wrong = [block for block in sorted(keeps) if blocks.get(block) != expected[block]]
        if wrong and not self.simulation.bits.outstanding:
            self.violated("a plan counts blocks without valid bits", worker, "step", step, wrong)

    def began(self, worker: SimWorker, plan: Plan, step: int) -> None:
        """A generation begins at one step for all."""
        at = self.began_at.setdefault(plan.generation, step)
        if at != step:
            self.violated("a generation begins at two steps", worker, plan.generation, at, step)
        if plan.recovery is not None and plan.generation not in self.opened:
            self.violated("a world trains before it was opened", worker, plan.generation)

    def saved(self, reference: CheckpointRef, whole: dict[int, int]) -> None:
        """A checkpoint that is whole has the bits of its step."""
        expected = right(reference.step)
        wrong = [block for block in sorted(whole) if whole[block] != expected[block]]
        bits = self.simulation.bits
        given_up = bits.undone and reference.generation < self.floor  # it was under way when all went back
        if wrong and (reference.verified or not (bits.flips or given_up)) and not bits.hopeless:
            self.violated("a checkpoint has wrong bits", reference.path, wrong)
        self.simulation.promises.saved(reference.step)

    def drained(self, worker: SimWorker, why: str) -> None:
        """A worker was let go by a world that trains without it: whatever copies it had are gone."""
        self.simulation.checkpoints.final_drains += "its state is in" in why
        self.simulation.promises.parts(worker, why)
        world = self.simulation.host.job.durable.current
        if world is None or not world.steps or LAST_ONE in why:
            return
        step = worker.training.step
        if worker.training.committed_in < self.floor:
            return  # its copies are of steps that were given up when all went back
        expected = right(step) if step >= 0 else []
        for block, value in worker.training.blocks.items():
            if value == expected[block]:
                self.freed.setdefault(step, set()).add(block)

    # ---- the controller

    def sent(self, stored: Durable, message: object) -> None:
        """● A number is in the store before anyone hears of it, a world before it is opened."""
        if isinstance(message, Prepare) and message.generation > stored.last_generation:
            self.violated("a number was said before it was stored", message.generation, stored.last_generation)
        stored_world = stored.current.generation if stored.current is not None else 0
        if isinstance(message, Open) and stored_world != message.generation:
            self.violated("a world was opened before it was stored", message.generation)
        if isinstance(message, PlanMessage):
            plan = message.plan
            if plan.generation > stored.last_generation or (plan.base and plan.generation not in self.stored_plans):
                self.violated("a plan was said before it was stored", plan.generation)
            known = self.plans.setdefault(plan.generation, plan)
            if known is not plan and known != plan:
                self._gives_again(plan, known)
            self.simulation.worlds.of(plan)
            self._seats(plan)

    def _gives_again(self, plan: Plan, known: Plan) -> None:
        """A store that was put back gives a number again that no living worker knows of, or could mistake."""
        number = plan.generation
        if not self.was_put_back or any(one.alive for one in map(self.simulation.process_of, known.members) if one):
            self.violated("two plans have one number", number)
        self.plans[number] = plan
        self.opened.pop(number, None)
        self.began_at.pop(number, None)
        self.simulation.worlds.forget(number)
        self.simulation.groups.forget(number)

    def _seats(self, plan: Plan) -> None:
        """A process has one coordinate, for as long as it lives."""
        for member in plan.members:
            process = self.simulation.process_of(member)
            if process is not None and process.coordinate != member.coordinate:
                self.violated("a plan has a member where it is not", process, process.coordinate, member.coordinate)

    def spawns(self, stored: Durable, worker: str) -> None:
        if worker not in stored.roster:
            self.violated("a worker was started before it was stored", worker)
        if worker in self.simulation.launcher.started and not self.was_put_back:
            self.violated("an id was used twice", worker)

    def stored(self, before: Durable, after: Durable) -> None:
        if after.last_generation < before.last_generation or after.committed_in < before.committed_in:
            self.violated("a number went back", before.last_generation, after.last_generation)
        simulation = self.simulation
        highest = simulation.max_steps + MOST_LATE * (simulation.open_end and simulation.leaves_by_counter)
        if after.last_generation > before.last_generation + MOST_NUMBERS or after.step > highest:
            self.violated("a number was believed that cannot be", after.last_generation, after.step)
        self.stored_plans |= {planned.generation for planned in after.planned}
        if after.first_valid_generation > before.first_valid_generation:
            self._anew(after.first_valid_generation, after.step, after.current)
        plan = after.current
        if plan is not None and plan is not before.current and plan.recovery is not None and plan != before.current:
            self._opens(before, plan)
        for record in after.roster.values():
            self._is_of_one_process(record, after)
        here = [record.incarnation for record in after.roster.values() if record.incarnation and record.ending is None]
        if len(here) > len(set(here)):
            self.violated("a process was given two ids", *here)

    def _is_of_one_process(self, record: WorkerRecord, after: Durable) -> None:
        """An id is; but a store that was put back gives one again, and takes it back where the first one comes."""
        first = self.incarnations.setdefault(record.worker, record.incarnation) if record.incarnation else ""
        if first == record.incarnation:
            return
        if not (self.was_put_back and any(one.incarnation == first for one in after.roster.values())):
            self.violated("an id was given to two processes", record.worker)
        self.incarnations[record.worker] = record.incarnation

    def _opens(self, before: Durable, plan: Plan) -> None:
        if plan.generation in self.opened:
            self.violated("a generation was opened twice", plan.generation)
        self.opened[plan.generation] = plan
        self.began_at.setdefault(plan.generation, plan.recovery.step if plan.recovery is not None else 0)
        step = plan.recovery.step if plan.recovery is not None else 0
        if step < self.top - 1 and plan.reason.value != "start" and self._living_copy(self.top):
            self.violated("a committed step went back", "from", self.top, "to", step)
        if plan.reason.value == "start":
            if (
                before.current is not None
                and self.top > 0
                and before.committed_in >= max(before.first_valid_generation, 1)
            ):
                self.violated("a start took the place of a world that trained", plan.generation)
            self._anew(plan.generation, step, plan)

    def _anew(self, floor: int, step: int, plan: Plan | None) -> None:
        """The job begins again at step 0, at a checkpoint's, or where those are who are left; what was before counts no
        more. Only in the memory of the last nothing has changed.
        """
        self.top = self.shown = step
        self.freed.clear()
        self.simulation.promises.went_back(step)
        recovery = plan.recovery if plan is not None and plan.reason is not Reason.START else None
        if recovery is None or recovery.checkpoint:
            self.simulation.bits.over()
        self.floor = floor
        self.began_at.clear()

    def _living_copy(self, step: int) -> bool:
        """Whether all blocks of a step have a copy with somebody who is reachable."""
        found: set[int] = set()
        for worker in self.simulation.workers():
            here = not (worker.frozen or worker.cut or worker.training.over)  # a script that has raised tells nothing
            if here and worker.training.step >= step:
                found |= worker.training.blocks.keys()
        return len(found) == self.simulation.blocks

    def stepped(self, before: Job, events: Sequence[Event], after: Job) -> None:
        """After every batch of the machine."""
        self._counts_time(before, after)
        self.simulation.speeds.stepped(before, after)
        durable, old = after.durable, before.durable
        if durable is old:
            return
        if old.phase.is_over and durable.phase is not old.phase:
            self.violated("a job that was over went on", old.phase, durable.phase)
        drained = [old.roster.get(event.worker) for event in events if isinstance(event, DrainWorker)]
        self.called_dead |= {one.incarnation for one in drained if one is not None and one.standing is Standing.LOST}
        self._evicted(before, after)
        self._believed_dead(before, after)
        self._takes_the_newest(before, after)
        if before.durable.corruption.restoring:
            return  # not for a lack of copies
        went_back = after.attempt is not None and after.attempt.reason is Reason.RESTORE
        if went_back and not (before.attempt is not None and before.attempt.reason is Reason.RESTORE):
            self._gave_up(before, after, events, "all went back")
        if durable.first_valid_generation > old.first_valid_generation:
            if durable.current is None:
                self._gave_up(before, after, events, "the job started anew")
        elif self._has_failed_in_a_recovery(before, after):
            self._gave_up(before, after, events, "the job failed")

    def _counts_time(self, before: Job, after: Job) -> None:
        """● Each second of a wanted worker has one use, and no count goes down."""
        old, new = before.figures.worker_seconds, after.figures.worker_seconds
        if any(new[use] < old[use] for use in new):
            self.violated("a count of workers' seconds went down", old, new)
        if sum(new.values()) + after.figures.unsettled_seconds < after.figures.wanted_seconds - 1e-6:
            self.violated("seconds of wanted workers have no use", new, after.figures.wanted_seconds)

    def _has_failed_in_a_recovery(self, before: Job, after: Job) -> bool:
        failed = after.durable.phase is Phase.FAILED and before.durable.phase is not Phase.FAILED
        for_blocks = not self.simulation.script.is_given_up_for(after.durable.reason)
        return failed and before.attempt is not None and for_blocks

    def _takes_the_newest(self, before: Job, after: Job) -> None:
        """Who begins without a living copy begins from the newest checkpoint that anybody has told of and can read."""
        plan = after.attempt.plan if after.attempt is not None else None
        if plan is None or plan.recovery is None or (before.attempt is not None and plan is before.attempt.plan):
            return
        durable, path = after.durable, plan.recovery.checkpoint
        here = [process for name, process in after.processes.items() if durable.roster[name].serves]
        known = {process.status.checkpoint for process in here} | set(durable.checkpoints)
        sound = [one for one in known if one is not None and one.path not in durable.unreadable_checkpoints]
        back, began = before.durable.restored_from, before.durable.restored_in
        if back is not None and began not in self.opened:
            self.violated("all went back in a generation that never began", began)
        sound = [one for one in sound if not (back and back < one and one.generation < began)]
        verified = [one for one in durable.checkpoints if one.verified and durable.corruption.restoring]
        newest = max(verified or sound, default=None)
        if plan.reason in (Reason.START, Reason.RESTORE) and path != (newest.path if newest is not None else ""):
            self.violated("not the newest checkpoint is taken", path, "but not", newest)
        if path and plan.reason not in (Reason.START, Reason.RESTORE):
            self.violated("a checkpoint is taken though blocks have living copies", path)
        if path in durable.unreadable_checkpoints or (
            newest is not None and path and plan.recovery.step != newest.step
        ):
            self.violated("a checkpoint cannot be what the plan says", path, plan.recovery.step)

    def shows(self, job: Job) -> None:
        """What people see: the step never goes back, but with the job itself. Another life of the controller may know
        an older one, until all members have said theirs; they never do where it ends the job before.
        """
        if not job.figures_known:
            self.ended_unheard = job.durable.phase.is_over
            return
        if job.durable.step < self.shown and not self.ended_unheard:
            self.violated("the shown step went back", self.shown, job.durable.step)
        self.shown = job.durable.step

    def _evicted(self, before: Job, after: Job) -> None:
        """● Silence evicts nobody while most are unreachable, nor before all have had time to come back."""
        old, new = before.durable.roster, after.durable.roster
        lost = [name for name, record in new.items() if record.standing is Standing.LOST and name in old]
        lost = [name for name in lost if old[name].standing is Standing.HERE and "silent" in new[name].why]
        if not lost:
            return
        now = self.simulation.clock.now
        may_come_back = [record for record in old.values() if record.incarnation and record.ending is None]
        may_come_back = [record for record in may_come_back if record.standing is not Standing.DEAD]
        away = any(record.worker not in after.processes for record in may_come_back)
        if away and self.simulation.host.now - after.started_at < self.simulation.spec.reconnect_seconds:
            self.violated("a worker was evicted though the controller had just started", *lost)
        well = [worker for worker in lost if self._beats(before, worker)]
        if well:
            self.violated("a worker that beats was evicted", *well)
        judged = {**new, **{worker: old[worker] for worker in lost}}  # with what the rest of the batch has told
        served = {name for name, record in old.items() if record.serves}  # one may have been told to end in this batch
        known = [record for record in judged.values() if record.incarnation and record.standing is Standing.HERE]
        here = [record for record in known if record.serves or record.worker in served]
        since = {record.worker: self.simulation.processes[record.incarnation].unreachable_since for record in here}
        seen_after = UNREACHABLE_SECONDS + 2 * self.simulation.host.late
        silent = [worker for worker, at in since.items() if at < now - seen_after]
        long = self.simulation.spec.stall_seconds - UNREACHABLE_SECONDS
        last_message_at = {
            record.worker: self.simulation.processes[record.incarnation].last_message_at for record in here
        }
        gone = [worker for worker in silent if last_message_at[worker] < now - long]  # it may have thawed for a moment
        if 2 * len(silent) > len(here) and set(lost) & set(silent) - set(gone):
            self.violated("a worker was evicted though most were silent", *lost)

    def _believed_dead(self, before: Job, after: Job) -> None:
        """● A refused connection proves no death by itself: firewalls refuse the living."""
        for worker, record in after.durable.roster.items():
            known = before.durable.roster.get(worker)
            dead_now = record.standing is Standing.DEAD and (known is None or known.standing is not Standing.DEAD)
            self.believed_beside += dead_now and "at another port" in record.why
            if dead_now and "refuses" in record.why and self.simulation.processes[record.incarnation].alive:
                self.violated("a living worker was believed dead by a refused connection", worker)

    def _beats(self, job: Job, worker: str) -> bool:
        """Whether it has been well for a while, and has a stream on which it was welcomed."""
        process = self.simulation.processes[job.durable.roster[worker].incarnation]
        now, known = self.simulation.clock.now, job.processes.get(worker)
        reachable = process.alive and process.unreachable_since > now
        long = process.reachable_since < now - WELL_SECONDS - 2 * self.simulation.host.late
        welcomed = known is not None and known.connection is not None and process.session.welcomed
        return reachable and long and welcomed

    def _gave_up(self, before: Job, after: Job, events: Sequence[Event], loss: str) -> None:
        """Only where no process that lives has the blocks, `stall_seconds` are over, or an operator said so."""
        attempt = before.attempt
        now = self.simulation.host.now
        if any(isinstance(event, DrainWorker) for event in events):
            return
        if attempt is None or now - attempt.since > self.simulation.spec.stall_seconds:
            return
        lost = set(attempt.lost_blocks)
        freed = lost & self.freed.get(self.top, set())
        if freed:
            self.violated("a leaving worker was let go with the last copies", sorted(freed))
        copies: set[int] = set()
        committed_in = max(before.durable.committed_in, attempt.committed_in)
        for worker in self.simulation.workers():
            name, t = worker.membership.worker, worker.training
            record = before.durable.roster.get(name)
            if record is None or record.ending is not None or t.over or t.generation < committed_in:
                continue
            if after.durable.roster[name].ending is Ending.FAILED or name in self.simulation.launcher.gone:
                continue  # its own last word, or its launcher's, is what the machine has just heard
            if t.step == self.top:
                copies |= t.blocks.keys()
            elif t.step == self.top - 1:
                copies |= t.pending & t.blocks.keys()
        if len(copies) == self.simulation.blocks:
            self.violated(f"{loss} though every block had a living copy", sorted(lost))
