"""Residency: what of a block every worker keeps, and what its owner and mirrors alone. Chosen once, by ZeRO's stage.

Source of the stages: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020).
Nothing else asks which stage it is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Residency:
    """Which parts all workers keep of all blocks; what is false is with owner and mirrors."""

    state: bool
    """Optimizer state and master weights."""
    gradients: bool
    """Of a step, until it is committed."""
    parameters: bool
    """As forwards compute with them."""

    @classmethod
    def of(cls, stage: int) -> Residency:
        """`stage`: 0 to 3."""
        return cls(state=stage == 0, gradients=stage < 2, parameters=stage < 3)


EVERYTHING = Residency(state=True, gradients=True, parameters=True)
