"""What a request to scale makes of a job's size, or why the job cannot have that. Pure.

Used by the machine, and before a size is written into the resource that a job was made from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal_protos.acts import Scale
from shoal_protos.error_codes import ErrorCode
from shoal_protos.errors import UserError
from shoal_protos.shape import ONE, Shape
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
    """None: not known yet."""
    cell: Shape = ONE
    in_a_pod: int = 1
    """So many are started together."""
    spares: int = 0
    """Beyond `wanted`."""
    mirrors: int | None = None
    """None: not known yet."""

    @property
    def useful(self) -> int | None:
        """So many workers can train at once."""
        return self.cell.most_members(self.lanes) if self.lanes is not None else None

    @property
    def top(self) -> int | None:
        """Most workers that it can use."""
        return min((number for number in (self.bounds.most, self.useful) if number is not None), default=None)


def broken_bounds(bounds: WorkerBounds, processes: int, whole: str = "cell") -> str:
    """Which bound a job whose cells (or pods: `whole`) have so many processes cannot have; empty: it can have both."""
    named = (("at least", bounds.least), ("up to", bounds.most))
    wrong = (f"{which} {plural(most, 'worker')}" for which, most in named if most is not None and most % processes)
    first = next(wrong, "")
    return f"{first}: a {whole} of it has {plural(processes, 'worker')}; expected a multiple of that" if first else ""


def broken_spares(size: JobSize) -> str:
    """Return why a job cannot have its spares, in a sentence; empty: it can."""
    if not size.spares:
        return ""
    asked = f"job {size.job} cannot have {plural(size.spares, 'spare')}"
    if size.cell != ONE or size.in_a_pod > 1:
        return f"{asked}: spares are for jobs whose workers train, and start, by themselves; ask for more workers."
    if size.mirrors == 0:
        more = plural(size.wanted + size.spares, "worker")
        return f"{asked}: its config has mirrors 0, so they would hold nothing; ask for {more}, or set shoal.mirrors."
    if size.top is not None and size.wanted + size.spares > size.top:
        most = max(0, size.top - size.wanted)
        return (
            f"{asked} beside {plural(size.wanted, 'worker')}: a spare trains when another worker is lost, and at most "
            f"{plural(size.top, 'worker')} can; expected at most {plural(most, 'spare')}."
        )
    return ""


def resized(size: JobSize, asked: Scale) -> JobSize:
    """The size that is asked for. Raises `ImpossibleSize` where the job cannot have it."""
    least = size.bounds.least if asked.least is None else asked.least
    most = size.bounds.most if asked.most is None else asked.most or None
    wanted = size.wanted if asked.workers is None else asked.workers
    spares = size.spares if asked.spares is None else asked.spares
    found = replace(size, wanted=wanted, spares=spares, bounds=WorkerBounds(least, most))
    of_pods = broken_bounds(WorkerBounds(asked.least or 0, asked.most), size.in_a_pod, "pod")
    if why := broken_bounds(found.bounds, size.cell.processes) or of_pods:
        raise ImpossibleSize(f"job {size.job} cannot have {why}.")
    if size.useful is not None and most is not None and most > size.useful and most != size.bounds.most:
        whose = "worker" if size.cell == ONE else f"cell of {plural(size.cell.processes, 'worker')}"
        raise ImpossibleSize(
            f"job {size.job} cannot have up to {plural(most, 'worker')}: it has {plural(size.lanes or 0, 'lane')}, and "
            f"every {whose} trains at least one."
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
    if spares < 0:
        raise ImpossibleSize(f"job {size.job} cannot have {spares} spares; expected 0 or more.")
    if why := broken_spares(found):
        raise ImpossibleSize(why)
    return found
