"""What the shell is given: what decides, and what its effects reach.

`server.py` hands the outside to `Shell.connect`; tests bring small ones. Whatever happens there comes back by
`Shell.submit`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal_protos.acts import Scale

from shoal_controller.core.machine.effects import Effect
from shoal_controller.core.machine.events import Event
from shoal_controller.core.machine.job import Job
from shoal_controller.core.machine.spec import JobSpec, JobView
from shoal_controller.core.planning.question import Answer, Question
from shoal_controller.jobs.probes import ProbeResult, probe
from shoal_controller.jobs.streams import Streams
from shoal_controller.launchers.kubernetes.job_defaults import JobDefaults
from shoal_controller.launchers.launcher import Launcher
from shoal_controller.observe.curves import Points

Step = Callable[[Job, Sequence[Event], float], tuple[Job, Sequence[Effect]]]
"""What a batch of events makes of a job at a time (`machine.step`). A `UserError` refuses an operator's request, and
nothing has changed.
"""
View = Callable[[Job, float], JobView]
"""What people see of a job at a time (`machine.view`)."""


Begun = Callable[[], object]
"""Called when a question's turn has come, before it is answered."""
Planner = Callable[[Question, Begun], Awaitable[Answer]]
"""Answers a question as `planning.question.answer` does, perhaps in another process; raises where it cannot."""


Record = Callable[[Points, float], None]
"""Hears of every look at all jobs (`observe/curves.py`)."""


class SizeWriter(Protocol):
    """Writes the size of a job that was made from a resource of a cluster: into the resource, which has it."""

    async def write_size(self, view: JobView, asked: Scale) -> None:
        """Have this job's resource ask for this size. Raises `ShoalError` where it does not take that."""


@dataclass(frozen=True, slots=True)
class Outside:
    """All that the shell's effects reach."""

    streams: Streams
    launchers: Mapping[str, Launcher]
    """Launchers by the spec's `launcher`; `none` has none."""
    planner: Planner
    """What answers the machine's questions."""
    probe: Callable[[str, str, bool], Awaitable[ProbeResult]] = probe
    """What a connection to an address meets where a process of that incarnation should be; whether it is watched."""
    prepared: Callable[[JobSpec], JobSpec] = JobDefaults().filled
    """A new job with what this controller sets for all. Raises `UserError` for one that lacks something."""
    controllers: Callable[[], tuple[str, ...]] = tuple
    """Where workers reach the controllers of this store, the one that leads first."""
    record: Record = lambda _points, _now: None
