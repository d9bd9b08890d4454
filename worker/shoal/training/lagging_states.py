"""Registered states that only the loop's body brings up to date: each is named once, where that shows.

A member without lanes runs no body. What stood still there while steps were committed, and moves as soon as a body
runs, is some steps behind from then on; if this worker becomes rank 0 it is what checkpoints and joiners get. Only
looked at when a member gets lanes after steps without. Called by boundary.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from shoal_protos.errors import UserError
from torch import Tensor

from shoal.core.plain import encode
from shoal.exchange.world import World
from shoal.process.logs import get_logger
from shoal.state.training_state import digest_of
from shoal.training.context import TrainingContext

LOOKS = 2
"""Steps with a body that are looked at: what follows `engine.step()` in the body shows at the second one's boundary."""

log = get_logger("shoal")


class LaggingStates:
    """What this worker's states were like when it had no lanes, and how they move when it has some."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._at_rest: dict[str, str] = {}
        """Digests by name, as of the first world without lanes; empty: it has lanes."""
        self._since = 0
        """The step then."""
        self._missed = self._looks = 0
        self._still: dict[str, str] = {}
        """Of those that no step without lanes has changed."""
        self._named: set[str] = set()

    def forget(self) -> None:
        """This worker's states are others now."""
        self._at_rest, self._still, self._looks = {}, {}, 0

    def on_world(self, world: World) -> None:
        """A world begins, and owes no boundary."""
        state, before = self._context.state, self._at_rest
        self.forget()
        if not world.lanes:
            self._since = self._since if before else state.followed
            self._at_rest = before or self._digests(state.registered)
        elif before and state.followed > self._since:
            now, self._missed = self._digests(before), state.followed - self._since
            self._still = {name: digest for name, digest in before.items() if now.get(name) == digest}
            self._looks = LOOKS

    @property
    def are_awaited(self) -> bool:
        """Whether the boundary at hand may show one."""
        return self._looks > 0 and bool(self._still)

    def after_a_body(self) -> None:
        """At the boundary of a step, before anything else has changed a state."""
        for name, digest in self._digests(self._still).items():
            if digest != self._still[name]:
                self._named.add(name)
                log.warning("registered_state_lags", state=name, missed_steps=self._missed,
                            means="only the loop's body brings it up to date, and this worker had no lanes for so many "
                            "steps", hint="bring it up to date in a function given to engine.on_commit")  # fmt: skip

    def before_a_body(self) -> None:
        """After all that the boundary does."""
        self._looks -= 1
        self._still = self._digests(self._still)

    def _digests(self, names: Iterable[str]) -> dict[str, str]:
        """Of those that were not named yet. One that cannot be saved is refused where it is."""
        found = {}
        for name in set(names) - self._named:
            tensors: dict[str, Tensor] = {}
            try:
                tree = encode(self._context.state.registered[name].state_dict(), tensors, f'the state "{name}"')
            except UserError:
                continue
            text = hashlib.sha256(json.dumps(tree).encode()).hexdigest()
            found[name] = text + digest_of(tensors.items())
        return found
