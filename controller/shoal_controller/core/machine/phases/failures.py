"""What has failed, how often, and when trying again is given up.

All that fails in one generation counts once, with back-off from the second time on; only a committed step above the one
at which it happened forgives it, never a fresh start. Failures of the script are given up after `max_restarts`, deaths
by a signal that nobody explains (an out-of-memory kill, a segmentation fault) after ten times as many, because kills
that come faster than steps are not the script's fault. A kill among survivors is forgotten: they commit the step.
A script that fails in the same way in all its workers before the first step is not started again.
"""

from __future__ import annotations

import hashlib
import re
import signal
from dataclasses import replace

from shoal_protos.messages import FRESH_PROCESS, NO_CONTROLLER, WRONG_USE, Ending, Fault, Status
from shoal_protos.plan import Plan, WorkerId
from shoal_protos.text import at_step

from shoal_controller.core.machine.durable import Failures, Standing, WorkerRecord
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.phases import claims, ending
from shoal_controller.core.machine.phases.progress import known_step
from shoal_controller.core.machine.turn import Turn

LONGEST_BACKOFF = 30.0
DEATHS_PER_RESTART = 10
"""So many times `max_restarts` worlds may die by signals."""
EXPLAINED = (-signal.SIGINT, -signal.SIGHUP, -signal.SIGTERM, NO_CONTROLLER)
"""Exit statuses of a process that somebody wanted to end, or that had nobody to work for."""
SILENT = f"its script ended with status {WRONG_USE} and wrote nothing; raise an error or print why"
FRAME = '  File "'
"""Beginning of a frame in a traceback."""
RANK = re.compile(r"^\[rank\d+\]: ")
"""What torch.distributed puts before each line of one, and of a sentence."""
SENTENCE = "shoal: "
"""Beginning of what a worker says for people."""
BUGS = frozenset({
    "AssertionError", "AttributeError", "EOFError", "ImportError", "IndentationError", "IndexError", "KeyError",
    "ModuleNotFoundError", "NameError", "NotImplementedError", "RecursionError", "SyntaxError", "TabError",
    "TypeError", "UnboundLocalError", "UserError", "ValueError", "ZeroDivisionError",
})  # fmt: skip
"""Exceptions of a script itself. Any other one, of memory, a device, a file or a network, may pass."""


def on_failure(turn: Turn, worker: WorkerId, why: str, fault: Fault | None = None, step: int = 0) -> None:
    """A worker failed by itself, at or after `step`: it counts as dead and is replaced with back-off."""
    record = turn.record(worker)
    if record.ending is not None:
        return
    turn.mark(worker, standing=Standing.DEAD, ending=Ending.FAILED, why=why, fault=_signature(fault, step))
    turn.note(EventKind.FAILED, f"worker {worker} failed: {why}", worker)
    turn.expect_end(worker)
    turn.drop("spawned_at", worker)
    if fault is not None and fault.exception == FRESH_PROCESS:
        return  # a fresh one does what it could not: nothing has failed
    if turn.world is not None and not record.launched and not claims.counts_for_all(turn, worker):
        return  # ● it fails for itself alone: nobody starts another one in its place, and the others train on
    if _is_new(turn, record):
        _count(turn, _generation(turn, worker), step, script=1)
    elif turn.durable.failures.by_death:  # the end of its stream came before its reason
        _count(turn, _generation(turn, worker), step, script=1, deaths=-1)
    else:
        _raise_step(turn, step)
    at = f"worker {worker} {at_step(step)}: {why}"
    failures, common_fault = turn.durable.failures, _common_fault(turn, worker)
    turn.keep(failures=replace(failures, common_fault=common_fault or failures.common_fault))
    is_alike = _is_everyones(turn, common_fault) or _none_could_join(turn, worker)
    if is_alike and _is_a_bug(fault) and _is_before_any_step(turn, step) and not turn.durable.checkpoints:
        sentence = "the script failed in the same way in every worker before its first step, so it would fail again"
        ending.fail(turn, f"{sentence}; worker {worker}: {why}")
    elif common_fault and common_fault == failures.common_fault:
        ending.fail(turn, f"two generations failed in the same way in all their members, so a third would too; {at}")
    elif failures.script > turn.spec.max_restarts:
        ending.fail(turn, f"{_times(failures.script, failures)} (max_restarts is {turn.spec.max_restarts}); {at}")


def on_wrong_use(turn: Turn, worker: WorkerId, log_tail: str) -> bool:
    """What was given to a script cannot work. While nothing trains that fails the job at once; True: it has."""
    return _give_up_what_cannot_work(turn, worker, turn.record(worker).why or _last_words(log_tail))


def on_end_without_hello(turn: Turn, worker: WorkerId) -> bool:
    """Fail the job if a script ended well and never joined: it would not the next time either."""
    sentence = "its script ended without calling shoal.initialize, so it never joined the job"
    return _give_up_what_cannot_work(turn, worker, sentence)


def _give_up_what_cannot_work(turn: Turn, worker: WorkerId, sentence: str) -> bool:
    if turn.world is not None or turn.job.attempt is not None:
        return False
    record = turn.record(worker)
    where = f" (log: {record.log})" if record.log else ""
    turn.mark(worker, standing=Standing.DEAD, ending=Ending.FAILED, why=sentence)
    ending.fail(turn, f"worker {worker} cannot run as started: {sentence}{where}")
    return True


def on_death(turn: Turn, worker: WorkerId, code: int | None, why: str) -> None:
    """A worker died, and nobody wanted it to: a kill like any other, unless no step is ever committed in between."""
    record = turn.record(worker)
    if code in EXPLAINED or record.leaving or record.ending is not None or not _is_new(turn, record):
        return
    _count(turn, _generation(turn, worker), 0, deaths=1)
    _give_up_deaths(turn, max(1, turn.spec.max_restarts), f"worker {worker}: {why}")


