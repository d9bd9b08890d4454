"""Which parts of the module are in evaluation mode: it decides a step's bits, so all members train in the same modes.

A loop's body may set modes at its top, from `engine.global_step`. Members whose body has not run (joiners, members
without lanes) take them over, a checkpoint keeps them, and the vote compares them. What the bottom of a body leaves
behind (an evaluation with `module.eval()` and no `module.train()`) would be there on those alone that ran it: it is
refused at the next backward, in every world alike.
"""

from __future__ import annotations

from collections.abc import Collection

from shoal_protos.errors import UserError
from torch import nn

from shoal.core.units import plain_name
from shoal.guards.step_guard import StepGuard

WORDS = {True: "training", False: "evaluation"}

ADVICE = (
    "Call module.train() after an evaluation, or evaluate within `with engine.evaluating():`; to change a mode for "
    "good, set it at the top of the loop's body, from engine.global_step."
)


class ModuleModes(StepGuard):
    """Modes of one engine's module; `evaluating`: the parts in evaluation mode at the last backward, by name."""

    def __init__(self, module: nn.Module) -> None:
        parts = {plain_name(f"{name}.").removesuffix("."): part for name, part in module.named_modules()}
        self._names, self._parts = list(parts), list(parts.values())
        self._given: list[bool] = []
        """As the batch at hand was given out."""
        self._trained: list[bool] = []
        """At the last backward; empty before the first."""
        self.evaluating: list[str] = []

    def _now(self) -> list[bool]:
        return [part.training for part in self._parts]

    def on_batch(self) -> None:
        self._given = self._now()

    def before_backward(self, where: str, _: bool, /) -> None:
        """Raises `UserError` naming a part whose mode was changed after the last backward, and not by this body."""
        now = self._now()
        if now == self._trained:
            return
        for name, mode, given, before in zip(self._names, now, self._given, self._trained, strict=False):
            if mode == given != before:
                raise UserError(
                    f"{_named(name)} was put into {WORDS[mode]} mode between engine.step and the next batch, and was "
                    f"still in it at the backward ({where}). A worker that gets its first batch then would not be. "
                    f"{ADVICE}"
                )
        self._keep(now)

    def take_over(self, evaluating: Collection[str]) -> None:
        """The modes of another member, or of a checkpoint."""
        for name, part in zip(self._names, self._parts, strict=True):
            part.training = name not in evaluating
        self._keep(self._now())

    def _keep(self, modes: list[bool]) -> None:
        self._trained = modes
        self.evaluating = [name for name, mode in zip(self._names, modes, strict=True) if not mode]


def first_difference(mine: Collection[str], others: Collection[str]) -> str:
    """The first part that is in another mode; empty where none is."""
    for name in sorted(set(mine) ^ set(others)):
        return f"{_named(name)} is in {WORDS[name not in mine]} mode here and in {WORDS[name not in others]} mode there"
    return ""


def _named(name: str) -> str:
    return f'part "{name}" of the module' if name else "the module"
