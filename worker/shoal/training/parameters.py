"""The parameters on one worker between its votes: all of them here, or a unit at a time. By residency.

What the steps of training tell whoever looks after them: handed_parameters.py where all are here, sharded_parameters.py
where they come and go.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn

from shoal.exchange.hand_out import HandOut
from shoal.exchange.world import World


class Parameters(ABC):
    """What the steps of training say to whoever looks after parameters; who need not do anything then does nothing."""

    def on_world(self, world: World) -> None:  # noqa: B027
        """A world has begun."""

    def on_gradients(self, bucket: int) -> None:  # noqa: B027
        """A backward has made all gradients of a bucket."""

    def in_backward(self) -> AbstractContextManager[None]:
        """A context for a backward."""
        return nullcontext()

    def check_step(self) -> None:  # noqa: B027
        """Raises `UserError` where the script cannot make a step now."""

    @abstractmethod
    def before_vote(self) -> None:
        """Whatever has been asked for is here: after the vote it may be something else. Raises `WorldChanged`."""

    def before_evaluating(self) -> None:  # noqa: B027
        """An evaluation begins. Changes of the world are taken part in."""

    def after_evaluating(self) -> None:  # noqa: B027
        """An evaluation is over."""

    @abstractmethod
    def before_leaving(self, world: World, /) -> None:
        """The world ends by plan; returns when nobody asks for anything in it. Raises `WorldChanged`."""

    def on_updated(self, hand_out: HandOut) -> Collection[int]:
        """The update is made; `hand_out` brings what others have updated. Returns the buckets that are still to come.
        Raises `WorldChanged`.
        """
        hand_out.finish()
        return ()

    def on_boundary(self, world: World) -> None:  # noqa: B027
        """A vote has passed, and its update is made. Raises `WorldChanged`."""

    def settle(self) -> None:  # noqa: B027
        """All that is handed out is here, and what others wait for has left. Raises `WorldChanged`."""

    def forget(self) -> None:  # noqa: B027
        """The world ends: nothing comes any more."""

    @abstractmethod
    def reading(self, tensors: Sequence[Tensor]) -> Iterable[Tensor]:
        """The same tensors one after the other, each with its values until the next is asked for. Raises
        `WorldChanged`.
        """

    @contextmanager
    def all_here(self) -> Iterator[None]:
        """A context in which all parameters are here, and no change of the world is taken part in. Raises
        `WorldChanged` before it is entered.
        """
        self.settle()
        yield

    @abstractmethod
    def gathered(self, modules: Iterable[nn.Module], /) -> AbstractContextManager[None]:
        """A context in which all parameters of these modules are here, to be read."""
