"""Updates of whole tensors: what a group asks for whose tensors cannot be updated element by element.

A step makes such an update in three parts. Each owner sends a *part* of the tensor's elements to the tensor's home;
there the *whole* is computed, once; what that returns goes back to all who hold the elements, who *commit* it after the
vote. All three are functions of what they are given: nothing is kept at a home, and nothing is written before the vote.

`OnBlocks` makes a twin one that can step beside them. Called by twins, blocks and the exchange
(blocks/whole_tensors.py, exchange/shaping.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.optim.hyper import Group


@dataclass(frozen=True, slots=True)
class Pieces:
    """Of one tensor, pieces that follow each other: their weights, state by key, and gradients, each (elements,); of
    odd state what of a piece has it. Gradients are to be times `scale`.
    """

    weights: list[Tensor]
    state: Mapping[str, list[Tensor]]
    gradients: list[Tensor]
    scale: float = 1.0

    @classmethod
    def joined(cls, parts: Sequence[Pieces]) -> Pieces:
        """Of one tensor, pieces that follow each other, with one scale."""
        first, *others = parts
        for one in others:
            state = {key: of + one.state[key] for key, of in first.state.items()}
            first = cls(first.weights + one.weights, state, first.gradients + one.gradients, first.scale)
        return first

    @property
    def sizes(self) -> list[int]:
        """Elements of each."""
        return [piece.numel() for piece in self.gradients]

    def scaled(self) -> Iterator[Tensor]:  # each (elements,)
        """The gradients of the pieces, one after the other: what is made of one stays in a processor's cache."""
        return (gradient if self.scale == 1.0 else gradient * self.scale for gradient in self.gradients)


class Columns(NamedTuple):
    """What travels of each element: dtypes of what goes to the home, and of what comes back."""

    sent: tuple[torch.dtype, ...]
    returned: tuple[torch.dtype, ...]


class WholeUpdate(Protocol):
    """Of one group."""

    name: str
    """What computes it."""
    keeps: str
    """What of a tensor is carried, in words."""
    form: str
    """What the bytes of its state are, to be compared; empty: what their keys say."""
    steps_group: bool
    """Whether a step of the optimizer itself may change values of the group."""

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raises `UserError` for a parameter that it cannot train."""

    def cost(self, shape: Sequence[int]) -> int:
        """What `whole` costs, above 0, in any unit."""
        ...

    def columns(self, wide: torch.dtype, /) -> Columns:
        """`wide`: the dtype of weights, gradients and state."""
        ...

    def first_state(
        self,
        weights: Tensor,  # (elements,)
    ) -> dict[str, Tensor]:  # each (elements,)
        """What a run of blocks has before its first update."""
        ...

    def odd(self, shape: Sequence[int]) -> Mapping[str, int]:
        """Keys of state that a tensor's first elements alone have, and of how many."""
        ...

    def part(
        self,
        pieces: Pieces,
        group: Group,
        is_new: bool,
        into: Sequence[Tensor],  # by column (values of all pieces,)
        /,
    ) -> None:
        """Make what the home needs of them. `is_new`: no update of the tensor was made yet."""

    def whole(
        self,
        sent: Sequence[Tensor],  # by column (values of the tensor,)
        shape: Sequence[int],
        group: Group,
        is_new: bool,
        /,
    ) -> list[Tensor]:  # by column (values of the tensor,)
        """What comes back."""
        ...

    def commit(
        self,
        pieces: Pieces,
        returned: Sequence[Tensor],  # by column (values of all pieces,)
        group: Group,
        shape: Sequence[int],
    ) -> None:
        """Update weights and state in place."""


Updates = Sequence[WholeUpdate | None]
"""By group; None: its elements are updated by themselves."""


UPDATES = "_whole_updates"
"""The attribute of an optimizer by which they are known."""


class OnBlocks(Optimizer):
    """Beside the class of a twin: of such groups a step gives parameters their first state, and does no more; but where
    the class may change a group's values, it steps a zero that stands in for its parameters.
    """

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """One step of the groups that are updated element by element."""
        groups, updates = self.param_groups, vars(self)[UPDATES]
        held = [group["params"] for group in groups]
        for group, one in zip(groups, updates, strict=True):
            if one is not None and group["params"]:
                group["params"] = [_zero_like(group["params"][0])] if one.steps_group else []
        self.param_groups = [
            group for group, one in zip(groups, updates, strict=True) if one is None or one.steps_group
        ]
        try:
            if any(group["params"] for group in self.param_groups):
                super().step()
        finally:
            self.param_groups = groups
            for group, parameters, one in zip(groups, held, updates, strict=True):
                for stand_in in group["params"] if one is not None else ():
                    self.state.pop(stand_in, None)
                group["params"] = parameters
        for group, update in zip(groups, updates, strict=True):
            for parameter in group["params"] if update is not None else ():
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter].update(update.first_state(parameter))


def _zero_like(
    parameter: Tensor,  # of any shape
) -> Tensor:  # (one element,)
    zero = torch.zeros(1, dtype=parameter.dtype, device=parameter.device)
    zero.grad = torch.zeros_like(zero)
    return zero


_classes: dict[type[Optimizer], type[Optimizer]] = {}


def on_blocks(kind: type[Optimizer]) -> type[Optimizer]:
    """Return the class of a twin of it."""
    if kind not in _classes:
        _classes[kind] = type(kind.__name__, (OnBlocks, kind), {"__module__": kind.__module__})
    return _classes[kind]
