"""`shoal estimate`: bytes that a worker needs, by stage, with mirrors and without. It talks to no controller.

The arithmetic is `shoal_protos.memory_estimate`; what a training config says is read in estimate_config.py. How lanes
are spread over workers, which is the answer without `--params`, is in estimate_counts.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from shoal_protos.errors import UserError
from shoal_protos.memory_estimate import MOST, MOST_LANES, STAGES, CellShare, Location, MemoryEstimate, MemorySetup
from shoal_protos.memory_estimate import estimate as bytes_of_a_worker
from shoal_protos.shape import DIMENSIONS, MOST_PROCESSES, ONE, Shape, broken_shape
from shoal_protos.text import plural

from shoal_controller.cli.options import Form, Output
from shoal_controller.cli.output import echo

if TYPE_CHECKING:
    from rich.console import RenderableType

PRECISIONS = ("fp32", "bf16", "fp16")
OFFLOADS = ("none", "host", "file")
LAYERS = 32
"""The largest unit is taken to be this part of the model where nobody says how large it is."""

Unit = Annotated[
    str | None,
    typer.Option("--unit", metavar="N", help="Parameters of the largest unit, for stage 3. Default: a 32nd."),
]
LargestParameter = Annotated[
    str | None,
    typer.Option(
        "--largest-parameter",
        metavar="N",
        help="Elements of the largest parameter, as of an embedding. Default: no more than 8 MiB.",
    ),
]
Frozen = Annotated[
    str | None,
    typer.Option("--frozen", metavar="N", help="Parameters that need no gradient, as under adapters. Default: 0."),
]


def _places(help_text: str) -> Any:
    return typer.Option(metavar="N", help=f"{help_text} Default: the config's, or 1.")


Tensor = Annotated[int | None, _places("Processes of a cell that divide the layers.")]
Context = Annotated[int | None, _places("Processes of a cell that divide each sequence.")]
Pipeline = Annotated[int | None, _places("Processes of a cell that have a stage of the model each.")]
Expert = Annotated[int | None, _places("Processes of a cell that divide the experts.")]
Common = Annotated[
    str | None,
    typer.Option("--common", metavar="N", help="Parameters that --tensor does not divide, as of norms. Default: 0."),
]
OfExperts = Annotated[
    str | None,
    typer.Option("--of-experts", metavar="N", help="Parameters of experts, all of them. Needed with --expert."),
]
Spares = Annotated[
    int | None,
    typer.Option("--spares", metavar="N", help="Spares beyond the workers, which mirror for all. Default: 0."),
]


def estimate(
    params: Annotated[
        str | None, typer.Option("--params", metavar="N", help="Trained parameters, such as 7e9.")
    ] = None,
    workers: Annotated[int | None, typer.Option("--workers", metavar="W", help="Number of workers.")] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Training config; the flags below take precedence over it."),
    ] = None,
    stage: Annotated[int | None, typer.Option("--stage", help="ZeRO stage. Default: the config's, or all.")] = None,
    mirrors: Annotated[int | None, typer.Option("--mirrors", help="Mirrors of each block. Default: 1.")] = None,
    lanes: Annotated[int | None, typer.Option("--lanes", help="Lanes of the job. Default: one a worker.")] = None,
    micro_batches: Annotated[
        int | None, typer.Option("--micro-batches", help="Micro-batches of a lane. Default: the config's, or 1.")
    ] = None,
    precision: Annotated[str | None, typer.Option("--precision", help="fp32 (default), bf16 or fp16.")] = None,
    offload: Annotated[
        str | None,
        typer.Option("--offload", help="Place of optimizer state and master weights: none (default), host or file."),
    ] = None,
    state_bytes: Annotated[
        int | None,
        typer.Option("--state-bytes", help="Bytes of optimizer state of one parameter. Default: 8, as of AdamW."),
    ] = None,
    unit: Unit = None,
    largest_parameter: LargestParameter = None,
    frozen: Frozen = None,
    tensor: Tensor = None,
    context: Context = None,
    pipeline: Pipeline = None,
    expert: Expert = None,
    common: Common = None,
    of_experts: OfExperts = None,
    spares: Spares = None,
    output: Output = Form.TABLE,
) -> None:
    """Estimate a worker's memory, without activations; with --config alone: for how many workers its lanes are."""
    from shoal_protos.config_file import read_config

    from shoal_controller.cli.estimate_config import wanted_by

    given = read_config(config) if config is not None else {}
    if params is None and config is not None:
        _show_counts(given, config, workers, output)
        return
    if params is None or workers is None:
        raise UserError("shoal estimate needs --params and --workers; or --config alone, for the counts of workers.")
    wanted = wanted_by(given, state_bytes, workers)
    flags = {
        "stage": stage, "lanes": lanes, "micro_batches": micro_batches, "precision": precision, "offload": offload,
        "state_bytes": state_bytes, "spares": spares,
        "tensor": tensor, "context": context, "pipeline": pipeline, "expert": expert,
    }  # fmt: skip
    wanted |= {name: value for name, value in flags.items() if value is not None}
    shape = _shape({name: wanted.pop(name, 1) for name in DIMENSIONS})
    cells = _cells(workers, shape)
    _check(cells, mirrors, wanted, shape)
    given_sizes = {
        "--unit": unit, "--largest-parameter": largest_parameter, "--frozen": frozen, "--common": common,
        "--of-experts": of_experts,
    }  # fmt: skip
    sizes = {flag: _count(flag, text) for flag, text in given_sizes.items() if text is not None}
    setup = _setup(_count("--params", params), cells, sizes, shape) | wanted
    setup["mirrors"] = mirrors if mirrors is not None else min(wanted.get("mirrors", 1), cells - 1 + bool(spares))
    if spares:
        _check_spares(setup, "lanes" in wanted)
    stages = [setup.pop("stage")] if "stage" in wanted else list(STAGES)
    _show([bytes_of_a_worker(MemorySetup(stage=one, **setup)) for one in stages], output, workers % shape.processes)
    if config is not None:
        _say_what_training_refuses(given, config, workers)


