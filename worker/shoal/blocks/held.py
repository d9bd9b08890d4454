"""The blocks that this worker holds with valid bits, with their optimizer state, and the update of just these blocks.

What is held, what it begins with and what is to come is said here; where the state lies, and how an update reaches it,
is a home's affair (state_home.py). Called by the training state, by fills, and by what writes and reads checkpoints.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping

import torch
from shoal_protos.runs import NO_BLOCKS, Runs
from torch import Tensor

from shoal.blocks.loaded_state import WEIGHTS, LoadedState, State, probe_state_bytes
from shoal.blocks.segments import stretch_of
from shoal.blocks.state_home import FillMemory, FirstStates, OnUpdated, ReceivedStates, StateHome, unheard
from shoal.blocks.values import BlockValues, RangeValues, StretchValues
from shoal.blocks.whole_tensors import TensorRun
from shoal.core.layout import Stretch
from shoal.core.value_places import Places
from shoal.optim.twin import give_back_own_values, take_over_hyper_parameters


class HeldBlocks:
    """Which blocks there are, their state, and `apply`, the update."""

    def __init__(
        self,
        home: StateHome,
        tensors: Mapping[str, Tensor],  # each of its parameter's shape and dtype
    ) -> None:
        """`tensors`: the user's parameter objects by name, under which a state that exists already is found."""
        self.home = home
        self.segments = segments = home.segments
        self.layout, self.keeps_weights = segments.layout, segments.keeps_weights
        self.effects, self.optimizer_step = segments.effects, segments.optimizer_step
        self.loaded = LoadedState(segments.layout, segments.user, tensors, self.effects)
        """What `hold` begins with, besides first values."""
        self._expected = FillMemory(self.layout, NO_BLOCKS)
        """Where parameters are received that are with the state."""

    @property
    def runs(self) -> Runs:
        """The blocks that are held."""
        return self.segments.runs

    def state_bytes_of_a_block(self) -> int:
        """What one block's state takes, also before there is any."""
        return probe_state_bytes(self.layout, self.segments.twin, averages=self.segments.average_rule is not None)

    def places_in(self, stretch: Stretch) -> Mapping[str, Places]:
        """Keys of its state that is not one value for each element, with the elements of its bucket that have one."""
        return self.segments.places_in(self.layout.buckets[stretch.bucket])

    # ---- to hold, to take, to free

    def hold(self, runs: Runs, first: StretchValues | None = None) -> None:
        """Begins to hold blocks in the state of step 0. `first`: the parameters' first values, in wide dtypes."""
        kept = self.segments.parameters if self.keeps_weights else None
        self.home.put(self.layout.stretches(runs), FirstStates(self.layout, self.loaded, first, kept))

    def expect(self, runs: Runs) -> None:
        """The blocks that a world fills, at its beginning: `memory_for` is asked for these."""
        segments = self.segments
        if segments.shared is not None:
            segments.shared.give_back(self.layout.stretches(self._expected.runs - self.runs - runs))
        self._expected = FillMemory(self.layout, runs, segments.place_of_fills.weights_memory)
        self.home.expect(runs)

    def memory_for(self, stretch: Stretch, key: str, dtype: torch.dtype) -> Tensor:  # (elements,) of `dtype`
        """Where a state of expected blocks is received, for `take`: all that is taken of one stretch is one segment."""
        if key != WEIGHTS:
            return self.home.memory_for(stretch, key, dtype)
        if self.segments.shared is not None and not self.layout.runs([stretch]) & self.runs:
            return self.segments.shared.part(stretch)
        return self._expected.part(stretch, key, dtype)

    def take(
        self,
        states: Mapping[Stretch, State],  # each (elements of the stretch,), or () for what all its blocks share
    ) -> None:
        """Begins to hold blocks in the state that another holder had.

        What is held already is replaced: a plan may fill again what the one before had filled and it releases.
        """
        kept = self.runs - self.layout.runs(states)
        if kept != self.runs:
            self.home.keep_only(kept)
        self.home.put(list(states), ReceivedStates(self.layout, states))
        self.segments.join_neighbours()

    def own(self, runs: Runs) -> None:
        """These are owned here from now on: what is held of them, and of others, moves to where it belongs."""
        self.segments.own(runs)

    def keep_only(self, runs: Runs) -> None:
        """Frees every other block."""
        if not self.runs <= runs:
            self._begin_change()
            self.home.keep_only(runs)

    def _begin_change(self) -> None:
        """Of parameters that others may see."""
        if self.segments.shared is not None:
            self.segments.shared.begin_change()

    def join(self) -> None:
        """What was expected has come, and segments become few again."""
        self._expected = FillMemory(self.layout, NO_BLOCKS)
        self.home.join()
        self.segments.join()

    # ---- the update

    def runs_in(self, bucket: int, start: int, stop: int, gradients: RangeValues) -> Iterator[TensorRun]:
        """Elements `[start, stop)` of a bucket, which are held, as segments have them: where their state lies."""
        segments, at = self.segments.in_order, start
        first = Stretch(bucket, start // self.layout.buckets[bucket].block_elements, self.layout.buckets[bucket].blocks)
        for segment in segments[max(0, bisect_right(segments, first, key=stretch_of) - 1) :]:
            begin, end = self.layout.elements(segment.stretch)
            if segment.stretch.bucket > bucket or at == stop:
                break
            if segment.stretch.bucket == bucket and begin <= at < end:
                last, device = min(end, stop), segment.parameter.device
                here = slice(at - begin, last - begin)
                weights = segment.parameter if segment.has_master else self.segments.parameters_of(segment)
                gradient = gradients.range(bucket, at, last).to(device)
                own = self.segments.twin.state[segment.parameter]
                state = self.optimizer_step.whole.odd.cut(bucket, own, begin, at, last)
                yield TensorRun(at, last, weights.detach()[here].to(device), gradient, state)
                at = last
        assert at == stop, f"{bucket}:{start}:{stop} is not held"

    def apply(
        self,
        gradients: BlockValues,  # reduced; what is not held is not read
        scale: float,
        on_updated: OnUpdated = unheard,
    ) -> None:
        """One update of all held blocks with the reduced gradients, times `scale` (clipping) first.

        The last buckets come first, as forwards begin with them. `on_updated` hears of a bucket when it and those after
        it are updated; not of each.
        """
        mine, users = self.segments.twin, self.segments.user
        self._begin_change()
        take_over_hyper_parameters(mine, users)
        self.home.update(gradients, scale, on_updated)
        if not self.segments.steps_in_parts:  # torch's own classes change nothing
            give_back_own_values(mine, users)
