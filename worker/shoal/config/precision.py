"""Precision as the config settles it: what parameters are kept in, what the forward computes with, how it is scaled.

From the sections `bf16` and `fp16` (document.py). No torch here: dtypes are names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shoal_protos.quoting import shown

from shoal.config.document import Document
from shoal.core.loss_scale import LossScaleRule

Half = Literal["bfloat16", "float16"]
TRAVELS_AS = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision of one job."""

    parameters: Half | None = None
    """What parameters are rounded to; None: they stay as the script made them."""
    autocast: Half | None = None
    """What the forward computes with where it may (`auto_cast`); None: with the parameters' own."""
    scaling: LossScaleRule | None = None
    """How losses are scaled; None: not at all."""

    @classmethod
    def of(cls, document: Document) -> Precision:
        """`document`: without the faults that `precision_faults` finds."""
        bf16, fp16 = document.bf16, document.fp16
        if bf16.enabled is True:
            return cls(None, "bfloat16") if bf16.auto_cast else cls("bfloat16")
        if fp16.enabled is True:
            scaling = LossScaleRule(**fp16.model_dump(exclude={"enabled", "auto_cast"}))
            scaling = scaling.in_stage_0() if document.zero_optimization.stage == 0 else scaling
            return cls(None, "float16", scaling) if fp16.auto_cast else cls("float16", None, scaling)
        return cls()


def precision_faults(document: Document) -> Iterator[str]:
    """What does not fit together."""
    if document.bf16.enabled is True and document.fp16.enabled is True:
        yield "`bf16.enabled` and `fp16.enabled` are both true; keep one."
    fp16, first = document.fp16, 2.0**document.fp16.initial_scale_power
    if fp16.enabled is True and not fp16.loss_scale and fp16.min_loss_scale > first:
        yield (
            f"`fp16.min_loss_scale` is {fp16.min_loss_scale:g}, and the scale begins with 2^{fp16.initial_scale_power} "
            f"= {first:g} (`fp16.initial_scale_power`); the smallest cannot be above the first."
        )
    travels, precision = document.communication_data_type, Precision.of(document)
    if travels in ("auto", "fp32", None) or travels == TRAVELS_AS.get(str(precision.parameters)):
        return
    yield (
        f"`communication_data_type` is {shown(travels)}, and parameters are {precision.parameters or 'float32'}: "
        "gradients would be rounded before they are added up. Gradients of half-precision parameters travel in their "
        "own dtype and are added up in float32 anyway; remove the key."
    )