def _shape(sizes: Mapping[str, Any]) -> Shape:
    """Of a cell of these sizes. Raises `UserError`."""
    for name, size in sizes.items():
        if not 1 <= size <= MOST_PROCESSES:
            raise UserError(f"--{name} is {size}; expected a whole number from 1 to {MOST_PROCESSES}.")
    shape = Shape(**sizes)
    if why := broken_shape(shape):
        raise UserError(f"a cell of {shape} cannot be: {why}.")
    return shape


def _flags(shape: Shape) -> str:
    """Of its dimensions, as they are written."""
    return " ".join(f"--{name} {size}" for name in DIMENSIONS if (size := getattr(shape, name)) > 1)


def _cells(workers: int, shape: Shape) -> int:
    """How many whole cells so many workers are. Raises `UserError`."""
    if workers < shape.processes > 1:
        raise UserError(
            f"--workers is {workers}; expected at least {shape.processes}, the processes of a cell ({_flags(shape)})."
        )
    return workers // shape.processes


def _check_spares(setup: dict[str, Any], lanes_are_known: bool) -> None:
    """Let each spare have a lane where nothing says how many there are. Raises `UserError`."""
    spares, workers, lanes, cell = setup["spares"], setup["workers"], setup["lanes"], setup["cell"]
    if cell:
        raise UserError(
            f"--spares is {spares}; expected 0 where a cell has {cell.shape.processes} processes "
            f"({_flags(cell.shape)}): there the workers that make no whole cell (--workers) are spares."
        )
    if not setup["mirrors"]:
        raise UserError(f"--spares is {spares}; expected 0 without mirrors (--mirrors 0), as they would hold nothing.")
    if not lanes_are_known:
        setup["lanes"] = workers + spares
    elif workers + spares > lanes:
        most = plural(max(0, lanes - workers), "spare")
        raise UserError(
            f"--spares is {spares} beside {plural(workers, 'worker')}, and at most {lanes} of them can train, a lane "
            f"each; expected at most {most}, or more --lanes."
        )


