"""The sentences of a refused configuration: those of every document, and what only a training config needs.

That is the key that was meant where it stands elsewhere or is DeepSpeed's. Pure text; `load.py` raises them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from pydantic import BaseModel, ValidationError
from shoal_protos import validation
from shoal_protos.text import shown, shown_name
from shoal_protos.validation import MOST_READ, Fault, find, model_in

from shoal.config.deepspeed import FATES
from shoal.config.document import Document

REFERENCE = "docs/configuration.md"


def wrong_value(key: str, value: object, allowed: str) -> str:
    return f"{validation.wrong_value(key, value, allowed)}."


def not_built(key: str, value: object, why: str = "") -> str:
    return f"`{key}` is not supported{'' if why else ' yet'} (given: {shown(value)}){f': {why}' if why else ''}."


def refused_value(key: str, value: object, why: str) -> str:
    return f"`{key}` is {shown(value)}, which is not supported: {why}."


def keys_of(model: type[BaseModel], section: str = "") -> Iterator[str]:
    """Every dotted key of a model and of the sections below it."""
    for name, field in model.model_fields.items():
        key = f"{section}.{name}" if section else name
        yield key
        inner = model_in(field)
        if inner is not None:
            yield from keys_of(inner, key)


def unknown_key(
    key: str, value: object, meant: str | None, model: type[BaseModel] = Document, section: str = ""
) -> str:
    """Naming the known key that was meant, and all that are allowed beside it. `section`: where `model` stands."""
    parent, _, name = key.rpartition(".")
    beside = [other.rpartition(".")[2] for other in keys_of(model, section) if other.rpartition(".")[0] == parent]
    refused = validation.unknown_key(parent, name, shown(value), beside, meant)
    if beside:
        return f"{refused}."
    return f"{refused}{'' if refused.endswith('?') else '.'} See {REFERENCE} for the allowed keys."


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
    "activation_checkpointing.enabled": "shoal.activation_checkpointing",
    "activation_checkpointing.modules": "shoal.activation_checkpointing",
    "zero_optimization.offload_optimizer.path": "zero_optimization.offload_optimizer.nvme_path",
    "data_types.params_dtype": "bf16.enabled",
    "fp16.opt_level": "fp16.auto_cast",
    "shoal.steps": "shoal.max_steps",
    "shoal.checkpoint.every": "shoal.checkpoint.every_steps",
    "shoal.checkpoint.dir": "shoal.checkpoint.path",
    "shoal.checkpoint.folder": "shoal.checkpoint.path",
}
"""What other programs call it, or where it stands there."""


def misplaced_key(key: str, place: str) -> str:
    return f"`{shown_name(key)}` is not read where it stands; it belongs at `{place}`."


def _nearest(key: str, known: set[str]) -> str | None:
    """Of the models' own keys and DeepSpeed's."""
    if key in ELSEWHERE:
        return ELSEWHERE[key]
    parent, _, name = key.rpartition(".")
    same_name = sorted(other for other in known if other.rpartition(".")[2] == name)
    if same_name:
        return same_name[0]
    siblings = sorted(other for other in known if other.rpartition(".")[0] == parent)
    close = difflib.get_close_matches(key, siblings, n=1, cutoff=0.75)
    return close[0] if close else None


def all_of(faults: Sequence[str], unread: int = 0) -> str:
    """One sentence, or a list of them. `unread`: further faults, of which no sentence was made."""
    return validation.all_of(faults, "the config", unread)


def sentences_of(error: ValidationError, model: type[BaseModel] = Document, section: str = "") -> list[str]:
    """The sentences of the faults that the models found, each key once: of `MOST_READ`, for each takes its time.
    `section`: where `model` stands in the file.
    """
    read = error.errors()[:MOST_READ]
    return list(dict.fromkeys(_sentence_of(fault, model, section) for fault in read))


def unread_in(error: ValidationError) -> int:
    """How many faults are left of which `sentences_of` makes no sentence."""
    return max(0, error.error_count() - MOST_READ)


def _sentence_of(fault: Fault, model: type[BaseModel], section: str) -> str:
    if fault["type"] == "extra_forbidden":
        key, _, _ = find(fault["loc"][:-1], model, section)
        name = f"{key}.{fault['loc'][-1]}" if key else str(fault["loc"][-1])
        nearest = _nearest(name, {*keys_of(model, section), *FATES})
        return unknown_key(name, fault["input"], nearest, model, section)
    return f"{validation.sentence(fault, 'the config', model, section)}."
