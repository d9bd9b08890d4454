"""What the user's loop does, one call after the other: batches, backwards, steps, votes where it does none, its end.

All that can fail in an exchange is inside `backward` and `end_micro_batch`; when the world changes they take part in
the change (resize.py) and return, and the next batch is what is to be done next, perhaps the same lane again. Knows the
controller only through its link.

`ScriptEnd` is the end of a script where nothing else says at which step its job ends: the last step is the one at which
all end. Alone that is the step at hand. With a controller this worker waits until it is told, outside all exchange:
another script may be at work for long, or go on with a step that is none here. Called at the script's end (exit.py),
and by doors whose scripts say that they are through.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from shoal_protos.training_log import get_logger
from torch import Tensor

from shoal.cells.call import LoopPlace
from shoal.data.source import NO_SAMPLES
from shoal.exchange.ballot import Request
from shoal.group.group import WorldChanged
from shoal.process.numerics import check_threads
from shoal.state.training_state import ENDS
from shoal.training.averages import AveragesRead
from shoal.training.context import TrainingContext
from shoal.training.lane_loop import Made
from shoal.training.parts import Parts
from shoal.training.pipeline import Pipeline

log = get_logger("shoal")
IDLE_SECONDS = 0.1
"""Pause between two votes without a step."""
WAITING = ("save", *ENDS)
"""Kinds of requests that may stay for many votes: for a disk, for a step."""


class TrainingLoop:
    """The loop of one engine."""

    def __init__(self, context: TrainingContext, parts: Parts) -> None:
        self._context, self._parts = context, parts
        self.averages = AveragesRead(context, parts.step.parameters)
        self.pipeline = Pipeline(context)
        self._endings: list[Callable[[], None]] = []

    def add_ending(self, ending: Callable[[], None]) -> None:
        """Called on every member, once, when the loop is over and the job's last step committed."""
        self._endings.append(ending)

    # ---- batches

    def batches(self) -> Generator[Any, None, None]:
        """What the user's loop is to train, until the last step is committed and all that was asked for is done."""
        context = self._context
        if context.is_over and context.left_loop:
            means = "one loop over the engine is the whole job, all epochs; another one has no batch"
            log.warning("the_job_is_over", step=context.global_step, means=means)
        context.left_loop = False
        try:
            yield from self._batches_until(lambda: context.is_over)
        finally:
            self._leave_loop()
            context.untrained.on_left(context.state.step, context.state.last_step)
            context.loop.fetcher.close()
            context.autocast.end()
            context.forward_seed.disarm()

    def batches_to(self, end: int) -> Generator[Any, None, None]:
        """The same for a loop that comes back for more: no step after `end` is begun. Where the job's last step is
        committed by then, all is done as after `batches`.
        """
        context = self._context
        try:
            yield from self._batches_until(lambda: context.is_over or context.state.step >= end)  # in a world at least
            if context.is_over and not context.left_loop:
                self._leave_loop()
                context.loop.fetcher.close()
        finally:
            context.autocast.end()
            context.forward_seed.disarm()

    def enter(self) -> None:
        """Joins the job without a loop, and trains nothing. May raise as `Resize.take_part`."""
        self._context.state.module_guard.check_before_the_loop()
        self._context.first_weights.on_loop()
        self._parts.resize.enter()

    def end(self) -> None:
        """The job's last step is committed, and the script has left its loop before it knew that it is the last."""
        self._settle_end()
        self._leave_loop()
        self._context.loop.fetcher.close()

    def _leave_loop(self) -> None:
        self._context.left_loop = True
        self._parts.saving.states.on_left()
        if self._context.is_over:
            endings, self._endings = self._endings, []
            for ending in endings:
                ending()

    def _batches_until(self, is_over: Callable[[], bool]) -> Iterator[Any]:
        """`_batches`; after the job's last step, requests and saves, unless all go back before they are done."""
        context = self._context
        while True:
            yield from self._batches(is_over)
            if context.is_over and not context.left_loop:
                self._settle_end()
            if is_over():
                return

    def _settle_end(self) -> None:
        """After the last step: waits for what is left of it."""
        self._settle_evaluations()
        self._settle_requests()
        self._settle_saves()
        while self._context.is_over and not self._context.done:
            # Why: the script may change parameters afterwards, and the job's digest is of those that it has trained.
            self.vote()

    def _batches(self, is_over: Callable[[], bool]) -> Iterator[Any]:
        context, parts = self._context, self._parts
        context.state.module_guard.check_before_the_loop()
        context.loop_has_begun = True
        context.first_weights.on_loop()
        while not is_over():
            if self.averages.are_shown:
                self.averages.refuse("the next batch")
            parts.update.check_whole()
            if context.world is None:
                yield from self._warm_up()
                parts.resize.enter()
            elif context.link.stopping:
                parts.resize.take_part()
            elif (rehearses := context.is_to_rehearse) or context.world.lanes:
                context.faults.at("forward", context.state.step + 1)
                for check in context.state.guards.before_batch:
                    check(context.world, context.state.record)
                try:
                    parts.boundary.end_body()
                    if rehearses:
                        parts.boundary.before_rehearsal()
                    batch = self._next_batch(rehearses)
                except WorldChanged:
                    parts.resize.take_part(broken=True)
                    continue
                if batch is NO_SAMPLES:
                    self._pass_over()
                else:
                    context.forward_seed.arm(context.state.step, *context.loop.place)
                    context.autocast.begin()
                    yield batch
                if rehearses:
                    context.lane_clock.end_rehearsal(context.config.micro_batches_per_lane)
                    parts.boundary.after_rehearsal()
                    if context.loop.is_warming_up:
                        context.loop.end_warm_up(context.state)
            else:
                self._guarded(self._standby_step if context.world.plan.steps else self._vote_and_idle)

    def _next_batch(self, rehearses: bool) -> Any:
        """Raises `WorldChanged` from a dataset that computes with the model."""
        context = self._context
        context.is_busy = True
        try:
            if context.hub is not None:
                context.hub.come_to(LoopPlace.LANE)
                if context.loop.begins_lane:
                    context.hub.begin_lane()
            assert context.world is not None
            loop, state = context.loop, context.state
            context.lane_clock.begin(context.world.group.progress, loop.begins_lane)
            return loop.warm_up_batch(state) if rehearses else loop.next_batch(state)
        finally:
            context.is_busy = False

    def _warm_up(self) -> Iterator[Any]:
        """A joiner runs one lane whose result is thrown away, so that compiling stalls nobody; then it is ready."""
        context = self._context
        if not (context.loop.is_warm or context.link.alone):
            batch = context.loop.warm_up_batch(context.state)
            context.forward_seed.arm(0, *context.loop.place)
            context.autocast.begin()
            yield batch

    # ---- a micro-batch

    def backward(self, loss: Tensor | Made, more: bool = False) -> None:
        """`Engine.backward`; of a schedule's call, `Engine.run`."""
        context, loop, state = self._context, self._context.loop, self._context.state
        if not callable(loss) and state.layout.stages:
            self.pipeline.refuse("engine.backward")
        if self.averages.are_shown:
            self.averages.refuse(loop.calls.gradient)
        if isinstance(loss, Tensor):
            context.autocast.end()
        self._parts.update.check_whole()
        self._parts.resize.leave_broken_cell()
        if context.world is not None and context.link.stopping:
            self._parts.resize.take_part()
        if not loop.in_flight:
            loop.check_void(loop.calls.gradient)
            return
        ends = LoopPlace.BACKWARD_OF_MORE if more else LoopPlace.BACKWARD
        if self._comes_with_a_change(LoopPlace.RUN if callable(loss) else ends):
            self.backward(loss, more)
            return
        loop.prepare_backward(loss, state, more)
        context.faults.at("backward", state.step + 1)
        reducing, parameters = self._parts.step.reducing, self._parts.step.parameters
        make = partial(loop.backward, loss, state)
        if context.world is None or more or not reducing.is_next:
            try:
                with parameters.in_backward(), context.in_backward():
                    reducing.backward_here(make)
                if more:
                    context.autocast.begin()
                else:
                    context.lane_clock.end(loop.at_lanes_last_backward)
            except WorldChanged:
                self._parts.resize.take_part(broken=True)
            return
        try:
            reducing.begin()
        except WorldChanged:
            self._parts.resize.take_part(broken=True)
            self.backward(loss, more)
            return
        try:
            with parameters.in_backward(), context.in_backward():
                reducing.backward(make)
            context.lane_clock.end(loop.at_lanes_last_backward)
        except WorldChanged:
            self._parts.resize.take_part(broken=True)

    def end_micro_batch(self) -> bool:
        """`Engine.step`."""
        if self.averages.are_shown:
            self.averages.refuse("engine.step")
        context, loop, state = self._context, self._context.loop, self._context.state
        self._parts.resize.leave_broken_cell()
        if not loop.in_flight:
            loop.forget_void("engine.step")
            return False
        if loop.is_warming_up:
            loop.end_warm_up_batch(state)
            return False
        self._parts.step.parameters.check_step()
        if loop.at_last_backward:
            for check in state.guards.before_last_step:
                check(context.world)
            state.buffers.check()
            check_threads(context.config.torch_threads)
        before = state.step
        loop.end_micro_batch(state)
        if context.hub is not None:
            context.hub.come_to(LoopPlace.BETWEEN)
        context.step_on()
        if loop.lanes_done:
            self._guarded(self._parts.step.make)
        return state.step > before  # also where others had passed the vote, and this worker caught up

    def skip(self) -> bool:
        """`Engine.skip`."""
        if self.averages.are_shown:
            self.averages.refuse("engine.skip")
        if self._context.state.layout.stages:
            self.pipeline.refuse("engine.skip")
        loop, state = self._context.loop, self._context.state
        self._context.autocast.end()
        self._parts.update.check_whole()
        self._parts.resize.leave_broken_cell()
        if not loop.in_flight:
            loop.forget_void("engine.skip")
            return False
        if self._comes_with_a_change(LoopPlace.SKIP):
            return self.skip()
        loop.skip(state)
        return self._end_without_gradient()

    def _pass_over(self) -> None:
        """A micro-batch that has no samples: the script is not given it."""
        loop = self._context.loop
        if not loop.in_flight:
            loop.forget_void("engine.step")
        elif self._comes_with_a_change(LoopPlace.SKIP):
            self._pass_over()
        else:
            loop.skip(self._context.state, has_samples=False)
            self._end_without_gradient()

    def _end_without_gradient(self) -> bool:
        self._context.lane_clock.drop()
        if not self._context.loop.is_warming_up:
            try:
                self._parts.step.reducing.skip()
            except WorldChanged:
                self._parts.resize.take_part(broken=True)
        return self.end_micro_batch()

    def _comes_with_a_change(self, place: LoopPlace) -> bool:
        """All that was handed out is here, and so are all members of the cell; whether the world has changed meanwhile,
        which has been taken part in. Raises `UserError` where some are at another place of their loops.
        """
        context = self._context
        try:
            self._parts.step.parameters.settle()
            if context.hub is not None and context.world is not None:
                context.faults.at("meet", context.state.step + 1)
                context.hub.meet(place)
        except WorldChanged:
            self._parts.resize.take_part(broken=True)
            return True
        return False

    # ---- without a batch

    def _standby_step(self) -> None:
        """A member without lanes takes part in the exchange, the vote and the hand-out all the same."""
        self._parts.step.reducing.stand_by()
        self._parts.step.make()
        self._context.lane_clock.on_idle_step()

    def vote(self) -> None:
        """One vote without a step, or a part in a change of the world."""
        self._context.awaits_vote = True
        if self._context.world is None or self._context.link.stopping:
            self._parts.resize.take_part()
        else:
            self._guarded(self._vote_and_idle)
        self._context.awaits_vote = False

    def _vote_and_idle(self) -> None:
        """Where no step runs (paused, below `min`, the end), members vote all the same, some times a second."""
        record = self._parts.step.vote_alone()
        if all(request.kind in WAITING for request in record.requests) and self._context.begins is None:
            self._context.link.pause(IDLE_SECONDS)

    def _guarded(self, action: Callable[[], object]) -> None:
        """`action`, which passes a vote, and the generation that the vote has named; or a part in a change."""
        try:
            action()
            self._parts.resize.begin_planned()
        except WorldChanged:
            self._parts.resize.take_part(broken=True)

    # ---- what the script waits for

    def ask(self, request: Request, call: str) -> str | None:
        """Make a request: in the loop return at once; after it block until carried out, and until a save under way has
        come to its end. A fingerprint's digest is returned then.

        In a warm-up it is ignored, as this worker is not in the job yet. So it is in a lane that a broken cell has made
        void, where the script may ask because of a value that means nothing; it comes by that lane again.
        """
        context, requests, saving = self._context, self._parts.requests, self._parts.saving
        if context.loop.is_warming_up or _is_in_a_void_lane(context, self._parts):
            return None
        if context.world is None and context.may_begin_at_its_end:
            self.enter()
        requests.check(request, call)
        requests.add(request, by_script=True)
        if not context.left_loop:
            return None
        self._settle_requests()
        while saving.busy:
            saving.patience.check()
            self.vote()
        failure = requests.take_failure(request)
        if failure is not None:
            raise failure
        return requests.digest if request.kind == "fingerprint" else None

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """`Engine.evaluating`."""
        self._context.first_weights.check("engine.evaluating")
        self._parts.step.parameters.before_evaluating()
        with self._parts.evaluation.running():
            yield
        self._parts.step.parameters.after_evaluating()
        self._share_evaluation()
        if self._context.is_over and self._context.left_loop:
            self._settle_evaluations()

    def _share_evaluation(self) -> None:
        """Where one is over that all are to have: with all who evaluate, through any change of the world; then it is
        told.
        """
        evaluation = self._parts.evaluation
        while evaluation.is_over_here:
            try:
                evaluation.share()
            except WorldChanged:
                self._parts.resize.take_part(broken=True)
        evaluation.forget()
        evaluation.tell()

    def _settle_requests(self) -> None:
        """After the last step: waits until what this worker's script has asked for is carried out."""
        patience = self._parts.saving.patience
        patience.begin()
        while self._parts.requests.has_awaited:
            patience.check()
            self.vote()
        self._parts.requests.forget_scripts()

    def _settle_evaluations(self) -> None:
        """After the last step no vote of a step comes: waits for one that carries what is left."""
        while self._parts.evaluation.has_unsettled:
            self.vote()

    def _settle_saves(self) -> None:
        """After the last step: waits until the last checkpoint that was due is there, or has failed once more:
        that is tried again at the script's end.
        """
        saving = self._parts.saving
        saving.on_end()
        while self._context.is_over and not saving.has_settled:
            saving.patience.check()
            saving.ask_for_what_is_owed()
            self.vote()


