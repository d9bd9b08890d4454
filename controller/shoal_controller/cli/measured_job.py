"""What a job's own figures say of it (`shoal what-if --measured`): its size, seconds of a step and a start."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from shoal_protos.errors import UserError

if TYPE_CHECKING:
    from shoal_protos.rest import Json


async def measured_figures(url: str, job: str) -> dict[str, Any]:
    """Return `workers`, `lanes`, `step_seconds`, `overhead_seconds`, and `start_seconds` where a start was seen.

    Raises `UserError` where nothing is measured of the job yet.
    """
    from shoal_controller.cli.runs import client_of

    async with client_of(url, job) as client:
        shown, report = await client.job(job), await client.report(job)
        members = await client.workers(job)
    return figures_of(shown, report, members)


def figures_of(job: Json, report: Json, members: list[Json]) -> dict[str, Any]:
    """The same from what REST answers."""
    step, lanes = report["step_seconds_median"], job["lanes"]
    timed = [member["lane_seconds"] for member in members if member.get("lane_seconds")]
    if not step or not lanes or not timed:
        missing = "no step" if not step or not lanes else "no lane of a living worker"
        raise UserError(
            f"job {job['job']} has no figures to go by: {missing} has been timed; wait for some steps, or give "
            "--workers and --step-seconds."
        )
    wanted = job["workers"]["wanted"]
    training = sum(bool(member["lanes"]) for member in members) or wanted
    lane = median(timed)
    overhead = max(0.0, step - lane * -(-lanes // training))
    starts = report["worker_seconds"].get("starting", 0.0)
    began = sum(member["step"] >= 0 for member in members)
    known = {
        "workers": wanted, "lanes": lanes, "overhead_seconds": overhead,
        "step_seconds": overhead + lane * lanes / wanted,
    }  # fmt: skip
    return known | ({"start_seconds": starts / began} if starts and began else {})
