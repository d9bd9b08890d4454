"""Averages of weights where parameters are whole (stages 0 to 2): what owners answer, and the copy that a reader gets.

Each bucket is asked for as a unit of stage 3 is (exchange/unit_fetch.py), between any two votes and by any member;
owners answer beside their own work, with lanes or without. What a member holds itself is read without a message. In a
cell of several processes a member asks for its part of the model, at whichever coordinate the owners are.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

import torch

from shoal.blocks.flat import Flats, empty_flats
from shoal.blocks.shared_weights import Key
from shoal.blocks.values import WholeValues
from shoal.exchange.traffic import UnitTraffic
from shoal.exchange.unit_fetch import UnitFetch, answers_of
from shoal.exchange.world import World
from shoal.group.group import Answers
from shoal.process.device import DeviceCopy
from shoal.training.context import TrainingContext


@dataclass(frozen=True, slots=True)
class AskedBucket:
    """A bucket, as a fetch asks for it: its memory is there."""

    number: int

    def allocate(self) -> None:
        """Nothing is to be found."""

    def restore(self) -> None:
        """No forward waits for it."""


class WholeAverages:
    """Of one worker."""

    def __init__(self, context: TrainingContext) -> None:
        self._context, self._averages = context, context.state.held.home.averages
        self._traffic: UnitTraffic | None = None
        self._world: World | None = None
        self._key: Key
        self.answer: Answers
        """What a rank gets that asks for a bucket."""

    def on_world(self, world: World) -> None:
        """A world has begun."""
        layout = self._context.state.layout
        self._traffic = UnitTraffic(world.plan, world.rank, layout, [(one.index,) for one in layout.buckets])

    def stand(self, world: World) -> None:
        """At the boundary at hand."""
        assert self._traffic is not None
        self._world, self._key = world, (world.plan.generation, self._context.boundaries)
        lock = self._context.state.held.segments.lock
        self.answer = answers_of(self._traffic, self._key[1], self._averages, lock)

    def bring(self) -> Flats:  # per bucket (elements,) of its dtype
        """A copy of all, as of the boundary at hand. Raises `WorldChanged`."""
        world, traffic, context = self._world, self._traffic, self._context
        assert world is not None and traffic is not None
        layout, loop, module = context.state.layout, context.loop, context.state.module
        flats = empty_flats(layout)
        values, own = WholeValues(layout, flats), traffic.own(context.boundaries)

        def put_own(bucket: int) -> list[DeviceCopy]:
            with torch.no_grad():
                for stretch in own[bucket]:
                    values.of(stretch).copy_(self._averages.of(stretch))
            return []

        fetch = UnitFetch(
            world.group, traffic, self._key, values, put_own, is_in_lane=lambda: loop.in_flight and module.training
        )
        buckets = [AskedBucket(bucket.index) for bucket in layout.buckets]
        fetch.begin(buckets[0])
        for bucket, following in zip_longest(buckets, buckets[1:]):
            if following is not None:
                fetch.begin(following)
            fetch.finish(bucket)
        return flats
