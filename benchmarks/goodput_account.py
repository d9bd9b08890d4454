"""Where the machine-seconds of a run of goodput.py went, from what its processes logged: pure arithmetic.

A process logs that it began, that it is ready to train, and each step that it committed. So each second of a machine
that is there belongs to one use, for all systems by one rule, and the uses add up to the machine-seconds:

    starting    until a process is ready, also one that an agent starts again
    waiting     from ready to its first step, but for a usual step
    training    steps, as long as they usually are in a world of so many machines
    redone      the same, of steps that had been committed before they began: after a return to a checkpoint
    longer      what steps take beyond that: pauses, saves, a busy machine; also a step that its machine did not end
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

USES = ("training", "starting", "waiting", "redone", "longer")


@dataclass(frozen=True)
class Logged:
    """One line of a process."""

    time: float
    machine: int
    kind: str
    """began, ready, step, discarded: a step that the system threw away."""
    step: int = 0
    samples: int = 0
    """Micro-batches of the step, of all machines."""


@dataclass(frozen=True)
class Account:
    """A run's figures."""

    committed: int
    """Micro-batches of steps that were committed within the run, each step once."""
    possible: float
    """Micro-batches at the system's own undisturbed rate for the machines that were there."""
    uses: Mapping[str, float]
    """Machine-seconds by use."""
    longest_gap: float
    """Seconds between two new steps."""

    @property
    def goodput(self) -> float:
        return self.committed / self.possible

    @property
    def machine_seconds(self) -> float:
        return sum(self.uses.values())


def account(
    log: Sequence[Logged],
    spans: Iterable[tuple[int, float, float]],
    rates: Mapping[int, float],
    began: float,
    ended: float,
) -> Account:
    """The figures of a run. `spans`: (machine, from, to) in which it was there, within `began` and `ended`, all in the
    log's time. `rates`: micro-batches a second of the undisturbed system, by its number of machines.
    """
    spans = list(spans)
    first = first_commits(log)
    new = sorted((line.time, line.samples) for line in first.values() if began < line.time <= ended)
    edges = [began, *(time for time, _ in new), ended]
    uses = dict.fromkeys(USES, 0.0)
    for machine, since, until in spans:
        mine = [line for line in log if line.machine == machine and since < line.time <= until]
        before = [line for line in log if line.machine == machine and line.time <= since]
        # what is there when the run begins trains already; a machine that comes later starts
        trains = since <= began and any(line.kind == "step" for line in before)
        _add_uses(uses, mine, (since, until), trains, _Steps(first, spans, rates))
    return Account(
        sum(samples for _, samples in new),
        sum(rates.get(count, 0.0) * seconds for count, seconds in _counts(spans, began, ended)),
        uses,
        max(later - earlier for earlier, later in pairwise(edges)),
    )


def first_commits(log: Iterable[Logged]) -> dict[int, Logged]:
    """The first line of each step."""
    first: dict[int, Logged] = {}
    for line in log:
        if line.kind == "step" and (line.step not in first or line.time < first[line.step].time):
            first[line.step] = line
    return first


@dataclass(frozen=True)
class _Steps:
    """What a step takes, and whether it was committed before."""

    first: Mapping[int, Logged]
    spans: Sequence[tuple[int, float, float]]
    rates: Mapping[int, float]

    def usual(self, line: Logged) -> float:
        """Seconds of such a step in an undisturbed world of the machines that are there."""
        there = sum(since < line.time <= until for _, since, until in self.spans)
        rate = self.rates.get(there) or max(self.rates.values())
        return line.samples / rate

    def redone(self, line: Logged, begun: float) -> bool:
        return line.kind == "discarded" or self.first[line.step].time < begun


def _add_uses(
    uses: dict[str, float], lines: Sequence[Logged], span: tuple[float, float], trains: bool, steps: _Steps
) -> None:
    """Of one machine while it was there without a break."""
    at, until = span
    use = "longer" if trains else "starting"
    for line in sorted(lines, key=lambda line: line.time):
        seconds, at = line.time - at, line.time
        if line.kind == "began":
            uses["starting"] += seconds
            use = "starting"
        elif line.kind == "ready":
            uses["starting"] += seconds
            use = "waiting"
        else:
            usual = min(seconds, steps.usual(line))
            uses["redone" if steps.redone(line, line.time - seconds) else "training"] += usual
            uses[use] += seconds - usual
            use = "longer"
    uses[use] += until - at


def _counts(spans: Sequence[tuple[int, float, float]], began: float, ended: float) -> Iterable[tuple[int, float]]:
    """(machines, seconds) between two changes."""
    edges = sorted({began, ended, *(edge for _, since, until in spans for edge in (since, until))})
    for since, until in pairwise(edges):
        yield sum(one <= since and until <= other for _, one, other in spans), until - since
