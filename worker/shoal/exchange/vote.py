"""The vote: the only commit there is.

One small all-gather on CPU tensors, entered once this worker holds all that the commit needs; a worker that has passed
it has committed. A row is bounded: the plan alone says how long it is, so that the same reports fit after any loss. The
ballot in it has room for the numbers of every subtree of lanes, its float64 part (sums of squares, one per whole
subtree of blocks owned) for those of the norm; names and requests are limited where they are given. Knows no
controller.

`gather_of` is the group's own all-gather, torn where a test has planted a fault in the vote: once all other members
have voted, this worker's row goes to one of them, which then passes the vote; the fault strikes; the others have not
passed it and must roll forward. A row is on its way once the kernel has it. A killed worker may be known as dead, and
the world stopped, before that member has read it; a frozen one is not, so a test that needs a torn vote freezes the
worker first.

In a vote the copies of some blocks are compared (`compare`): a column per block, a row per member: the checksum of its
copy, or 0 where it has none. Who holds what need not be known there, so a row has the size of the sample and no more.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from itertools import chain
from operator import and_
from typing import Any

import torch
from shoal_protos.corruption import CorruptBlock
from shoal_protos.errors import UserError
from shoal_protos.runs import Span
from shoal_protos.text import plural
from torch import Tensor

from shoal.core.misses import all_at, every_one
from shoal.core.stream_position import MOST_BYTES
from shoal.core.tree import add, fold_numbers, total
from shoal.exchange.ballot import HALT, Ballot, Request
from shoal.exchange.packing import as_bytes_tensor
from shoal.exchange.pieces import FillTimes
from shoal.exchange.traffic import Traffic
from shoal.group.group import GATHER_TAG, Group
from shoal.process.faults import Faults

BALLOT_BYTES = 5_120 + MOST_BYTES
"""The ballot's part of a row, where nobody has more than two subtrees of lanes."""
MOST_NAMES, NAMES_BYTES = 16, 512
"""What a step may report, and what an evaluation may."""
REQUESTS_BYTES = 800
"""What one worker may ask for at once."""
SUBTREE_BYTES = 8 * (1 + MOST_NAMES)
"""The numbers of one more subtree of lanes: a loss and all reports."""
MOST_REPORTED = 8
"""Blocks that one record names; what differs beyond is reported when it is compared again."""
NO_COPY = 0


@dataclass(frozen=True, slots=True)
class Record:
    """What all members know once a vote has passed. Bounded; kept for the inventory."""

    step: int
    generations: tuple[int, ...]
    loss: float | None
    norm: float | None
    """Norm of the mean gradient over all parameters; None where nothing asks for it."""
    reports: dict[str, float]
    evaluations: dict[str, float]
    requests: tuple[Request, ...]
    hypers: tuple[str, ...]
    saving: tuple[str, ...] = ()
    """Saving states by rank."""
    saved: int = -1
    updates: bool = True
    """Whether the step updates anything: not where all its micro-batches were skipped, nor after an overflow."""
    skipped_micro_batches: int = 0
    """Skipped micro-batches of all steps up to this one."""
    corrupt: tuple[CorruptBlock, ...] = ()
    """Blocks whose copies differ."""
    single: int = 0
    """Blocks of those compared that had fewer than two copies."""
    not_finite: str = ""
    """What loss and gradient of this step are not finite; empty where all are."""
    not_finite_steps: int = 0
    """Steps up to this one that had such."""
    calls_back: bool = False
    """Whether rank 0 has callbacks, and so tells the others once it has called them."""
    streams: tuple[str, ...] = ()
    """Where lanes stand in their streams."""
    unused: str = ""
    """The parameters that no lane of this step used, as in a ballot."""
    overflow: str = ""
    """What of this step is not finite where the loss is scaled: the step updates nothing, and the scale may fall."""
    in_order: bool = False
    """Whether the next step's messages may go in the order of this one's, on all members."""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Record:
        """The inverse of `to_bytes`."""
        fields = json.loads(content)
        fields["requests"] = tuple(Request(**request) for request in fields["requests"])
        fields["corrupt"] = tuple(
            CorruptBlock(**{**block, "workers": tuple(block["workers"])}) for block in fields.get("corrupt", ())
        )
        fields["streams"] = tuple(fields.get("streams", ()))
        return cls(**{**fields, **{name: tuple(fields[name]) for name in ("generations", "hypers", "saving")}})