def _setup(whole: int, cells: int, sizes: Mapping[str, int], shape: Shape) -> dict[str, Any]:
    """What the flags and their defaults say of one process's part of the model and of the job, `sizes` by flag."""
    of_experts = sizes.get("--of-experts", 0)
    common = sizes.get("--common", 0) if shape.tensor > 1 else 0
    frozen = sizes.get("--frozen", 0)
    if shape.expert > 1 and not of_experts:
        raise UserError(
            f"--expert is {shape.expert}, and nothing says how many of the {whole} parameters are of experts; expected "
            "--of-experts N."
        )
    if of_experts > whole:
        raise UserError(
            f"--of-experts is {of_experts}; expected at most {whole}, the parameters of the model (--params)."
        )
    if common > whole - of_experts:
        others = "the parameters of the model (--params)"
        others += " but for those of experts (--of-experts)" if of_experts else ""
        raise UserError(f"--common is {common}; expected at most {whole - of_experts}, {others}.")
    if frozen and shape.pipeline > 1:
        raise UserError(
            f"--frozen is {frozen}; expected 0 with stages (--pipeline), where training refuses frozen ones."
        )
    stages, divided = shape.pipeline, whole - of_experts - common
    part = (
        -(-common // stages),
        -(-divided // (stages * shape.tensor)),
        -(-of_experts // (stages * shape.tensor * shape.expert)),
    )
    trained = sum(part)
    total = trained + frozen
    return {
        "parameters": trained,
        "cell": CellShare.of(shape, *part) if shape.processes > 1 else None,
        "largest_parameter": min(trained, sizes.get("--largest-parameter", 0)),
        "frozen": frozen,
        "workers": cells,
        "lanes": cells,
        "unit": min(total, sizes.get("--unit", -(-total * stages // LAYERS))),
    }


def _show_counts(given: dict[str, Any], config: Path, workers: int | None, output: Form) -> None:
    from shoal_controller.cli.estimate_config import counts_of
    from shoal_controller.cli.estimate_counts import show_counts

    _check(1 if workers is None else workers, None, {}, ONE)
    spread = counts_of(given, workers)
    if workers is not None:
        _cells(workers, spread.cell)
    show_counts(spread, workers, output)
    _say_what_training_refuses(given, config, workers)


def _say_what_training_refuses(given: dict[str, Any], config: Path, workers: int | None) -> None:
    from shoal_controller.cli.estimate_config import refused_by_training

    if sentence := refused_by_training(given, config, workers):
        echo(f"shoal: {sentence}", err=True)


def _count(flag: str, text: str) -> int:
    """`7e9` → 7,000,000,000. Raises `UserError`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 <= value <= MOST or value != int(value):
        raise UserError(f"{flag} is {text[:80]!r}; expected a whole number from 1 to 10^15, such as 7e9.")
    return int(text) if text.isdecimal() else int(value)


def _check(workers: int, mirrors: int | None, wanted: dict[str, Any], shape: Shape) -> None:
    """Raises `UserError` for the first flag that cannot be."""
    if not 1 <= workers <= MOST:
        raise UserError(f"--workers is {workers}; expected a whole number from 1 to 10^15.")
    most = workers + wanted.get("spares", 0) - 1
    if mirrors is not None and not 0 <= mirrors <= most:
        others = "cells" if shape.processes > 1 else "workers"
        raise UserError(
            f"--mirrors is {mirrors}; expected 0 to {most}, the number of other {others}: "
            "a block's mirrors and its owner are different workers."
        )
    for name, allowed in (("stage", STAGES), ("precision", PRECISIONS), ("offload", OFFLOADS)):
        if name in wanted and wanted[name] not in allowed:
            names = [str(one) for one in allowed]
            raise UserError(f"--{name} is {wanted[name]}; expected {', '.join(names[:-1])} or {names[-1]}.")
    if "lanes" in wanted and not 1 <= wanted["lanes"] <= MOST_LANES:
        raise UserError(f"--lanes is {wanted['lanes']}; expected a whole number from 1 to {MOST_LANES}.")
    for name, least in (("micro_batches", 1), ("state_bytes", 0), ("spares", 0)):
        if name in wanted and not least <= wanted[name] <= MOST:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} is {wanted[name]}; expected a whole number from {least} to 10^15.")


def _show(estimates: list[MemoryEstimate], form: Form, left: int) -> None:
    """`left`: workers that make no whole cell."""
    from shoal_controller.cli.tables import listed

    listed("stages", [_row(one, left) for one in estimates], lambda _: _table(estimates, left), form)


def _row(one: MemoryEstimate, left: int) -> dict[str, Any]:
    """A stage as JSON. `by_mirrors`: without mirrors and with them, whatever is asked."""
    items = [
        {"name": item.name, "bytes": item.bytes, "location": item.location, "in_step": item.in_step}
        for item in one.items
    ]
    compared = [{"mirrors": each.setup.mirrors, **_sums(each)} for each in _by_mirrors(one)]
    average = {"read_average_bytes": one.read_average_bytes} if one.setup.average else {}
    there = one.setup.spares or left
    spare = {"spare": {**_sums(_of_a_spare(one)), "filled_bytes": one.filled_bytes}} if there else {}
    return {
        "stage": one.setup.stage, "built": one.built, "cell": _cell_row(one), **average, **_sums(one), **spare,
        "by_mirrors": compared,
        "items": items,
    }  # fmt: skip


def _cell_row(one: MemoryEstimate) -> dict[str, int] | None:
    """The sizes of a cell, and what a process moves within it."""
    if not one.setup.cell:
        return None
    return {
        **{name: getattr(one.setup.shape, name) for name in DIMENSIONS},
        "partial_sum_bytes": one.partial_sum_bytes,
        "contributed_bytes": one.contributed_bytes,
        "handed_bytes": one.handed_bytes,
    }


def _sums(one: MemoryEstimate) -> dict[str, dict[str, int]]:
    return {
        "at_rest": {location: one.at_rest(location) for location in LOCATIONS},
        "at_most": {location: one.at_most(location) for location in LOCATIONS},
    }


def _of_a_spare(one: MemoryEstimate) -> MemoryEstimate:
    """Of a cell: one member more at a coordinate, which has as many of its blocks as the others there."""
    more = {"workers": one.setup.workers + 1} if one.setup.cell else {"is_spare": True}
    return bytes_of_a_worker(replace(one.setup, **more))


def _by_mirrors(one: MemoryEstimate) -> list[MemoryEstimate]:
    """The same job without mirrors, and with those asked for, or one where that is none: the price of a copy is seen
    whatever is asked. A worker alone can have no mirror.
    """
    setup = one.setup
    with_copies = setup.mirrors or min(1, setup.workers - 1)
    return [bytes_of_a_worker(replace(setup, mirrors=mirrors)) for mirrors in sorted({0, with_copies})]


COLUMNS = {
    "parameters": ("parameters", "frozen parameters"),
    "gradients": ("gradients", "reduced gradients"),
    "lane sums": ("lane sums",),
    "optimizer": ("optimizer state",),
    "masters": ("master weights", "averages of weights"),
    "buffers": ("exchange buffers", "gathered units", "offload buffers", "pieces of mirrors"),
}
"""Of the table, with the names of what they add up."""
LOCATIONS: tuple[Location, ...] = ("device", "host", "file")
TOTALS: tuple[tuple[str, Location, bool], ...] = (
    ("at rest", "device", True),
    ("in a step", "device", False),
    ("on the host", "host", False),
    ("in files", "file", False),
)
"""Rows of a stage: title, place, and whether it is what is held between two steps."""


def _table(estimates: list[MemoryEstimate], left: int) -> RenderableType:
    from rich.console import Group

    from shoal_controller.cli.tables import amount, table_of

    table = table_of("stage", *COLUMNS, numbers=("stage", *COLUMNS))
    for one in estimates:
        parts = (sum(item.bytes for item in one.items if item.name in names) for names in COLUMNS.values())
        table.add_row(f"{one.setup.stage}{'' if one.built else '*'}", *(amount(size or None) for size in parts))
    of_spares = ["", _spares(estimates)] if estimates[0].setup.spares or left else []
    heading = _heading(estimates[0].setup, left)
    return Group(
        heading, table, "", _price(estimates), *of_spares, *_notes(estimates), *_notes_of_cells(estimates, left)
    )


def _spares(estimates: list[MemoryEstimate]) -> RenderableType:
    """What a spare holds, and what is sent beside training when a worker is lost."""
    from shoal_controller.cli.tables import amount, table_of

    columns = ("a spare at rest", "in a step", "on the host", "in files", "filled after a loss")
    table = table_of("stage", *columns, numbers=("stage", *columns))
    for one in estimates:
        spare = _of_a_spare(one)
        sizes = (*(spare.at_rest(place) if at_rest else spare.at_most(place) for _, place, at_rest in TOTALS),)
        table.add_row(str(one.setup.stage), *(amount(size or None) for size in (*sizes, one.filled_bytes)))
    return table


def _price(estimates: list[MemoryEstimate]) -> RenderableType:
    """What a worker holds in all, without mirrors and with them."""
    from shoal_controller.cli.tables import amount, table_of

    counts = [one.setup.mirrors for one in _by_mirrors(estimates[0])]
    columns = [f"{count} mirror{'s'[: count != 1]}" if count else "without mirrors" for count in counts]
    columns += ["for copies"] if len(counts) > 1 else []
    table = table_of("stage", "", *columns, numbers=("stage", *columns))
    for one in estimates:
        by_mirrors, name = _by_mirrors(one), str(one.setup.stage)
        for title, location, is_at_rest in TOTALS:
            sizes = [each.at_rest(location) if is_at_rest else each.at_most(location) for each in by_mirrors]
            sizes += [sizes[1] - sizes[0]] if len(sizes) > 1 else []
            if any(sizes):
                table.add_row(name, title, *(amount(size or None) for size in sizes))
                name = ""
    return table


def _heading(setup: MemorySetup, left: int) -> str:
    offload = {"none": "", "host": ", optimizer state on the host", "file": ", optimizer state in files"}[setup.offload]
    frozen = f" and {setup.frozen:,} frozen ones" if setup.frozen else ""
    of_a_lane = f" of {setup.micro_batches} micro-batches" if setup.micro_batches > 1 else ""
    if setup.cell:
        whose = f"{plural(setup.workers, 'cell')} of {setup.shape.processes} workers ({setup.shape})"
    else:
        whose = plural(setup.workers, "worker")
    whose += f" and {plural(spares, 'spare')}" if (spares := setup.spares or left) else ""
    return (
        f"Bytes of a worker: {setup.parameters:,} parameters{frozen} in {setup.precision}, {whose}, "
        f"{plural(setup.lanes, 'lane')}{of_a_lane}, {plural(setup.mirrors, 'mirror')}"
        f"{' on the host' * bool(setup.mirrors and setup.mirrors_on_host)}{offload}"
    )


def _notes(estimates: list[MemoryEstimate]) -> list[str]:
    from shoal_controller.cli.tables import amount
    from shoal_controller.core.overview.idle_lanes import idle_sentence

    setup = estimates[0].setup
    notes = ["Activations, and what PyTorch needs itself, come on top."]
    unit = "cell" if setup.cell else "worker"
    if idle := idle_sentence(setup.lanes, setup.workers, setup.workers, unit):
        notes.append(f"{idle}.")
    if setup.spares:
        notes.append("When a worker is lost, a spare trains in its place at once: no state moves before the next step.")
    if setup.average:
        copied = max(one.read_average_bytes for one in estimates)
        more = f"; in stages 0 to 2 engine.averaged() holds {amount(copied)} more" if copied else ""
        notes.append(f"Averages of weights are among the masters{more}.")
    if any(one.setup.stage == 3 for one in estimates):
        notes.append(f"Largest unit: {setup.unit:,} parameters.")
    if not setup.largest_parameter and any(one.setup.stage > 1 for one in estimates):
        notes.append("A parameter above 8 MiB adds twice what it has above that in a step (--largest-parameter).")
    if not all(one.built for one in estimates):
        notes.append("* Not supported yet: what its design needs.")
    return notes


def _moved(one: MemoryEstimate) -> str:
    """Between a process and owners at other coordinates; empty: nothing."""
    from shoal_controller.cli.tables import amount

    if not one.handed_bytes:
        return ""
    each = "sum of lanes that leaves it" if one.setup.stage < 2 else "lane"
    given = f"gives {amount(one.contributed_bytes)} of gradients for each {each}, and " * bool(one.contributed_bytes)
    when = "in each step" if one.setup.stage < 3 else "each time that it gathers all units"
    return f"{given}gets {amount(one.handed_bytes)} of parameters {when}, to and from other coordinates"


def _notes_of_cells(estimates: list[MemoryEstimate], left: int) -> list[str]:
    """What is assumed of a cell, and what a step moves within one."""
    from shoal_controller.cli.tables import amount

    cell = estimates[0].setup.cell
    if cell is None:
        return []
    shape = cell.shape
    notes = []
    if left:
        notes.append("A spare keeps copies at one coordinate, where each member then holds as much as it does.")
    if shape.pipeline > 1:
        notes.append(
            f"Assumed: each stage has 1/{shape.pipeline} of all parameters. For the largest stage give its own, times "
            f"{shape.pipeline}, as --params."
        )
    if shape.tensor > 1:
        notes.append(
            f"Assumed: each process of a cell has 1/{shape.tensor} of the parameters of a stage or an expert, but for "
            f"{cell.common:,} that are common (--common)."
        )
    if shape.expert > 1:
        notes.append(f"Assumed: each place of experts has 1/{shape.expert} of those of experts (--of-experts).")
    if cell.common and shape.tensor > 1:
        notes.append(
            f"Where gradients of common parameters are parts of a sum (sequence parallelism), a cell adds up at most "
            f"{amount(estimates[0].partial_sum_bytes)} of them for each lane."
        )
    stages_by: dict[str, list[str]] = {}
    for one in estimates:
        if moved := _moved(one):
            stages_by.setdefault(moved, []).append(str(one.setup.stage))
    notes += [f"Stage{'s' * (len(of) > 1)} {' and '.join(of)}: a process {moved}." for moved, of in stages_by.items()]
    notes.append("Not counted: what layers and stages exchange (activations, tokens, keys and values).")
    return notes
