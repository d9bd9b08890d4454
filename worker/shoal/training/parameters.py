"""The parameters on one worker between its votes: all of them here, or a unit at a time. By residency.

What the steps of training tell whoever looks after them; sharded_parameters.py does where they come and go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor, nn

from shoal.world import World


class Parameters(Protocol):
    """What the steps of training say to whoever looks after parameters."""

    def on_world(self, world: World) -> None:
        """A world has begun."""

    def on_gradients(self, bucket: int) -> None:
        """A backward has made all gradients of a bucket."""

    def in_backward(self) -> AbstractContextManager[None]:
        """A context for a backward."""

    def check_step(self) -> None:
        """Raises `UserError` where the script cannot make a step now."""

    def before_vote(self) -> None:
        """Whatever has been asked for is here: after the vote it may be something else. Raises `WorldChanged`."""

    def after_evaluating(self) -> None:
        """An evaluation is over."""

    def before_leaving(self, world: World) -> None:
        """The world ends by plan; returns when nobody asks for anything in it. Raises `WorldChanged`."""

    def on_boundary(self, world: World) -> None:
        """A vote has passed, and its update is made. Raises `WorldChanged`."""

    def reading(self, tensors: Sequence[Tensor]) -> Iterable[Tensor]:
        """The same tensors one after the other, each with its values until the next is asked for. Raises
        `WorldChanged`.
        """

    def gathered(self, modules: Iterable[nn.Module], /) -> AbstractContextManager[None]:
        """A context in which all parameters of these modules are here, to be read."""


class WholeParameters:
    """All parameters are here, always."""

    def on_world(self, world: World) -> None:
        """They stay."""

    def on_gradients(self, bucket: int) -> None:
        """They stay."""

    def in_backward(self) -> AbstractContextManager[None]:
        return nullcontext()

    def check_step(self) -> None:
        """It can."""

    def before_vote(self) -> None:
        """Nothing was asked for."""

    def after_evaluating(self) -> None:
        """They stay."""

    def before_leaving(self, world: World) -> None:
        """Nobody asks."""

    def on_boundary(self, world: World) -> None:
        """The hand-out has brought them."""

    def reading(self, tensors: Sequence[Tensor]) -> Iterable[Tensor]:
        return tensors

    def gathered(self, _: Iterable[nn.Module], /) -> AbstractContextManager[None]:
        return nullcontext()
