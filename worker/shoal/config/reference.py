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

from shoal.config.document import Document
from shoal.optim.schedules import FORMULAS, Formula

OPENING = """\
# Configuration

<!-- Written by `python -m shoal.config.reference > docs/configuration.md`; do not edit. -->

`shoal.initialize(config=…)` takes a dict or the path of a file: a DeepSpeed `ds_config.json` with one more section,
`shoal`. The file is JSON, or [Hjson](https://hjson.github.io) as DeepSpeed reads it: with comments, without needless
quotes and commas. Where a whole number is expected, `2000.0` and `1e5` are one.

A value that is not allowed is an error that names its key, and so is a key that the section `shoal` does not have.
Elsewhere an unknown key is an error only where it is one edit from a known one (`gradient_cliping`); others are left
alone, as DeepSpeed does, and the log names them. What stands in a section that is off is not looked at.

`"auto"` is derived from the rest of the file: batch sizes from each other, a scheduler's length from the job's last
step, its `warmup_max_lr` from the optimizer's rate, an optimizer's other arguments from the class's defaults. If
nothing determines a value (`optimizer.params.lr`, `scheduler.params.warmup_num_steps`), `"auto"` is an error. Where the
script gives an optimizer or a scheduler beside its section, `"auto"` is what the object has, and what the section says
otherwise must be what it has.

What becomes of DeepSpeed's other keys is in [DeepSpeed](deepspeed.md).
"""


def page() -> str:
    """The whole page."""
    schedules = "".join("".join(_schedule(formula)) for formula in FORMULAS.values())
    return OPENING + "".join(_section(Document, "")) + schedules


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


if __name__ == "__main__":
    sys.stdout.write(page())
