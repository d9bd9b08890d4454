"""What REST may do to a job that was made from a resource of a cluster, whose size and end the resource has.

Called by `routes.py` for all jobs; those that were submitted over REST are the shell's alone.
"""

from __future__ import annotations

from shoal_protos.acts import Cancel, OperatorRequest, Scale
from shoal_protos.error_codes import ErrorCode
from shoal_protos.errors import Conflict, NotFound

from shoal_controller.access.callers import Caller
from shoal_controller.core.machine.job_size import JobSize, resized
from shoal_controller.core.machine.spec import JobSpec, JobView, WorkerBounds
from shoal_controller.jobs.only_if import OnlyIf, version_of
from shoal_controller.jobs.shell import Shell
from shoal_controller.launchers.kubernetes.resource_kind import FULL_NAME
from shoal_controller.leadership.controller_state import ControllerState


async def carry_out(
    controller: ControllerState, job: str, asked: OperatorRequest, by: Caller, only_if: OnlyIf | None
) -> JobView:
    """Do what an operator asks of a job: of its resource first, where that has the say."""
    if isinstance(asked, Scale):
        return await scale(controller, job, asked, by, only_if)
    shell = controller.leading()
    if isinstance(asked, Cancel):
        return await delete(shell, job, by, only_if)
    await shell.submit(job, asked, by, only_if)
    return shell.view(job)


async def create(shell: Shell, spec: JobSpec, by: Caller) -> JobView:
    """A new run. ● A resource's job is made anew by its resource only."""
    if _is_owned(shell, spec.job) and shell.view(spec.job).phase.is_over:
        raise Conflict(f"{_belongs(spec.job)}, and give the new job this name then, or another one now").coded(
            ErrorCode.JOB_OF_A_RESOURCE
        )
    return await shell.create(spec, by)


async def delete(shell: Shell, job: str, by: Caller, only_if: OnlyIf | None) -> JobView:
    """Stop a job; forget one that is over, unless a resource still shows it."""
    if _is_owned(shell, job) and shell.view(job).phase.is_over:
        raise Conflict(f"{_belongs(job)}, and the job is forgotten with it").coded(ErrorCode.JOB_OF_A_RESOURCE)
    return await shell.delete(job, by, only_if)


async def scale(controller: ControllerState, job: str, asked: Scale, by: Caller, only_if: OnlyIf | None) -> JobView:
    """● One writer of the size: a job's resource is asked first, and the job becomes what the resource is."""
    shell = controller.leading()
    view = shell.view(job)
    spec = shell.spec(job)
    if spec.resource and not view.phase.is_over:
        bounds = WorkerBounds(view.min_workers, view.max_workers)
        size = JobSize(job, view.wanted, bounds, view.lanes, view.cell, spec.started_together, view.spares)
        resized(size, asked)
        if controller.sizes is None:
            raise Conflict(
                f"job {job} has its size from the resource {FULL_NAME}/{job}, which this controller cannot write: it "
                "has no launcher kubernetes"
            ).coded(ErrorCode.JOB_OF_A_RESOURCE)
        if only_if is not None:
            only_if.check(job, version_of(view))
        await controller.sizes.write_size(view, asked)
        only_if = None  # the resource has the size now, and the job may follow it already
    await shell.submit(job, asked, by, only_if)
    return shell.view(job)


def _is_owned(shell: Shell, job: str) -> bool:
    try:
        return bool(shell.spec(job).resource)
    except NotFound:
        return False


def _belongs(job: str) -> str:
    return f"job {job} belongs to the resource {FULL_NAME}/{job}; delete that (kubectl delete {FULL_NAME} {job})"