def _is_in_a_void_lane(context: TrainingContext, parts: Parts) -> bool:
    is_in_body = not (context.left_loop or parts.evaluation.is_in_a_callback)
    return is_in_body and not context.is_cell_whole and (context.loop.in_flight or context.loop.comes_again)


class ScriptEnd:
    """Of one engine's script."""

    def __init__(self, context: TrainingContext, parts: Parts, training: TrainingLoop) -> None:
        self._context, self._parts, self._training = context, parts, training
        self._loops: list[Callable[[], None]] = []

    def add_loop(self, close: Callable[[], None]) -> None:
        """Called when the script goes over nothing any more, which may be its first word of a loop that it has left."""
        self._loops.append(close)

    def close_loops(self) -> None:
        """No loop of the script goes on."""
        for close in self._loops:
            close()

    @property
    def is_open(self) -> bool:
        """Whether nothing but the script says at which step the job ends, and it has come to where that may be."""
        context = self._context
        has_trained = context.world is not None and context.state.step > 0
        is_there = has_trained or context.may_begin_at_its_end
        return not context.state.last_step and is_there and not context.left_at

    def reach(self) -> None:
        """The script is through with its epochs: returns once the job's last step is known, and all that is left of it
        is done. Before the last step, it does nothing where something else says which one that is. May raise as
        `Resize.take_part`.
        """
        self.close_loops()
        context = self._context
        if context.is_over and not context.left_loop:
            self._training.end()  # a loop that comes back for each epoch was left in the last step's body
        if not self.is_open:
            return
        if context.world is None:
            self._training.enter()
        self._end_body()
        context.is_through = True
        if context.link.alone:
            context.state.last_step = context.state.step
        while not context.state.last_step:
            self._wait()
        self._training.end()

    def _end_body(self) -> None:
        try:
            self._parts.boundary.end_body()
        except WorldChanged:
            self._parts.resize.take_part(broken=True)

    def _wait(self) -> None:
        context = self._context
        if context.world is None or context.link.stopping:
            self._parts.resize.take_part()
            self._end_body()  # the members of a new world wait for this one's word, too
            return
        context.awaits_end = True
        self._parts.status.publish()
        while not context.link.stopping:
            context.link.pause(IDLE_SECONDS)
        context.awaits_end = False
