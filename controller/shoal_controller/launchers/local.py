"""The local launcher: workers as processes of this machine.

Each runs in a session of its own and writes to `FOLDER/jobs/JOB/WORKER.log`, never to a pipe, so that it outlives the
controller; the next controller adopts it. The shell calls `spawn`, `kill` and `adopt`; ends are reported by `submit` as
soon as the kernel reports them. A worker gets one of the CUDA devices that the fewest workers have (`device_variable`).

Once a job's first world has begun, its later workers are forked from a warm process of the job, where there is one and
it is fit; else they are started, which makes no difference but two seconds. docs/controller.md, "Warm starts".
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
from shoal_protos.channel import GRPC_VARIABLES
from shoal_protos.errors import UserError
from shoal_protos.plan import Plan, WorkerId

from shoal_controller.core.machine.durable import Place
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.launchers.end_reports import EndReports, Name, Submit
from shoal_controller.launchers.launcher import JoinTokens
from shoal_controller.launchers.ownership import Claim
from shoal_controller.launchers.process import Process, WarmProcesses, can_be_warm, reap_orphans
from shoal_controller.launchers.process_records import ProcessRecord, ProcessRecords, boot_id
from shoal_controller.process.devices import VISIBLE_DEVICES
from shoal_controller.process.private_files import make_private_folder
from shoal_controller.process.tasks import NamedLocks, end_task, guarded, only_logged

DEATH_SECONDS = 5.0
"""How long the kernel may take to end a process that was killed."""

LOOK_SECONDS = 0.02
"""How often it is looked whether the last process of a job has ended."""
TIDY_SECONDS = 10.0
"""How often the logs' sizes are looked at, and what was left to process 1."""

CLEAR_SECONDS = 30.0
"""How long a new run of a job waits for the killed processes of the one before."""

log = structlog.get_logger("shoal.launcher")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """What every worker of this controller gets in its environment."""

    controllers: Callable[[], Sequence[str]]
    """`HOST:PORT` of the gRPC sides of all controllers, as a worker reaches them; this one's own first."""
    tokens: JoinTokens | None = None
    """What makes the join tokens; None: workers need none."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The controller's own, which workers inherit."""
    devices: Sequence[str] = ()
    """CUDA devices of this machine that workers can use: each gets one, unless its job says which."""
    warm_start: bool = False
    """Whether a job's later workers are forked from a warm process."""

    def of(self, worker: WorkerId, spec: JobSpec, taken: Sequence[str] = ()) -> dict[str, str]:
        """The environment of one worker. The spec's goes before the controller's, who it is before both.

        `taken`: of each worker that lives, the device that it was given.
        """
        constant, own = self.parts(worker, spec, taken)
        return constant | own

    def parts(
        self, worker: WorkerId, spec: JobSpec, taken: Sequence[str] = ()
    ) -> tuple[dict[str, str], dict[str, str]]:
        """The same: what all workers of the job have, in one order, and what is this one's."""
        defaults = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **GRPC_VARIABLES}
        identity = {
            "SHOAL_CONTROLLER": ",".join(self.controllers()), "SHOAL_JOB": spec.job, "SHOAL_RUN": spec.run,
            "SHOAL_WORKER_ID": worker, "SHOAL_LAUNCHER": "local", "SHOAL_WANTED_WORKERS": str(spec.wanted),
        }  # fmt: skip
        token = {} if self.tokens is None else {"SHOAL_TOKEN": self.tokens.join(spec.job, spec.run)}
        device = device_variable(self.devices, taken)
        constant = {**defaults, **self.environment, **spec.env}
        own = {**({} if VISIBLE_DEVICES in spec.env else device), **identity, **token}
        return {name: constant[name] for name in sorted(constant.keys() - own.keys())}, own


