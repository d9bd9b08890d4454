"""Where the lanes stand in their streams, as all members know it: a bookmark for each lane.

Pure. Which samples a micro-batch has follows from its number alone, so a bookmark saves reading and changes no bit: a
lane that goes on elsewhere begins at its newest one, and reads through what lies between it and the next micro-batch.
Votes carry them, one of each member's at a time; joiners and checkpoints get all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from shoal_protos.errors import UserError

STATE_BYTES = 1_024
"""Of a stream's own state, as JSON; without one, samples are counted."""
MOST_BYTES = STATE_BYTES + 160
"""Of a bookmark."""


@dataclass(frozen=True, slots=True)
class Bookmark:
    """A place in one lane's stream, between two micro-batches."""

    lane: int
    batches: int
    """Micro-batches that the lane has read until there."""
    passes: int
    """Passes over the stream that have ended."""
    begun: int
    """The lane's samples before the pass at hand."""
    offset: int
    """Samples that the stream has given in this pass, the ones of other lanes among them."""
    state: str = ""
    """The stream's own state there, JSON; empty: it has none."""

    def to_text(self) -> str:
        return json.dumps(astuple(self), separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Bookmark:
        """The inverse of `to_text`. Raises `ValueError`."""
        if not isinstance(text, str) or len(text) > MOST_BYTES:
            raise ValueError(f"a place in a stream is {str(text)[:80]!r}")
        found = json.loads(text)
        kinds = [int, int, int, int, int, str]
        if not isinstance(found, list) or [type(value) for value in found] != kinds or min(found[:5]) < 0:
            raise ValueError(f"{text[:80]!r} is no place in a stream")
        return cls(*found)


class StreamPositions:
    """The newest bookmark of each lane that all know."""

    def __init__(self) -> None:
        self._known: dict[int, Bookmark] = {}

    def before(self, lane: int, batches: int) -> Bookmark | None:
        """From where a lane can go on that has read so many micro-batches; None: from the beginning."""
        found = self._known.get(lane)
        return found if found is not None and found.batches <= batches else None

    def most_useful(self, mine: Iterable[Bookmark]) -> Bookmark | None:
        """The one by which most reading is saved: of the lane whose known place is farthest behind."""
        gains = [(one.batches - self._batches(one.lane), -one.lane, one) for one in mine]
        best = max(gains, default=None, key=lambda gain: gain[:2])
        return best[2] if best is not None and best[0] > 0 else None

    def _batches(self, lane: int) -> int:
        return self._known[lane].batches if lane in self._known else 0

    def learn(self, texts: Iterable[str]) -> None:
        """Raises `ValueError` for what is no bookmark."""
        for text in texts:
            found = Bookmark.from_text(text)
            self._known[found.lane] = found

    def replace(self, texts: Iterable[str]) -> None:
        """Another's knowledge in place of one's own. Raises `ValueError`; then nothing has changed."""
        found = [Bookmark.from_text(text) for text in texts]
        self._known = {one.lane: one for one in found}

    def to_texts(self) -> list[str]:
        return [self._known[lane].to_text() for lane in sorted(self._known)]


@dataclass(frozen=True, slots=True)
class StreamOrder:
    """The data order of a job over streams: what `Sampler` is for numbered samples. Lane l of step t has the next
    micro-batches of its stream.
    """

    lanes: int
    micro_batch_size: int
    micro_batches_per_lane: int
    length: int | None = None
    """What the stream says of its length."""
    samples: int = 0
    """Numbered ones."""

    @property
    def samples_per_step(self) -> int:
        return self.micro_batch_size * self.lanes * self.micro_batches_per_lane

    @property
    def steps_per_epoch(self) -> int:
        """Full steps of one pass; 0: nobody knows."""
        return (self.length or 0) // self.samples_per_step

    def last_step(self, max_steps: int | None, epochs: int | None) -> int:
        """How many steps the job has; 0: the script says it. Raises `UserError` where nothing can end it."""
        if epochs is not None and not self.steps_per_epoch:
            raise UserError(
                f"`shoal.epochs` is {epochs}, and the stream does not say how long it is (it has no __len__, or less "
                "than a step); give `shoal.max_steps`."
            )
        ends = [] if epochs is None else [epochs * self.steps_per_epoch]
        ends += [] if max_steps is None else [max_steps]
        if not ends and not self.steps_per_epoch:
            raise UserError("a stream that does not say how long it is has no epochs; give `shoal.max_steps`.")
        return min(ends, default=0)

    def number(self, step: int, micro: int) -> int:
        """Of a micro-batch among those of its lane."""
        return step * self.micro_batches_per_lane + micro

    def step_of(self, number: int) -> tuple[int, int]:
        """Step and micro-batch: the inverse of `number`."""
        return divmod(number, self.micro_batches_per_lane)
