"""What a request to scale makes of a job's size, or why the job cannot have that. Pure.

Used by the machine, and before a size is written into the resource that a job was made from.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal_protos.acts import Scale
from shoal_protos.error_codes import ErrorCode
from shoal_protos.errors import UserError
from shoal_protos.text import plural

from shoal_controller.core.machine.spec import WorkerBounds


class ImpossibleSize(UserError):
    """A job cannot have so many workers."""

    problem_code = ErrorCode.SIZE_IMPOSSIBLE


@dataclass(frozen=True, slots=True)
class JobSize:
    """How many workers a job wants, and may have."""

    job: str
    wanted: int
    bounds: WorkerBounds
    lanes: int | None
    """None while nobody has said how many."""

    @property
    def top(self) -> int | None:
        """Most workers that it can use."""
        return min((number for number in (self.bounds.most, self.lanes) if number is not None), default=None)


def resized(size: JobSize, asked: Scale) -> JobSize:
    """The size that is asked for. Raises `ImpossibleSize` where the job cannot have it."""
    least = size.bounds.least if asked.least is None else asked.least
    most = size.bounds.most if asked.most is None else asked.most or None
    wanted = size.wanted if asked.workers is None else asked.workers
    found = JobSize(size.job, wanted, WorkerBounds(least, most), size.lanes)
    if size.lanes is not None and most is not None and most > size.lanes and most != size.bounds.most:
        raise ImpossibleSize(
            f"job {size.job} cannot have up to {plural(most, 'worker')}: it has {plural(size.lanes, 'lane')}, and "
            "every worker trains at least one."
        )
    if least < 1 or (found.top is not None and least > found.top):
        expected = f"1 to {found.top}" if found.top is not None else "1 or more"
        raise ImpossibleSize(f"job {size.job} cannot have at least {plural(least, 'worker')}; expected {expected}.")
    if wanted < least or (found.top is not None and wanted > found.top):
        bounds = f"from {least} to {found.top}" if found.top is not None else f"at least {least}"
        if asked.workers is None:
            raise ImpossibleSize(
                f"job {size.job} wants {plural(wanted, 'worker')}, not {bounds}; scale it in the same request."
            )
        raise ImpossibleSize(f"job {size.job} cannot be scaled to {plural(wanted, 'worker')}; expected {bounds}.")
    return found