class LocalLauncher:
    """A `Launcher`. Starts and watches processes on this machine. All calls come from one event loop."""

    def __init__(
        self, folder: Path, environment: WorkerEnvironment, submit: Submit, claim: Claim | None = None,
        logs: Path | None = None,
    ) -> None:  # fmt: skip
        """`claim`: whose the workers are that records in `folder` name; None: this controller's. `logs`: where jobs
        have folders for their logs, which stay when a job is forgotten; None: within `folder`.
        """
        self._folder, self._logs = folder, logs
        self.claim = claim or Claim()
        self._environment = environment
        self._watched: dict[Name, tuple[Process, ProcessRecord]] = {}
        self._adopted: set[str] = set()
        self._starting: list[tuple[str, str]] = []
        """Of each process that is being started: its job, and the device that it is given."""
        self._on_disk = NamedLocks()
        """By job: what lies on disk is written and read in threads, by one at a time."""
        self._reports = EndReports(submit, self._on_disk, self._watched.__contains__)
        self._ending: set[int] = set()
        """Processes of an earlier run that were killed and have not ended yet."""
        self._given_up: set[str] = set()
        self.warm = WarmProcesses()
        self._tidying: asyncio.Task[None] | None = None
        self._boot = boot_id()

    # ---- what the shell asks

    async def spawn(self, worker: WorkerId, spec: JobSpec) -> Place:
        """Start a process for this worker; returns which. A `ShoalError` says why it could not be started."""
        if not spec.command:
            raise UserError(f"job {spec.job} has launcher local and no command; give it one to start workers with")
        if whose := self.claim.others.get((spec.job, spec.run)):
            raise UserError(f"job {spec.job} is not this store's to train: {whose}")
        if spec.job in self._given_up:
            await asyncio.get_running_loop().create_future()  # until this controller ends, which is about to
        taken = [process.variable(VISIBLE_DEVICES) for process, _ in self._watched.values()]
        environment = self._environment.of(worker, spec, [*taken, *(device for _, device in self._starting)])
        starting = (spec.job, environment.get(VISIBLE_DEVICES, ""))
        self._starting.append(starting)
        try:
            return await _to_its_end(self._spawn(worker, spec, environment))
        except (OSError, ValueError) as error:
            raise UserError(f"worker {worker} could not be started with {spec.command[0]!r}: {error}") from error
        finally:
            self._starting.remove(starting)

    async def kill(self, worker: WorkerId, spec: JobSpec) -> None:
        """End the worker's process and its group at once; one that is already gone is not an error."""
        if found := self._watched.get((spec.job, worker)):
            found[0].kill()

    async def end_all(self, job: str, seconds: float) -> None:
        """Return when no process of this job is left: those that have not ended by themselves in time are killed."""
        if not await self._none_left(job, seconds):
            why = f"its job is over, and it did not end by itself within {seconds:g} s"
            for worker, process in self._of(job):
                log.warning("a worker is killed", job=job, worker=worker, pid=process.pid, why=why)
            await self.kill_all(job)

    async def kill_all(self, job: str) -> None:
        """Kill every process of this job, one that is being started too; return when none is left."""
        deadline = time.monotonic() + DEATH_SECONDS
        while time.monotonic() < deadline:
            for _, process in self._of(job):
                process.kill()
            if await self._none_left(job, LOOK_SECONDS):
                break

    async def give_up(self, job: str) -> None:
        """The same for good: this controller, which is about to end, starts no process of this job any more."""
        self._given_up.add(job)
        self.warm.end(job)
        await self.kill_all(job)

    @property
    def jobs(self) -> set[str]:
        """Jobs with a process of this controller, also one that is being started."""
        return {job for job, _ in self._watched} | {job for job, _ in self._starting}

    def _of(self, job: str) -> list[tuple[WorkerId, Process]]:
        return [(worker, process) for (of, worker), (process, _) in self._watched.items() if of == job]

    async def _none_left(self, job: str, seconds: float) -> bool:
        """Whether the last process of a job ends within so many seconds."""
        deadline = time.monotonic() + seconds
        while left := bool(self._of(job)) or any(starting == job for starting, _ in self._starting):
            if time.monotonic() >= deadline:
                break
            await asyncio.sleep(LOOK_SECONDS)
        return not left

    async def adopt(self, workers: Sequence[WorkerId], spec: JobSpec) -> Mapping[WorkerId, Place | None]:
        """The processes that an earlier controller has started for this job and that live; None: one of `workers` that
        it has not started. What has ended is reported as every end is. Asked again in one controller's life, the job is
        a new run of that name: what the old run left is ended. So it is where an earlier controller began the new run.
        ● One that could not be answered (a disk that is full, say) is no new run when it is asked again.
        """
        records = self._records(spec.job)
        if spec.job in self._adopted:
            await self._clear(spec.job, records, spared=spec.run)
            return {}
        await self._end_other_runs(spec, records)
        async with self._on_disk.of(spec.job):
            others = await asyncio.to_thread(self.claim.not_ours, records)
            known = [one for one in await asyncio.to_thread(list, records) if one.worker not in others]
            recorded = {record.worker: self._found(spec.job, records, record) for record in known}
            unrecorded = {
                worker: await _to_its_end(self._unrecorded(spec.job, records, worker)) if worker not in others else None
                for worker in workers
                if worker not in recorded
            }
        self._adopted.add(spec.job)
        return {worker: place for worker, place in recorded.items() if place is not None} | unrecorded

    def world_began(self, _: Plan, spec: JobSpec) -> None:
        """A process has nothing to show it on. Those that come from now on are forked from a warm one, which competes
        with no start of the job's first workers.
        """
        if self._environment.warm_start and spec.job not in self._given_up and can_be_warm(spec.command):
            self.warm.keep(spec.job, spec.command, *self._environment.parts("", spec))

    async def forget(self, job: str) -> None:
        """End what is left of a job that is over, and delete its folder: logs and records."""
        records = self._records(job)
        await self._clear(job, records)
        async with self._on_disk.of(job):  # an end that is being reported writes there
            is_shared = bool(await asyncio.to_thread(self.claim.not_ours, records))
            if not is_shared and await asyncio.to_thread(records.folder.exists):
                await asyncio.to_thread(shutil.rmtree, records.folder)

    async def release(self) -> None:
        """Let go of everything; the workers live on, and whoever leads next adopts them: another controller, or this
        one again.
        """
        if self._tidying is not None:
            await end_task(self._tidying)
        self._tidying = None
        self.warm.end(*list(self.warm.of))
        self._adopted.clear()
        await self._reports.release()
        for name in list(self._watched):
            process, _ = self._forget(name)
            process.release()

    # ---- inside

    def _records(self, job: str) -> ProcessRecords:
        return ProcessRecords(self._folder / "jobs" / job, self._logs / job if self._logs is not None else None)

    async def _spawn(self, worker: WorkerId, spec: JobSpec, environment: Mapping[str, str]) -> Place:
        records = self._records(spec.job)
        async with self._on_disk.of(spec.job):
            if found := self._watched.get((spec.job, worker)):
                if found[1].run == spec.run:  # its store was restored from an older state, and gives its id again
                    return _place(records, found[1])
                await self._end_silently([(spec.job, worker)])  # an earlier run's, whose start hung until then
            process, record = await asyncio.to_thread(self._start, worker, spec, environment, records)
            self._watch(spec.job, process, record)
        return _place(records, record)

    def _start(
        self, worker: WorkerId, spec: JobSpec, environment: Mapping[str, str], records: ProcessRecords
    ) -> tuple[Process, ProcessRecord]:
        for folder in (records.folder, records.logs):
            make_private_folder(folder)
        if worker in self.claim.not_ours(records, writing_here=True):
            raise UserError(
                f"worker {worker} of job {spec.job} lives and writes to {records.log(worker)}, and another controller "
                "has started it; give this one another --data and --log-dir, or the job another name"
            )
        output = records.log(worker)
        offset = output.stat().st_size if output.exists() else 0
        forked = self.warm.fork(spec.job, spec.command, environment, output)
        process = forked or Process.start(spec.command, environment, output)
        record = ProcessRecord(
            worker, process.pid, process.started_at, self._boot, offset, False, None, spec.run, self.claim.owner
        )
        try:
            records.write(record)
        except OSError:
            process.kill()
            process.end()
            raise
        return process, record

    def _found(self, job: str, records: ProcessRecords, record: ProcessRecord) -> Place | None:
        """One process of an earlier life: watched from now on, or what is known of its end is reported."""
        if (job, record.worker) in self._watched:  # by an attempt that failed at another one, or it is a new one
            return _place(records, record)
        if (job, record.worker) in self._reports:  # since such an attempt
            return None
        alive = self._alive(record)
        if alive is None:
            self._reports.add(job, records, record.end(record.code))
            return None
        self._watch(job, alive, record)
        if self.claim.lost_port and _looks_only_at(alive, self.claim.lost_port):
            why = f"it looks for its controller at port {self.claim.lost_port}, where another program listens now"
            log.warning("a worker is killed", job=job, worker=record.worker, pid=alive.pid, why=why)
            alive.kill()
        return _place(records, record)

    async def _unrecorded(self, job: str, records: ProcessRecords, worker: WorkerId) -> Place | None:
        """A worker without a record: the controller died before it wrote one, or before there was a process at all."""
        process = await asyncio.to_thread(Process.writing_to, records.log(worker))
        if process is None:
            return None
        record = ProcessRecord(worker, process.pid, process.started_at, self._boot, 0, owner=self.claim.owner)
        try:
            await asyncio.to_thread(records.write, record)
        except OSError:
            process.release()
            raise
        self._watch(job, process, record)
        return _place(records, record)

    async def _clear(self, job: str, records: ProcessRecords, spared: str | None = None) -> None:
        """End what runs of this name have left, and report none of it. The others' work goes on meanwhile.

        `spared`: the run that has begun, and has workers already where its adoption failed for long.
        """
        async with self._on_disk.of(job):
            known = [(name, record.run) for name, (_, record) in self._watched.items() if name[0] == job]
            await self._end_silently([name for name, run in known if run != spared])
            self._reports.forget(job, spared)
            own = {worker for worker, _ in self._of(job)} | self._reports.workers_of(job)
            others = await asyncio.to_thread(self.claim.not_ours, records)
            await asyncio.to_thread(records.clear, own | others)

    async def _end_silently(self, names: Iterable[Name]) -> None:
        """Kill these, wait until they are gone, and report none of it."""
        ending = [self._forget(name)[0] for name in names]
        for process in ending:
            process.kill()
        self._ending |= {process.pid for process in ending}
        await asyncio.gather(*(_ended(process) for process in ending))
        self._ending -= {process.pid for process in ending}

    async def _end_other_runs(self, spec: JobSpec, records: ProcessRecords) -> None:
        """Their workers have the names of this run's, which are to be started."""
        others = await asyncio.to_thread(self.claim.not_ours, records)
        for record in await asyncio.to_thread(list, records):
            if record.worker in others:
                continue
            process = self._alive(record)
            run = record.run or (process.variable("SHOAL_RUN") if process is not None else "")
            if run in ("", spec.run):
                if process is not None:
                    process.release()
                continue
            if process is not None:
                log.warning("a worker of another run is killed", job=spec.job, worker=record.worker, pid=process.pid)
                process.kill()
                self._ending.add(process.pid)
                await _ended(process)
                self._ending.discard(process.pid)
            await asyncio.to_thread(records.remove, record.worker)

    def _alive(self, record: ProcessRecord) -> Process | None:
        if record.ended or record.boot != self._boot:
            return None
        return Process.find(record.pid, record.started_at)

    def _watch(self, job: str, process: Process, record: ProcessRecord) -> None:
        name = (job, record.worker)
        assert name not in self._watched, f"two processes for {name}: ids of workers are never used twice"
        self._watched[name] = (process, record)
        if self._tidying is None:
            self._tidying = guarded("tidying", self._tidy(), only_logged)
        asyncio.get_running_loop().add_reader(process.descriptor, partial(self._end, name))

    async def _tidy(self) -> None:
        """Keep the logs bounded, of workers that cannot know that anybody does, and the table of processes."""
        while True:
            await asyncio.sleep(TIDY_SECONDS)
            if not self._starting:
                reap_orphans({process.pid for process, _ in self._watched.values()} | self._ending | self.warm.pids)
            self.warm.end(*self.warm.of.keys() - self.jobs)
            await self._prune()
            for job, worker in list(self._watched):
                try:
                    if await asyncio.to_thread(self._records(job).rotate, worker):
                        log.info("a worker's log was rotated", job=job, worker=worker)
                except OSError as error:
                    log.warning("a worker's log cannot be rotated", job=job, worker=worker, error=str(error))

    async def _prune(self) -> None:
        """Keep the logs of workers that have ended bounded too, for the life of a job is long."""
        for job in {job for job, _ in self._watched}:
            async with self._on_disk.of(job):  # none of them starts meanwhile
                others = {worker for worker, _ in self._of(job)} | self._reports.workers_of(job)
                try:
                    await asyncio.to_thread(self._records(job).prune, others)
                except OSError as error:
                    log.warning("logs of workers that have ended cannot be removed", job=job, error=str(error))

    def _forget(self, name: Name) -> tuple[Process, ProcessRecord]:
        process, record = self._watched.pop(name)
        asyncio.get_running_loop().remove_reader(process.descriptor)
        return process, record

    def _end(self, name: Name) -> None:
        """The kernel says that a process has ended."""
        job, _ = name
        process, record = self._forget(name)
        self._reports.add(job, self._records(job), record.end(process.end()))