def on_world_lost(turn: Turn) -> None:
    """The state of the current world is not whole with those who are left. Where nothing may fail, that is the end."""
    members = _members(turn, turn.world) if turn.world is not None else []
    dead = [record for record in members if record.standing is Standing.DEAD and not record.leaving]
    if dead and turn.durable.failures.deaths:
        _give_up_deaths(turn, turn.spec.max_restarts, f"worker {dead[-1].worker}: {dead[-1].why}")


def forgive(turn: Turn, status: Status) -> None:
    """● A step was committed above the one at which something failed: the fault did not stay."""
    committed_here = status.committed_in == status.generation > 0
    if turn.durable.failures.times and committed_here and status.step > turn.durable.failures.step:
        turn.keep(failures=Failures())


def fault_of(log_tail: str) -> Fault | None:
    """Return the fault that ended a script before its hello, from the last traceback in its log; None without one."""
    lines = _lines(log_tail)
    frames = [number for number, line in enumerate(lines) if line.startswith(FRAME)]
    raised = next((line for line in lines[frames[-1] :] if line[:1].strip()), "") if frames else ""
    if not raised:
        return None
    exception, _, message = raised.partition(":")
    return Fault(exception, message.strip(), lines[frames[-1]].strip())


def _last_words(log_tail: str) -> str:
    """What the worker says for people at its end, else its last line."""
    lines = _lines(log_tail.strip()) or [SILENT]
    begins = [number for number, line in enumerate(lines) if line.startswith(SENTENCE)]
    return "\n".join(lines[begins[-1] :]).removeprefix(SENTENCE) if begins else lines[-1]


def _lines(log_tail: str) -> list[str]:
    return [RANK.sub("", line) for line in log_tail.splitlines()]


# ---- counting


def _generation(turn: Turn, worker: WorkerId) -> int:
    """The world that a worker was in; 0: none."""
    process = turn.process(worker)
    return process.status.generation if process is not None else 0


def _is_new(turn: Turn, record: WorkerRecord) -> bool:
    """● Whether it belongs to a generation, or was started, after the last failure that was counted."""
    failures = turn.durable.failures
    return _generation(turn, record.worker) > failures.generation or record.join_order >= failures.join_order


def _count(turn: Turn, generation: int, step: int, script: int = 0, deaths: int = 0) -> None:
    before = turn.durable.failures
    failures = replace(
        before,
        script=before.script + script,
        deaths=before.deaths + deaths,
        by_death=deaths > 0,
        generation=max(before.generation, generation),
        join_order=turn.durable.next_join_order,
    )
    turn.keep(failures=failures)
    _raise_step(turn, step)
    pause = 0.0 if failures.times == 1 else min(2.0 ** (failures.times - 2), LONGEST_BACKOFF)
    turn.keep(spawn_after=max(turn.durable.spawn_after, turn.now + pause))


def _raise_step(turn: Turn, step: int) -> None:
    """What is known of a step that was reached comes late, so that only the highest one ever reported is the mark."""
    failures = turn.durable.failures
    turn.keep(failures=replace(failures, step=max(failures.step, step, known_step(turn))))


def _give_up_deaths(turn: Turn, restarts: int, who: str) -> None:
    failures, most = turn.durable.failures, DEATHS_PER_RESTART * restarts
    if failures.deaths > most:
        ending.fail(turn, f"{_times(failures.deaths, failures)} ({most} deaths by a signal are allowed); {who}")


def _times(count: int, failures: Failures) -> str:
    tries = "1 attempt has" if count == 1 else f"{count} attempts have"
    return f"{tries} failed without a committed step{f' beyond {failures.step}' if failures.step else ''}"


# ---- the same fault again


def _signature(fault: Fault | None, step: int) -> str:
    """What the same fault at the same step has in common; empty for an outage, which may pass."""
    if fault is None or fault.outage:
        return ""
    text = "\n".join((fault.exception, fault.message, fault.frame, str(step)))
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def _common_fault(turn: Turn, worker: WorkerId) -> str:
    """The one fault with which all members of this worker's world have failed; empty where they have not.

    One that fails before it has built the world of those who are left is a member all the same.
    """
    world, fault = turn.world, turn.record(worker).fault
    if world is None or worker not in world.workers:
        return ""
    return fault if all(record.fault == fault for record in _members(turn, world)) else ""


def _is_before_any_step(turn: Turn, step: int) -> bool:
    return step == 0 and not turn.durable.committed_in and not known_step(turn)


def _is_a_bug(fault: Fault | None) -> bool:
    return fault is not None and not fault.outage and fault.exception.rpartition(".")[2] in BUGS


def _is_everyones(turn: Turn, common_fault: str) -> bool:
    """Whether all members of the world have failed with that fault, and no worker waits to join it."""
    return bool(common_fault) and not any(one.serves and one.incarnation for one in turn.durable.roster.values())


def _none_could_join(turn: Turn, worker: WorkerId) -> bool:
    """Whether this worker and all workers that were started before the first failure have ended with the same fault
    before their hello, and no other worker has joined. A worker that still waits to start proves nothing.
    """
    if turn.world is not None or turn.job.attempt is not None:
        return False
    fault, before = turn.record(worker).fault, turn.durable.failures.join_order
    judged = (
        one
        for one in turn.durable.roster.values()
        if (one.serves or one.ending is Ending.FAILED if one.incarnation else one.join_order < before)
    )
    return bool(fault) and not any(one.serves or one.fault != fault for one in judged)


def _members(turn: Turn, world: Plan) -> list[WorkerRecord]:
    return [turn.record(member.worker) for member in world.members]
