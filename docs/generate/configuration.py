"""The reference page of the configuration, written from the models: `python -m docs.generate.configuration`.

Its output is docs/configuration.md; a test compares the two, and only that test imports this module.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from shoal.config.document import Document
from shoal.optim.schedules import FORMULAS, Formula
from shoal_protos.validation import allowed_in, model_in

OPENING = """\
# Configuration

<!-- Written by `python -m docs.generate.configuration > docs/configuration.md`; do not edit. -->

Look up the keys of the configuration. `shoal.initialize(config=…)` accepts a dict or the path of a file: a DeepSpeed
`ds_config.json` with one more section, `shoal`. The file is JSON, or [Hjson](https://hjson.github.io) as DeepSpeed
reads it: with comments, without needless quotes and commas. `2000.0` and `1e5` are valid whole numbers.

A value that is not allowed is an error that names its key, and so is an unknown key in the section `shoal`. Elsewhere
an unknown key is an error only if it is one edit from a known one (`gradient_cliping`); others are ignored, as in
DeepSpeed, and the log names them. Keys of a section that is off are not checked.

`"auto"` is derived from the rest of the file: batch sizes from each other, a scheduler's length from the job's last
step, its `warmup_max_lr` from the optimizer's rate, an optimizer's other arguments from the class's defaults. If
nothing determines a value (`optimizer.params.lr`, `scheduler.params.warmup_num_steps`), `"auto"` is an error. If the
script passes an optimizer or a scheduler in addition to its section, `"auto"` is the object's value, and other values
of the section must equal the object's.

[DeepSpeed](deepspeed.md) lists the effect of DeepSpeed's other keys.
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
