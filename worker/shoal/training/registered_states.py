"""The states that a script has registered: taken for checkpoints, and watched for lines that only a loop's body runs.

`SavedStates` takes them when the script is through with the step, not with the blocks: so what the script makes of an
evaluation right after the step is saved with the step. Only the worker that leads a save takes them. Where a save is
asked for between a step and the next batch, it begins before the vote of the next one, with the states as they were
when the script asked for that batch. Made by checkpoint_saving.py, called by boundary.py.

`LaggingStates` names, once, each state that only the loop's body brings up to date. A member without lanes runs no
body. What stood still there while steps were committed, and moves as soon as a body runs, is some steps behind from
then on; if this worker becomes rank 0, checkpoints and joiners get it so. States are looked at only when a member gets
lanes after steps without, and where it first rehearses one in a world. Called by boundary.py. How a state is written
and given to joiners stays out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress

from shoal_protos.errors import ShoalError, UserError
from shoal_protos.training_log import get_logger
from torch import Tensor

from shoal.checkpoint.saver import Saver
from shoal.checkpoint.writer import NoStates, TakenStates
from shoal.config.out_of_memory import is_out_of_memory
from shoal.core.plain import encode
from shoal.core.saving import Saving
from shoal.exchange.world import World
from shoal.group.group import WorldChanged
from shoal.state.training_state import digest_of
from shoal.training.context import TrainingContext
from shoal.training.parameters import Parameters

log = get_logger("shoal")

NONE_EARLY: tuple[int, TakenStates | NoStates | None] = -1, None


class SavedStates:
    """Those of one worker. `saver`: None where nothing is saved."""

    def __init__(self, context: TrainingContext, parameters: Parameters, saver: Saver | None, saving: Saving) -> None:
        self._context, self._parameters, self._saver, self._saving = context, parameters, saver, saving
        self._early = NONE_EARLY
        """As of the end of a step of which a save is asked for that is still to begin."""
        self._is_final = False
        """The script trains no more."""
        self.are_broken = False
        """Whether they could not be taken, and will not be any other time: it is the script's fault, and it has ended.
        """

    @property
    def asks_at_hand(self) -> bool:
        """Whether this worker asks for a save of the last step before its weights change, and one can begin then. The
        others take its word: one that has just joined knows of no save that is under way.
        """
        context, step = self._context, self._context.state.step
        asks = self._saving.asked_at == step and self._saver is not None and not context.is_over
        return asks and self._saving.can_begin(step)

    def take(self) -> None:
        """The script is through with the last step: what it has registered is part of the checkpoint of that step,
        where this member leads one, or is about to. Raises `WorldChanged`; then it is still to be taken.
        """
        saver, step = self._saver, self._context.state.step
        if saver is None:
            return
        if saver.lacks_states:
            saver.states = self._settled()
        elif self.asks_at_hand and self._context.rank == 0 and self._early[0] != step:
            self._early = step, self._settled()

    def retake(self) -> None:
        """Callbacks were told of an evaluation right after the last step: it may have been another member's, and the
        states were taken before.
        """
        self._early = NONE_EARLY
        if self._saver is not None and self._saver.may_retake(self._context.state.step):
            self._saver.states = self._now()

    def put_early(self) -> None:
        """A save has begun that was asked for between the last step and the next batch. Raises `WorldChanged`."""
        step, states = self._early
        if self._saver is not None and self._saver.lacks_states:
            self._saver.states = states if step == self._context.state.step else self._settled()
        self._early = NONE_EARLY

    def on_left(self) -> None:
        """The script has left the loop, or ends: it changes no state of the last step any more."""
        self._is_final = True
        with suppress(WorldChanged):  # then the save fails, and says so
            self.take()

    def on_return(self) -> None:
        """All have gone back to a checkpoint, or to the start."""
        self._early, self.are_broken = NONE_EARLY, False
        if self._saver is not None and self._saver.lacks_states:
            self._saver.states = NoStates("all went back to a checkpoint before the script's own states could be taken")

    def _settled(self) -> TakenStates | NoStates:
        if self._context.state.registered:
            self._parameters.settle()  # a state of the user's may be one of parameters
        return self._now()

    def _now(self) -> TakenStates | NoStates:
        """In the loop it raises what a `state_dict` raises. After the last step that is why a save has failed, for
        nothing else is left to be lost by it.
        """
        self.are_broken = False
        try:
            return TakenStates.of(self._context.state.registered)
        except Exception as error:
            if is_out_of_memory(error):
                return NoStates(f"no memory for a copy of the states that the script has registered ({error})")
            is_final = self._is_final or self._context.is_over
            if not (is_final or isinstance(error, ShoalError)):
                raise
            self.are_broken = is_final
            if isinstance(error, ShoalError):
                return NoStates(str(error))
            *_, call = getattr(error, "__notes__", ("taking the states that the script has registered",))
            return NoStates(f"{call} raised {type(error).__name__}: {error}")


LOOKS = 2
"""Steps with a body that are looked at: what follows `engine.step()` in the body shows at the second one's boundary."""


class LaggingStates:
    """What this worker's states were like when it had no lanes, and how they move when it has some."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._at_rest: dict[str, str] = {}
        """Digests by name, as of the end of the last body before a world without lanes; empty: it has lanes."""
        self._begins_rest = False
        """A world without lanes has begun, perhaps before the last body's end."""
        self._since = 0
        """The step then."""
        self._missed = self._looks = 0
        self._still: dict[str, str] = {}
        """Of those that no step without lanes has changed."""
        self._has_rehearsed = False
        self._named: set[str] = set()

    def forget(self) -> None:
        """This worker's states are others now."""
        self._at_rest, self._still, self._looks = {}, {}, 0
        self._begins_rest = self._has_rehearsed = False

    def on_world(self, world: World) -> None:
        """A world begins, and owes no boundary."""
        state, before = self._context.state, self._at_rest
        self.forget()
        if not world.lanes:
            self._at_rest, self._begins_rest = before, not before
        elif before and state.followed > self._since:
            self._keep_still(before)
            self._looks = LOOKS

    def end_body(self) -> None:
        """The script is through with the last step."""
        if self._begins_rest:
            state, self._begins_rest = self._context.state, False
            self._since, self._at_rest = state.followed, self._digests(state.registered)

    def before_rehearsal(self) -> None:
        """A body is about to run for nothing, between two boundaries."""
        if not self._has_rehearsed:
            self._has_rehearsed = True
            self._keep_still(self._at_rest)

    def after_rehearsal(self) -> None:
        """It has run: what it has moved would not be seen to have stood still when lanes come."""
        if not self._looks:  # else they have come meanwhile
            self.after_a_body()
            self._still = {}

    def _keep_still(self, before: Mapping[str, str]) -> None:
        """The steps since then have changed none of these."""
        now, self._missed = self._digests(before), self._context.state.followed - self._since
        self._still = {name: digest for name, digest in before.items() if now.get(name) == digest}

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
