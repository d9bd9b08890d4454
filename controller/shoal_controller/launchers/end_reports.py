"""Ends of local processes on their way to the jobs: each is reported until its job has heard of it.

Until then a process's record on disk says how it ended: the next controller's job may be the one that hears. Used by
`local.py` alone, which sees the ends.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from functools import partial

import structlog
from shoal_protos.errors import ShoalError, StoreError
from shoal_protos.plan import WorkerId

from shoal_controller.core.machine.events import Exited
from shoal_controller.launchers.process_records import ProcessRecord, ProcessRecords
from shoal_controller.process.tasks import NamedLocks, end_task, guarded, only_logged

REPORT_SECONDS = 5.0
"""How long the jobs may take to hear of an end when the launcher closes. What they do not hear stays on its record."""

AGAIN_SECONDS = 2.0
"""After so long a job is told again what it could not hear."""

log = structlog.get_logger("shoal.launcher")

Submit = Callable[[str, str, Exited], Awaitable[None]]
"""To a run of a job."""
Name = tuple[str, WorkerId]
"""Job and worker."""


class EndReports:
    """Of one launcher. All calls come from one event loop."""

    def __init__(self, submit: Submit, on_disk: NamedLocks, lives: Callable[[Name], bool]) -> None:
        """`on_disk`: by job, held by whoever reads or writes there. `lives`: whether a worker's process is watched."""
        self._submit, self._on_disk, self._lives = submit, on_disk, lives
        self._unheard: dict[Name, ProcessRecord] = {}
        """Ends that their job has not heard of, as far as is known."""
        self._reports: set[asyncio.Task[None]] = set()
        self._releasing = asyncio.Event()
        """Set while no job is told again."""

    def __contains__(self, name: Name) -> bool:
        """Whether an end of this worker is being reported."""
        return name in self._unheard

    def workers_of(self, job: str) -> set[WorkerId]:
        """Those whose ends are being reported."""
        return {worker for of, worker in self._unheard if of == job}

    def add(self, job: str, records: ProcessRecords, ended: ProcessRecord) -> None:
        """Report this end, to the run that its process was started for."""
        self._unheard[job, ended.worker] = ended
        report = guarded(f"end of {ended.worker} of {job}", self._report(job, records, ended), only_logged)
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)

    def forget(self, job: str, spared: str | None) -> None:
        """Report no more ends of this job, but of the run that is spared."""
        unheard = self._unheard.items()
        self._unheard = {name: one for name, one in unheard if name[0] != job or one.run == spared}

    async def release(self) -> None:
        """Let go of everything: whoever leads next reports what lies on disk."""
        self._releasing.set()
        if self._reports:
            await asyncio.wait(self._reports, timeout=REPORT_SECONDS)
        await asyncio.gather(*map(end_task, self._reports))
        self._unheard.clear()
        self._releasing.clear()

    # ---- inside

    async def _report(self, job: str, records: ProcessRecords, ended: ProcessRecord) -> None:
        name = (job, ended.worker)
        try:
            await self._on_its_record(name, ended, partial(_write, records, ended))
        except OSError as error:
            log.warning("a worker's record cannot be written", job=job, worker=ended.worker, error=str(error))
        exited, is_first = await asyncio.to_thread(_exited, records, ended), True
        while self._is_unheard(name, ended) and not await self._has_heard(job, ended.run, exited, is_first):
            if await self._is_released_within(AGAIN_SECONDS):
                return
            is_first = False
        await self._on_its_record(name, ended, partial(records.remove, ended.worker))
        if self._is_unheard(name, ended):
            del self._unheard[name]

    async def _has_heard(self, job: str, run: str, exited: Exited, is_first: bool) -> bool:
        """Tell the job; whether it need not be told again."""
        try:
            await self._submit(job, run, exited)
        except StoreError as error:
            if is_first:  # no fault where a controller stops, and a store that fails says so itself
                log.info("the end of a worker is not reported yet", job=job, worker=exited.worker, error=str(error))
            return False
        except ShoalError as error:
            log.info("a worker ended that its job does not know", job=job, worker=exited.worker, error=str(error))
        return True

    async def _is_released_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._releasing.wait()
        except TimeoutError:
            return False

    def _is_unheard(self, name: Name, ended: ProcessRecord) -> bool:
        """Whether this end is still to be reported: a later run's worker may have had the name, and ended, since."""
        return self._unheard.get(name) is ended

    async def _on_its_record(self, name: Name, ended: ProcessRecord, work: Callable[[], None]) -> None:
        """Unless a new run of the job has a worker of that name by now, whose record it is."""
        async with self._on_disk.of(name[0]):
            if self._is_unheard(name, ended) and not self._lives(name):
                await asyncio.to_thread(work)


def _write(records: ProcessRecords, ended: ProcessRecord) -> None:
    records.write(ended)
    records.note_end(ended)


def _exited(records: ProcessRecords, ended: ProcessRecord) -> Exited:
    return Exited(ended.worker, ended.code, _why(ended), records.tail(ended))


def _why(record: ProcessRecord) -> str:
    who = f"its process {record.pid}"
    if record.code is None:
        return f"{who} ended while no controller watched it, or as an earlier one's; its exit status is not known"
    if record.code < 0:
        names = {known.value: known.name for known in signal.Signals}
        return f"{who} was killed by {names.get(-record.code, f'signal {-record.code}')}"
    return f"{who} ended with status {record.code}"
