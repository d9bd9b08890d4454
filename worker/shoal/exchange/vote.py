"""The vote: the only commit there is.

One small all-gather on CPU tensors, entered once this worker holds all that the commit needs; who has passed it has
committed. A row is bounded: the plan alone says how long it is, so that the same reports fit whatever is lost. Its JSON
part has room for the numbers of every subtree of lanes, its float64 part (sums of squares, one per whole subtree of
blocks owned) for those of the norm; names and requests are limited where they are given. Knows no controller.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from shoal_protos.corruption import CorruptBlock
from shoal_protos.errors import UserError
from shoal_protos.plural import plural
from shoal_protos.runs import Span
from torch import Tensor

from shoal.core.tree import fold_numbers
from shoal.exchange.copies import Comparison, compare
from shoal.exchange.framing import as_bytes_tensor
from shoal.exchange.traffic import Traffic

TEXT_BYTES = 5_632
"""The JSON part of a row, where nobody has more than two subtrees of lanes."""
MOST_NAMES, NAMES_BYTES = 16, 512
"""What a step may report, and an evaluation likewise."""
REQUESTS_BYTES = 800
"""What one worker may ask for at once."""
SUBTREE_BYTES = 8 * 54
"""The numbers of one more subtree of lanes: a loss and all reports, as long as a float can be, in whole words."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request that the vote carries and all carry out."""

    kind: str
    """fingerprint | export | save | scheduled (a save by the clock of rank 0) | stop | frozen"""
    detail: str = ""
    """A path for an export; for `frozen` the joiner's digest of its frozen parameters."""
    rank: int = -1
    """Whose request it is, where that matters."""
    step: int = -1
    """For a `save` in a vote: the first step at which a checkpoint fulfils it."""


@dataclass(frozen=True, slots=True)
class Ballot:
    """One member's row."""

    step: int
    """The step that the vote would commit; in a vote without a step, the last committed one."""
    generation: int
    """The generation that it is ready for."""
    hyper: str
    """Digest of the step's hyper-parameters."""
    losses: Sequence[float] = ()
    """One per whole subtree of lanes that it trained."""
    reports: dict[str, list[float]] = field(default_factory=dict)
    """Reported numbers likewise."""
    skipped: int = 0
    """Micro-batches of this step that it was told to skip."""
    micro_batches: int = 1
    """Micro-batches of a lane."""
    skipped_before: int = 0
    """Micro-batches that the job has skipped before this step."""
    bad_loss: str = ""
    """Which of its lanes has a loss that is not finite."""
    bad_gradient: str = ""
    """Which parameter has a gradient that is not finite, in its blocks."""
    not_finite_before: int = 0
    """Steps before this one that had either."""
    evaluations: dict[str, list[float]] = field(default_factory=dict)
    """Evaluations by name: sum over the lanes that it evaluated, and their number."""
    requests: tuple[Request, ...] = ()
    saving: str = ""
    """How far it is with the save at hand (core/save_part.py)."""
    saved: int = -1
    """The step of the newest whole checkpoint of this life of the job that it knows of."""


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
    """Whether the step updates anything: not where all its micro-batches were skipped."""
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
        return cls(**{**fields, **{name: tuple(fields[name]) for name in ("generations", "hypers", "saving")}})


Gather = Callable[[Tensor], Tensor]  # (bytes of a row,) uint8 → (members, bytes of a row)
"""One's own row → every member's, by rank: `Group.all_gather`."""


def cast(
    gather: Gather,
    traffic: Traffic,
    ballot: Ballot,
    norms: Tensor | None,  # (subtrees owned,) float64: sums of squares of the reduced gradient
    comparisons: Sequence[Comparison] = (),
) -> Record:
    """Votes, and returns the record: past this call the step is committed. Raises `WorldChanged` when it did not pass.

    `norms`: where the step needs the norm.
    `comparisons`: blocks whose copies are compared, the same on all members.
    """
    most = max(len(spans) for spans in traffic.norm_spans) if norms is not None else 0
    room = _text_bytes(traffic)
    end = room + 8 * most
    row = torch.zeros(end + 8 * sum(len(c.blocks) for c in comparisons), dtype=torch.uint8, device="cpu")
    text = as_bytes_tensor(json.dumps(asdict(ballot), separators=(",", ":")).encode())
    assert text.numel() < room, f"a ballot of {text.numel()} bytes, though what it carries is limited to {room}"
    row[: text.numel()] = text
    if norms is not None:
        row[room:end].view(torch.float64)[: norms.numel()] = norms
    if comparisons:
        row[end:].view(torch.int64).copy_(torch.cat([comparison.checksums for comparison in comparisons]))
    rows = gather(row)
    return replace(_record(traffic, rows[:, :end], bool(most)), **_findings(traffic, rows[:, end:], comparisons))


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


