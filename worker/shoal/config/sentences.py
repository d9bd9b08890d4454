"""The sentences of a refused configuration: the key, what was given, what was expected, and the nearest right key.

Pure text; `load.py` raises them.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from shoal.config.deepspeed import NOT_BUILT, WITHOUT_MEANING
from shoal.config.document import Allowed, Document, Section

LONGEST_SHOWN = 60
REFERENCE = "docs/configuration.md"


def shown(value: object) -> str:
    """A value as the file has it, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 1] + "…"


def wrong_value(key: str, value: object, allowed: str) -> str:
    return f"`{key}` is {shown(value)}; expected {allowed}."


def not_built(key: str, value: object) -> str:
    return f"`{key}` is not supported yet (given: {shown(value)})."


def model_in(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds, None where it holds a plain value."""
    for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def allowed_in(field: FieldInfo) -> str:
    """How the sentence "expected …" ends for a field."""
    return next((mark.text for mark in field.metadata if isinstance(mark, Allowed)), "a section {…}")


def keys_of(model: type[BaseModel], section: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted key of a model and of the sections below it."""
    for name, field in model.model_fields.items():
        key = f"{section}.{name}" if section else name
        yield key, field
        inner = model_in(field)
        if inner is not None:
            yield from keys_of(inner, key)


def unknown_key(key: str, value: object, model: type[BaseModel] = Document, section: str = "") -> str:
    """Naming the nearest known key, and all that are allowed beside it. `section`: where `model` stands in the file."""
    parent, _, name = key.rpartition(".")
    known = {known for known, _ in keys_of(model, section)}
    foreign = {known for known in WITHOUT_MEANING | NOT_BUILT.keys() if not known.endswith("*")}
    beside = sorted(other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == parent)
    guess = _nearest(key, name, known | foreign)
    hint = f"; did you mean `{guess}`?" if guess else "."
    place = f"in `{parent}`" if parent else "at the top level"
    listed = f" Allowed {place} are {', '.join(beside)}." if beside else f" See {REFERENCE} for the allowed keys."
    return f"`{key}` is an unknown key (given: {shown(value)}){hint}{listed}"


ELSEWHERE = {
    "lr": "optimizer.params.lr",
    "learning_rate": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "batch_size": "train_batch_size",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "grad_clip": "gradient_clipping",
    "max_grad_norm": "gradient_clipping",
    "zero": "zero_optimization",
    "steps": "shoal.max_steps",
    "shoal.steps": "shoal.max_steps",
    "shoal.checkpoint.every": "shoal.checkpoint.every_steps",
    "shoal.checkpoint.dir": "shoal.checkpoint.path",
    "shoal.checkpoint.folder": "shoal.checkpoint.path",
}
"""What other programs call it, or where it stands there."""


def _nearest(key: str, name: str, known: set[str]) -> str | None:
    if key in ELSEWHERE:
        return ELSEWHERE[key]
    same_name = sorted(other for other in known if other.rpartition(".")[2] == name)
    if same_name:
        return same_name[0]
    parent = key.rpartition(".")[0]
    siblings = sorted(other for other in known if other.rpartition(".")[0] == parent)
    close = difflib.get_close_matches(key, siblings, n=1, cutoff=0.75)
    return close[0] if close else None


def all_of(faults: Sequence[str]) -> str:
    """One sentence, or a list of them."""
    if len(faults) == 1:
        return faults[0]
    return "\n  - ".join([f"the config has {len(faults)} faults:", *faults])


def sentences_of(error: ValidationError, model: type[BaseModel] = Document, section: str = "") -> list[str]:
    """The sentences of all faults that the models found, each key once."""
    return list(dict.fromkeys(_sentence_of(fault, model, section) for fault in error.errors()))


def _sentence_of(fault: ErrorDetails, model: type[BaseModel], section: str) -> str:
    place = ([section] if section else []) + [str(part) for part in fault["loc"]]
    if fault["type"] == "extra_forbidden":
        return unknown_key(".".join(place), fault["input"], model, section)
    fields = dict(keys_of(model, section))
    key = next(key for key in (".".join(place[:length]) for length in range(len(place), 0, -1)) if key in fields)
    if fault["type"] == "missing":
        return f"`{key}` is missing; expected {allowed_in(fields[key])}."
    return wrong_value(key, fault["input"], allowed_in(fields[key]))
