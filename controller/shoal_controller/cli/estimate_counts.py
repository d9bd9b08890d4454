"""`shoal estimate --config FILE` without `--params`: how the lanes of a batch are spread over so many workers.

For a section `elasticity` the counts are those for which its batch is made; else those that divide the lanes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from shoal_protos.elastic_batch import ElasticLanes, batch_and_lanes
from shoal_protos.elastic_section import Elasticity, counted_in_cells
from shoal_protos.errors import UserError
from shoal_protos.shape import ONE, Shape
from shoal_protos.text import plural
from shoal_protos.validation import all_of, sentence

from shoal_controller.cli.options import Form
from shoal_controller.core.overview.idle_lanes import idle_ratio, idle_sentence

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class LaneSpread:
    """A batch, and the numbers of workers that are shown."""

    lanes: ElasticLanes
    counts: tuple[int, ...]
    """Of workers, or of cells where they have several processes."""
    notes: tuple[str, ...] = ()
    cell: Shape = ONE


def elastic_spread(
    given: Mapping[str, Any], stage: int | None, workers: int | None, cell: Shape = ONE
) -> LaneSpread | None:
    """Of a config whose section `elasticity` is on; None: it has none. `workers`: with how many the job is submitted.

    Raises `UserError`.
    """
    section = given.get("elasticity")
    if not isinstance(section, Mapping) or section.get("enabled") in (None, False, "auto"):
        return None
    try:
        asked = Elasticity.model_validate({key: one for key, one in section.items() if key in Elasticity.model_fields})
    except ValidationError as error:
        faults = [sentence(fault, "the config", Elasticity, "elasticity") for fault in error.errors()]
        raise UserError(f"{all_of(faults, 'the config')}.") from None
    asked = counted_in_cells(asked, cell)
    found, lanes = batch_and_lanes(asked, stage or 0, None if workers is None else max(1, workers // cell.processes))
    least, most = (cell.processes * count for count in (asked.min_gpus, min(asked.max_gpus, lanes.lanes)))
    notes = [f"A job has from {least} to {most} workers, unless it is given other bounds."]
    if asked.version == "0.2":
        notes.append(f"Version 0.2: made for a job submitted with {plural(workers or 1, 'worker')} (--workers).")
    return LaneSpread(lanes, found.counts, tuple(notes))


def spread_of(lanes: int, micro_batch: int | None, micro_batches_per_lane: int) -> LaneSpread:
    """Of a config that says how many lanes there are: every number of workers among which they divide."""
    even = tuple(count for count in range(1, lanes + 1) if lanes % count == 0)
    return LaneSpread(ElasticLanes(lanes, micro_batch or 0, micro_batches_per_lane), even)


def show_counts(spread: LaneSpread, workers: int | None, form: Form) -> None:
    """Print a row for each count, and for `workers`."""
    from shoal_controller.cli.tables import listed

    counts = sorted({*spread.counts, *([workers // spread.cell.processes] if workers is not None else [])})
    rows = [_row(count, spread) for count in counts if count <= spread.lanes.lanes]
    listed("counts", rows, lambda shown: _table(shown, spread, workers), form)


def _row(count: int, spread: LaneSpread) -> dict[str, Any]:
    """`lanes`, `micro_batches`: of the busiest worker in one step."""
    lanes, workers = spread.lanes, count * spread.cell.processes
    most = math.ceil(lanes.lanes / count)
    micro_batches = most * lanes.micro_batches_per_lane
    idle = idle_ratio(lanes.lanes, count)
    return {
        "workers": workers, "lanes": most, "micro_batches": micro_batches, "uneven": lanes.uneven(count),
        "idle_lane_ratio": idle,
    }  # fmt: skip


def _table(rows: Sequence[dict[str, Any]], spread: LaneSpread, workers: int | None) -> RenderableType:
    from rich.console import Group

    from shoal_controller.cli.tables import table_of

    columns = ("workers", "lanes each", "micro-batches a step", "uneven by")
    table = table_of(*columns, numbers=columns)
    for row in rows:
        uneven = f"{row['uneven']:.1%}" if row["uneven"] else "–"
        table.add_row(str(row["workers"]), str(row["lanes"]), str(row["micro_batches"]), uneven)
    idle = _idle(spread, workers)
    uneven_note = "Other numbers up to that of the lanes train too: some workers then wait for the busiest."
    if spread.cell.processes > 1:
        of_a_cell = f"A cell of {spread.cell.processes} workers trains each lane."
        return Group(_heading(spread), table, *spread.notes, of_a_cell, *idle)
    return Group(_heading(spread), table, *spread.notes, uneven_note, *idle)


def _idle(spread: LaneSpread, workers: int | None) -> list[str]:
    """What idles with so many workers: in a sentence, where that is worth one."""
    cells = None if workers is None else workers // spread.cell.processes
    unit = "worker" if spread.cell.processes == 1 else "cell"
    return [one] if cells and (one := idle_sentence(spread.lanes.lanes, cells, cells, unit)) else []


def _heading(spread: LaneSpread) -> str:
    lanes, places = spread.lanes, spread.cell.expert
    each = lanes.micro_batches_per_lane
    parts = [plural(lanes.lanes, "lane"), f"{each} micro-batch{'es' if each > 1 else ''}"]
    parts += [f"{places} places of experts"] if places > 1 else []
    if not lanes.micro_batch:
        return f"A step of {' × '.join(parts)}"
    batch = lanes.lanes * each * places * lanes.micro_batch
    return f"Batch {batch} = {' × '.join([*parts, plural(lanes.micro_batch, 'sample')])}"