def _text_bytes(traffic: Traffic) -> int:
    subtrees = max(len(spans) for spans in traffic.lane_spans)
    return TEXT_BYTES + SUBTREE_BYTES * max(0, subtrees - 2)


def read_ballots(
    rows: Tensor,  # (members, bytes that begin with the JSON part) uint8
) -> list[dict[str, Any]]:
    """The fields of `Ballot` by rank."""
    return [json.loads(row.numpy().tobytes().partition(b"\0")[0]) for row in rows]


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
    rows: Tensor,  # (members, bytes of the JSON part and of the sums of squares) uint8
    with_norm: bool,
) -> Record:
    ballots = read_ballots(rows)
    lanes = traffic.plan.lanes

    counted = _counted(ballots, lanes)

    def reduced(of: list[Sequence[float]]) -> float:
        parts = [
            (span, value)
            for rank, spans in enumerate(traffic.lane_spans)
            for span, value in zip(spans, of[rank], strict=True)
        ]
        return fold_numbers(parts, lanes) / counted

    trained = any(ballot["losses"] for ballot in ballots)
    norm = _norm(traffic, rows) if with_norm else None
    not_finite = _not_finite(ballots, norm)
    return Record(
        step=ballots[0]["step"],
        generations=tuple(ballot["generation"] for ballot in ballots),
        loss=reduced([ballot["losses"] for ballot in ballots]) if trained and counted else None,
        norm=norm,
        reports={
            name: reduced([b["reports"].get(name, _zeros(s)) for b, s in zip(ballots, traffic.lane_spans, strict=True)])
            for name in _reported_everywhere(ballots, traffic)
        },
        evaluations=_evaluated([ballot["evaluations"] for ballot in ballots]),
        requests=tuple(dict.fromkeys(Request(**request) for ballot in ballots for request in ballot["requests"])),
        hypers=tuple(ballot["hyper"] for ballot in ballots),
        saving=tuple(ballot["saving"] for ballot in ballots),
        saved=max(ballot["saved"] for ballot in ballots),
        updates=bool(counted),
        skipped_micro_batches=max(b["skipped_before"] for b in ballots) + sum(b["skipped"] for b in ballots),
        not_finite=not_finite,
        not_finite_steps=max(ballot["not_finite_before"] for ballot in ballots) + bool(not_finite),
    )


def _counted(ballots: list[dict[str, Any]], lanes: int) -> float:
    """The divisor of the sum over lanes of their means: lanes, less the part of them that was skipped."""
    skipped = sum(ballot["skipped"] for ballot in ballots)
    return lanes if not skipped else (lanes * ballots[0]["micro_batches"] - skipped) / ballots[0]["micro_batches"]


def _not_finite(ballots: list[dict[str, Any]], norm: float | None) -> str:
    found = [next((b[key] for b in ballots if b[key]), "") for key in ("bad_loss", "bad_gradient")]
    if norm is not None and not math.isfinite(norm) and not found[1]:
        found[1] = f"the norm of the gradient is {norm}"
    return " and ".join(filter(None, found))


def _zeros(spans: Sequence[Span]) -> list[float]:
    """What a member whose lanes were all skipped adds to a sum."""
    return [0.0] * len(spans)


def _reported_everywhere(ballots: list[dict[str, Any]], traffic: Traffic) -> list[str]:
    """Names that were reported in every lane of which some micro-batch was not skipped."""
    reported = []
    for ballot, spans in zip(ballots, traffic.lane_spans, strict=True):
        if ballot["skipped"] < ballot["micro_batches"] * sum(stop - start for start, stop in spans):
            reported.append(set(ballot["reports"]))
    return sorted(set.intersection(*reported)) if reported else []


def _norm(
    traffic: Traffic,
    rows: Tensor,  # as in `_record`
) -> float:
    sums = rows[:, _text_bytes(traffic) :].clone().view(torch.float64).tolist()
    parts = [
        (span, value)
        for spans, values in zip(traffic.norm_spans, sums, strict=True)
        for span, value in zip(spans, values, strict=False)
    ]
    return math.sqrt(fold_numbers(parts, traffic.plan.blocks))


def _evaluated(each: list[dict[str, list[float]]]) -> dict[str, float]:
    """The mean over the lanes that arrived."""
    sums: dict[str, list[float]] = {}
    for one in each:
        for name, (total, lanes) in one.items():
            kept = sums.setdefault(name, [0.0, 0.0])
            kept[0] += total
            kept[1] += lanes
    return {name: total / lanes for name, (total, lanes) in sums.items() if lanes}