class Undecided(Exception):
    """A vote that decides nothing, on any member. `messages`: how many each has sent of evaluations, by rank, that
    others may not have heard.
    """

    def __init__(self, messages: Sequence[int]) -> None:
        super().__init__(f"there are evaluations that not all have heard of: {list(messages)} messages, by rank")
        self.messages = messages


Gather = Callable[[Tensor], Tensor]  # (bytes of a row,) uint8 → (members, bytes of a row)
"""One's own row → every member's, by rank: `Group.all_gather`."""


def cast(
    gather: Gather,
    traffic: Traffic,
    ballot: Ballot,
    norms: Tensor | None,  # (subtrees owned,) float64: sums of squares of the reduced gradient
    comparisons: Sequence[Comparison] = (),
    times: FillTimes | None = None,
) -> Record:
    """Votes, and returns the record: past this call the step is committed. Raises `WorldChanged` when it did not pass,
    and `Undecided`.

    `norms`: where the step needs the norm.
    `comparisons`: blocks whose copies are compared, the same on all members. `times`: take in what all have seen.
    """
    most = max(len(spans) for spans in traffic.norm_spans) if norms is not None else 0
    room = _ballot_bytes(traffic)
    end = room + 8 * most
    compared = end + 8 * sum(len(c.blocks) for c in comparisons)
    seen = times.row.numel() if times is not None else 0
    row = torch.zeros(compared + seen, dtype=torch.uint8, device="cpu")
    content = as_bytes_tensor(ballot.to_bytes())
    assert content.numel() <= room, f"a ballot of {content.numel()} bytes, though what it carries is limited to {room}"
    row[: content.numel()] = content
    if norms is not None:
        row[room:end].view(torch.float64)[: norms.numel()] = norms
    if comparisons:
        row[end:compared].view(torch.int64).copy_(torch.cat([comparison.checksums for comparison in comparisons]))
    if times is not None:
        row[compared:] = times.row
    rows = gather(row)
    if times is not None:
        times.agree(rows[:, compared:])
    record = _record(traffic, rows[:, :end], bool(most))
    return replace(record, **_findings(traffic, rows[:, end:compared], comparisons)) if comparisons else record


def _findings(
    traffic: Traffic,
    rows: Tensor,  # (members, 8 × blocks compared) uint8
    comparisons: Sequence[Comparison],
) -> dict[str, Any]:
    """Fields of the record."""
    workers = [member.worker for member in traffic.plan.members]
    corrupt: list[CorruptBlock] = []
    single = at = 0
    for comparison in comparisons:
        columns = rows[:, 8 * at : 8 * (at + len(comparison.blocks))].contiguous().view(torch.int64)
        found = compare(comparison, columns, workers)
        corrupt += found.corrupt
        single, at = single + found.single, at + len(comparison.blocks)
    return {"corrupt": tuple(corrupt), "single": single}


