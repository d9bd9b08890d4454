"""The reference page of the configuration, written from the models: `python -m shoal.config.reference`.

Its output is docs/configuration.md; a test holds the page to it. Nobody imports this module but that test.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from shoal_protos.validation import allowed_in, model_in

from shoal.config.deepspeed import NOT_BUILT, SAME_ON_CPU, WHY, WITHOUT_MEANING
from shoal.config.document import Document
from shoal.optim.schedules import FORMULAS, Formula

OPENING = """\
# Configuration

<!-- Written by `python -m shoal.config.reference > docs/configuration.md`; do not edit. -->

`shoal.initialize(config=…)` takes a dict or the path of a JSON file: a DeepSpeed `ds_config.json` with one more
section, `shoal`. An unknown or impossible key is an error that names it.

`"auto"` is derived from the rest of the file: batch sizes from each other, a scheduler's length from the job's last
step, its `warmup_max_lr` from the optimizer's rate, an optimizer's other arguments from the class's defaults. If
nothing determines a value (`optimizer.params.lr`, `scheduler.params.warmup_num_steps`), `"auto"` is an error.
"""
NOT_BUILT_OPENING = """\

## Not supported

These DeepSpeed keys are refused unless they have one of the values shown, which leave the feature off.

"""
IGNORED_OPENING = """\

## Without meaning here

These DeepSpeed keys are accepted and ignored, and one log line lists them. The name of a section covers everything in
it, `*` everything that the table above does not list. Shoal's own checkpoints are configured in `shoal.checkpoint`; its
keys are refused in DeepSpeed's section `checkpoint`.

"""


def page() -> str:
    """The whole page."""
    schedules = "".join("".join(_schedule(formula)) for formula in FORMULAS.values())
    return (
        OPENING
        + "".join(_section(Document, ""))
        + schedules
        + _not_built(NOT_BUILT)
        + _same_on_cpu()
        + _without_meaning(WITHOUT_MEANING)
    )


def _section(model: type[BaseModel], name: str) -> Iterator[str]:
    fields = {key: field for key, field in model.model_fields.items() if model_in(field) is None}
    heading = f"`{name}`" if name else "Top level"
    yield f"\n## {heading}\n\n"
    if name:
        about = " ".join((model.__doc__ or "").split()).partition(": ")[2]
        yield f"{about[0].upper()}{about[1:]}\n\n"
    yield from _table({f"{name}.{key}" if name else key: field for key, field in fields.items()})
    for key, field in model.model_fields.items():
        inner = model_in(field)
        if inner is not None:
            yield from _section(inner, f"{name}.{key}" if name else key)


def _schedule(formula: type[Formula]) -> Iterator[str]:
    yield f"\n## `scheduler.params` of {formula.__name__}\n\n{' '.join((formula.__doc__ or '').split())}\n\n"
    yield from _table(formula.model_fields)


def _table(fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    yield "| key | allowed | default | meaning |\n|---|---|---|---|\n"
    for key, field in fields.items():
        meaning = " ".join((field.description or "").split())
        yield f"| `{key}` | {allowed_in(field)} | {_default(field)} | {meaning} |\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "(required)"
    return "none" if field.default is None else f"`{json.dumps(field.default)}`"


def _not_built(keys: Mapping[str, tuple[object, ...]]) -> str:
    off = {key: ", ".join(f"`{json.dumps(value)}`" for value in values) for key, values in keys.items()}
    rows = (f"| `{key}` | {off[key]} | {WHY.get(key, '')} |\n" for key in sorted(keys))
    return NOT_BUILT_OPENING + "| key | off | why |\n|---|---|---|\n" + "".join(rows)


def _same_on_cpu() -> str:
    keys = ", ".join(f"`{key}: {json.dumps(value)}`" for key, values in SAME_ON_CPU.items() for value in values)
    return (
        "\nWhere the model is on the CPU all state is in host memory anyway, so there these are accepted too; with a "
        f"model on another device they are refused: {keys}.\n"
    )


def _without_meaning(keys: frozenset[str]) -> str:
    by_section: dict[str, list[str]] = {}
    for key in sorted(keys):
        section, _, name = key.rpartition(".")
        by_section.setdefault(section, []).append(f"`{name}`")
    rows = (
        f"| {f'`{section}`' if section else 'top level'} | {', '.join(names)} |\n"
        for section, names in sorted(by_section.items())
    )
    return IGNORED_OPENING + "| section | keys |\n|---|---|\n" + "".join(rows)


if __name__ == "__main__":
    sys.stdout.write(page())
