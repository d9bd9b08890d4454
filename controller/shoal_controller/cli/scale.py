"""`shoal scale`: how many workers and spares a job wants. Called by main.py; the controller says what may be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from shoal_protos.errors import UserError

from shoal_controller.cli.jobs import change
from shoal_controller.cli.options import DEFAULT_URL, Job, Url

if TYPE_CHECKING:
    from shoal_protos.rest import Json

    from shoal_controller.cli.client import Client


async def scale(
    job: Job,
    workers: Annotated[
        int | None, typer.Argument(metavar="N", help="New number of workers.", show_default=False)
    ] = None,
    cells: Annotated[
        int | None, typer.Option("--cells", metavar="N", help="New number of workers, in cells of several.")
    ] = None,
    least: Annotated[
        int | None, typer.Option("--min-workers", metavar="N", help="New fewest workers to train with.")
    ] = None,
    most: Annotated[
        int | None, typer.Option("--max-workers", metavar="N", help="New most workers to scale to.")
    ] = None,
    spares: Annotated[
        int | None, typer.Option("--spares", metavar="N", help="New number of spares beyond the workers.")
    ] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Change how many workers and spares are wanted, and between which numbers the workers may be.

    A launcher starts missing workers; if there are too many, the youngest are drained. Spares mirror state, and train
    as soon as another worker is lost.
    """
    if workers is cells is least is most is spares is None:
        raise UserError("there is nothing to change; expected N, --cells, --spares, --min-workers or --max-workers")
    if workers is not None and cells is not None:
        raise UserError(f"{workers} workers and {cells} cells are asked for; expected one of the two")

    async def ask(client: Client) -> Json:
        wanted = workers if cells is None else cells * _processes_of_a_cell(await client.job(job))
        return await client.scale_job(job, wanted, min=least, max=most, spares=spares)

    await change(url, job, ask)


def _processes_of_a_cell(job: Json) -> int:
    if "cell" not in job:
        raise UserError(
            f"job {job['job']} has no cells of several workers, as far as is known by now; expected a number of workers"
        )
    return int(job["cell"]["processes"])