def _ballot_bytes(traffic: Traffic) -> int:
    subtrees, parameters = max(len(spans) for spans in traffic.coordinates.told_spans), len(traffic.layout.groups)
    digits = -(-parameters // 32) * 8  # four in each; whole words, as numbers of eight bytes stand behind them
    return BALLOT_BYTES + SUBTREE_BYTES * max(0, subtrees - 2) + digits


def read_ballots(
    rows: Tensor,  # (members, bytes that begin with the ballot) uint8
) -> list[Ballot]:
    """By rank."""
    return [Ballot.from_bytes(memoryview(row)) for row in rows.contiguous().numpy()]


def check_names(names: Collection[str], call: str) -> None:
    """Raises `UserError` for more names than a vote has room for. `call`: what reports them."""
    size = len(json.dumps(list(names), separators=(",", ":")))
    if len(names) > MOST_NAMES or size > NAMES_BYTES:
        raise UserError(
            f"{call} got {plural(len(names), 'name')} with {size} bytes in one step; at most {MOST_NAMES} with "
            f"{NAMES_BYTES} bytes fit into a vote. Report fewer, or with shorter names."
        )


def check_requests(requests: Sequence[Request], call: str) -> None:
    """Raises `UserError` for more requests at once than a vote has room for. `call`: what asks for the last one."""
    size = len(json.dumps([asdict(request) for request in requests], separators=(",", ":")))
    if size > REQUESTS_BYTES:
        raise UserError(
            f"{call}: what is asked for in this step takes {size} bytes; at most {REQUESTS_BYTES} fit into a vote. "
            "Ask for less at once, or give a shorter path."
        )


def _record(
    traffic: Traffic,
    rows: Tensor,  # (members, bytes of the ballot and of the sums of squares) uint8
    with_norm: bool,
) -> Record:
    ballots = read_ballots(rows)
    if any(messages := [ballot.evaluation_messages for ballot in ballots]):
        raise Undecided(messages)
    lanes = traffic.plan.lanes
    reporting = [
        ballot
        for ballot, member in zip(ballots, traffic.plan.members, strict=True)
        if member.coordinate == traffic.coordinates.reporter
    ]
    counted = _counted(reporting, lanes)

    def reduced(of: list[Sequence[float]]) -> float:
        return _mean_over_portions(traffic, of) / counted

    trained = any(ballot.losses for ballot in ballots)
    norm = _norm(traffic, rows) if with_norm else None
    not_finite, overflow = _not_finite(ballots, norm), ""
    if any(ballot.is_scaled for ballot in ballots):
        not_finite, overflow = "", not_finite
    return Record(
        step=ballots[0].step,
        generations=tuple(ballot.generation for ballot in ballots),
        loss=reduced([ballot.losses for ballot in ballots]) if trained and counted else None,
        norm=norm,
        reports={
            name: reduced(
                [b.reports.get(name, _zeros(s)) for b, s in zip(ballots, traffic.coordinates.told_spans, strict=True)]
            )
            for name in _reported_everywhere(ballots, traffic)
        },
        evaluations=mean_over_lanes(
            [ballots[rank].evaluations for ranks in traffic.coordinates.told_by_portion for rank in ranks]
        ),
        requests=tuple(dict.fromkeys(request for ballot in ballots for request in ballot.requests)),
        hypers=tuple(ballot.hyper for ballot in ballots),
        saving=tuple(ballot.saving for ballot in ballots),
        streams=tuple(ballot.stream for ballot in reporting if ballot.stream),
        unused=_unused(ballots, traffic),
        saved=max(ballot.saved for ballot in ballots),
        updates=bool(counted) and not overflow,
        overflow=overflow,
        calls_back=bool(ballots[0].calls_back),
        in_order=all(ballot.in_order for ballot in ballots),
        skipped_micro_batches=max(b.skipped_before for b in ballots) + sum(b.skipped for b in reporting),
        not_finite=not_finite,
        not_finite_steps=max(ballot.not_finite_before for ballot in ballots) + bool(not_finite),
    )


def _mean_over_portions(traffic: Traffic, of: list[Sequence[float]]) -> float:
    """The sum over lanes. `of`: by rank, the sums of its subtrees."""
    coordinates, total = traffic.coordinates, 0.0
    for portion, ranks in enumerate(coordinates.told_by_portion):
        parts = [zip(coordinates.told_spans[rank], of[rank], strict=True) for rank in ranks]
        sum_of = fold_numbers(list(chain.from_iterable(parts)), traffic.plan.lanes)
        total = total + sum_of if portion else sum_of
    return total / coordinates.portions


def _unused(ballots: list[Ballot], traffic: Traffic) -> str:
    """What all members with lanes name of what they have."""
    named = {rank: ballots[rank].unused for rank in traffic.plan.trainers}
    if not any(named.values()):
        return ""
    layout, at = traffic.layout, {rank: traffic.plan.members[rank].coordinate for rank in named}
    others = {coordinate: ~all_at(layout, coordinate) for coordinate in {*at.values()}}
    each = (int(of or "0", 16) | others[at[rank]] for rank, of in named.items())
    return unused_text(reduce(and_, each, every_one(layout)))


def unused_text(parameters: int) -> str:
    """A ballot's, of bits."""
    return f"{parameters:x}" if parameters else ""


def halts(record: Record) -> bool:
    """Whether the job ends before the step of this vote, which then commits nothing."""
    return any(request.kind == HALT.kind for request in record.requests)


def _counted(ballots: list[Ballot], lanes: int) -> float:
    """The divisor of the sum over lanes of their means: lanes, less the part of them that was skipped."""
    skipped = sum(ballot.skipped for ballot in ballots)
    return lanes if not skipped else (lanes * ballots[0].micro_batches - skipped) / ballots[0].micro_batches


def _not_finite(ballots: list[Ballot], norm: float | None) -> str:
    found = [
        next((ballot.bad_loss for ballot in ballots if ballot.bad_loss), ""),
        next((ballot.bad_gradient for ballot in ballots if ballot.bad_gradient), ""),
    ]
    if norm is not None and not math.isfinite(norm) and not found[1]:
        found[1] = f"the norm of the gradient is {norm}"
    return " and ".join(filter(None, found))


def _zeros(spans: Sequence[Span]) -> list[float]:
    """What a member whose lanes were all skipped adds to a sum."""
    return [0.0] * len(spans)


def _reported_everywhere(ballots: list[Ballot], traffic: Traffic) -> list[str]:
    """Names that were reported in every lane of which some micro-batch was not skipped."""
    reported = []
    for ballot, spans in zip(ballots, traffic.coordinates.told_spans, strict=True):
        if spans and ballot.skipped < ballot.micro_batches * sum(stop - start for start, stop in spans):
            reported.append(set(ballot.reports))
    return sorted(set.intersection(*reported)) if reported else []


def _norm(
    traffic: Traffic,
    rows: Tensor,  # as in `_record`
) -> float:
    return _norm_of(traffic, rows[:, _ballot_bytes(traffic) :])


def norm_before(
    group: Group,
    traffic: Traffic,
    norms: Tensor,  # (subtrees owned,) float64: sums of squares of the reduced gradient
) -> float:
    """The norm that the vote will find. All members call it; raises `WorldChanged`."""
    row = torch.zeros(max(map(len, traffic.norm_spans)), dtype=torch.float64, device="cpu")
    row[: norms.numel()] = norms
    return _norm_of(traffic, group.all_gather(row.view(torch.uint8)))


def _norm_of(
    traffic: Traffic,
    rows: Tensor,  # (members, 8 × the most subtrees that one owns) uint8: float64, by rank
) -> float:
    sums = rows.clone().view(torch.float64).tolist()
    parts = [
        (span, value)
        for spans, values in zip(traffic.norm_spans, sums, strict=True)
        for span, value in zip(spans, values, strict=False)
    ]
    return math.sqrt(fold_numbers(parts, traffic.layout.blocks))


def mean_over_lanes(each: Sequence[dict[str, list[float]]]) -> dict[str, float]:
    """The mean over the lanes that arrived, with the same bits whoever evaluated them."""
    counts, sums = dict[str, float](), dict[str, list[float]]()
    for one in each:
        for name, (lanes, *parts) in one.items():
            counts[name] = counts.get(name, 0.0) + lanes
            for part in parts:
                add(sums.setdefault(name, []), part)
    return {name: total(sums.get(name, [])) / lanes for name, lanes in counts.items() if lanes}


def gather_of(faults: Faults, group: Group, ballot: Ballot, generation: int) -> Gather:
    """How the vote of `ballot` in the world of `generation` is gathered."""
    if faults.due("in_vote", ballot.step):
        return partial(_torn, group, lambda _: faults.at("in_vote", ballot.step))
    if ballot.generation > generation and faults.due("in_vote_to_begin", ballot.step):
        return partial(_torn, group, lambda rows: _strike_if_it_begins(faults, rows, ballot))
    return group.all_gather


def _strike_if_it_begins(
    faults: Faults,
    rows: Tensor,  # (members, bytes of a row) uint8
    mine: Ballot,
) -> None:
    if all(ballot.generation == mine.generation for ballot in read_ballots(rows)):
        faults.at("in_vote_to_begin", mine.step)


def _torn(
    group: Group,
    strike: Callable[[Tensor], None],  # (members, bytes of a row) uint8
    row: Tensor,  # (bytes of a row,) uint8
) -> Tensor:  # (members, bytes of a row)
    """`strike(rows)` happens when one member has this worker's row and the others have not.

    That one is the peer to whom all others have posted theirs before they posted it to this worker.
    """
    rows = torch.empty(group.size, row.numel(), dtype=row.dtype, device="cpu")
    rows[group.rank] = row
    others = [(group.rank - distance) % group.size for distance in range(1, group.size)]
    for work in [group.receive(rows[peer], peer, GATHER_TAG) for peer in others]:
        work.wait()
    for work in [group.send(row, peer, GATHER_TAG) for peer in others[:1]]:
        work.wait()
    strike(rows)
    for work in [group.send(row, peer, GATHER_TAG) for peer in others[1:]]:
        work.wait()
    return rows


@dataclass(frozen=True, slots=True)
class Comparison:
    """Blocks that one vote compares. The same on all members but for `checksums`."""

    blocks: Tensor  # (blocks compared,) int64: their numbers
    checksums: Tensor  # (blocks compared,) int64: of this member's copies; NO_COPY where it has none
    first_step: int
    """At which each of them was compared before, or the job's first."""
    step: int
    """The step as of which the copies are compared."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What a comparison came to."""

    corrupt: tuple[CorruptBlock, ...] = ()
    single: int = 0
    """Blocks with fewer than two copies: nothing can be said of them."""


def compare(
    comparison: Comparison,
    rows: Tensor,  # (members, blocks compared) int64: everybody's checksums, by rank
    workers: Sequence[str],
) -> Findings:
    """What everybody's checksums come to."""
    held = rows != NO_COPY
    least = torch.where(held, rows, torch.iinfo(torch.int64).max).amin(0)
    most = torch.where(held, rows, torch.iinfo(torch.int64).min).amax(0)
    copies = held.sum(0)
    differ = ((least != most) & (copies > 1)).nonzero().flatten().tolist()
    return Findings(
        tuple(
            CorruptBlock(
                int(comparison.blocks[column]),
                comparison.first_step,
                comparison.step,
                _whose({workers[rank]: value for rank, value in enumerate(rows[:, column].tolist()) if value}),
            )
            for column in differ[:MOST_REPORTED]
        ),
        int((copies < 2).sum()),
    )


def _whose(values: dict[str, int]) -> tuple[str, ...]:
    """Where more than half of the copies agree it is the others', else nobody can tell."""
    (value, count), *_ = Counter(values.values()).most_common(1)
    agree = value if 2 * count > len(values) else None
    return tuple(worker for worker, own in values.items() if own != agree)