async def _to_its_end(work: Coroutine[Any, Any, Result]) -> Result:
    """What it returns. It is done also where whoever waits is to end, which happens then: of a process that was started
    nobody would know.
    """
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        task.exception()
        raise cancelled
    return task.result()


async def _ended(process: Process) -> None:
    """Returns when a process that was killed has ended. One that cannot (a driver, a network file system) is left."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process.descriptor, readable.set)
    try:
        async with asyncio.timeout(CLEAR_SECONDS):
            await readable.wait()
    except TimeoutError:
        log.error("a process does not end", pid=process.pid, seconds=CLEAR_SECONDS)
    finally:
        loop.remove_reader(process.descriptor)
    if readable.is_set():
        process.end()
    else:
        process.release()


def _looks_only_at(process: Process, port: int) -> bool:
    """Whether a worker can find no controller but one at this port."""
    addresses = process.variable("SHOAL_CONTROLLER").split(",")
    return all(address.endswith(f":{port}") for address in addresses)


def _place(records: ProcessRecords, record: ProcessRecord) -> Place:
    return Place.of_process(record.pid, str(records.log(record.worker)))


def device_variable(devices: Sequence[str], taken: Sequence[str]) -> dict[str, str]:
    """The variable by which a process sees its device alone; none where there are no devices.

    `taken`: of each worker that lives, the device that it was given. With more workers than devices some share one.
    """
    if not devices:
        return {}
    return {VISIBLE_DEVICES: min(devices, key=lambda device: (taken.count(device), devices.index(device)))}
