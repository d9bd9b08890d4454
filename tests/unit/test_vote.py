"""The vote's row: on the CPU whatever the script makes its default device, and no longer than agreed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rule import Edit, holds, rule
from shoal.core.laying_out import lay_out
from shoal.core.layout import SMALLEST_BLOCK, Trainable
from shoal.core.tree import MOST_PARTS
from shoal.exchange.ballot import Ballot, Request
from shoal.exchange.finite import describe_gradient
from shoal.exchange.traffic import Traffic
from shoal.exchange.vote import (
    BALLOT_BYTES,
    MOST_NAMES,
    NAMES_BYTES,
    REQUESTS_BYTES,
    Record,
    cast,
    check_names,
    check_requests,
)
from shoal_protos.errors import UserError
from torch import Tensor
from worlds import BLOCKS, recovery

BUCKET = lay_out([Trainable("ü" * 300, (8,), torch.float32, 0)]).buckets[0]
LAYOUT = lay_out([Trainable("weight", (BLOCKS * SMALLEST_BLOCK,), torch.float32, 0)])
TRAFFIC = Traffic(recovery(1, "a"), 0, LAYOUT)


@rule(
    "The vote runs on CPU tensors",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal.exchange.vote", 'seen, dtype=torch.uint8, device="cpu"', "seen, dtype=torch.uint8, device=None"
    ),
)
def test_the_vote_runs_on_the_cpu_whatever_the_default_device_is() -> None:
    rows: list[Tensor] = []

    def gather(row: Tensor) -> Tensor:
        rows.append(row)
        return row.reshape(1, -1)

    with torch.device("meta"):
        record = cast(gather, TRAFFIC, Ballot(step=3, generation=1, hyper="00", losses=(2.0,)), None)
    assert [row.device.type for row in rows] == ["cpu"]
    assert (record.step, record.generations, record.loss) == (3, (1,), 2.0)


def test_a_row_has_the_same_length_whatever_is_in_it() -> None:
    lengths: list[int] = []

    def gather(row: Tensor) -> Tensor:
        lengths.append(row.numel())
        return row.reshape(1, -1)

    reports = {f"metric{number}": [float(number)] for number in range(16)}
    cast(gather, TRAFFIC, Ballot(1, 1, "00", (1.0,)), None)
    cast(gather, TRAFFIC, Ballot(1, 1, "00", (1.0,), reports, requests=(Request("save"),)), None)
    cast(gather, TRAFFIC, Ballot(1, 1, "00", (1.0,), unused="1"), None)
    assert lengths == [BALLOT_BYTES + 8] * 3


@holds("What a parameter has missed")
def test_what_is_unused_takes_a_hexadecimal_digit_for_four_parameters_at_most() -> None:
    """Of which every second one is unused, and each member uses some that another leaves out."""
    layout = lay_out([Trainable(f"p{number}", (1,), torch.float32, 0) for number in range(10_000)])
    plan = recovery(1, "ab")
    shares = tuple(replace(share, lanes=(rank,)) for rank, share in enumerate(plan.shares))
    traffic, rows = Traffic(replace(plan, lanes=2, shares=shares), 0, layout), list[Tensor]()

    def gather(row: Tensor) -> Tensor:
        rows.append(row)
        return torch.stack([row, row])

    unused = [sum(1 << bit for bit in range(0, 10_000, step)) for step in (2, 3)]
    ballots = [Ballot(3, 1, "00", (1.0,), unused=f"{bits:x}") for bits in unused]
    for ballot in ballots:
        cast(gather, traffic, ballot, None)
    assert {row.numel() for row in rows} == {BALLOT_BYTES + 2_504}
    record = cast(lambda _: torch.stack(rows), traffic, ballots[0], None)
    assert int(record.unused, 16) == sum(1 << bit for bit in range(0, 10_000, 6))
    assert Record.from_bytes(record.to_bytes()).unused == record.unused
    cast(gather, traffic, Ballot(3, 1, "00", (1.0,)), None)
    assert cast(lambda _: torch.stack(rows[1:]), traffic, ballots[0], None).unused == ""  # one has used all


@pytest.mark.parametrize("lanes", [(0,), (0, 2), tuple(range(0, 64, 2))])
def test_the_longest_ballot_that_is_allowed_fits_whatever_lanes_a_worker_has(lanes: tuple[int, ...]) -> None:
    """A loss gives a worker more subtrees, and its row more numbers, than the world in which the names were checked."""
    plan = replace(recovery(1, "ab"), lanes=64)
    others = tuple(lane for lane in range(64) if lane not in lanes)
    shares = tuple(replace(share, lanes=held) for share, held in zip(plan.shares, (lanes, others), strict=True))
    traffic = Traffic(replace(plan, shares=shares), 0, LAYOUT)
    width = NAMES_BYTES // MOST_NAMES - 3
    names = [f"{number:0{width}}" for number in range(MOST_NAMES - 1)] + ["n" * (width - 1)]
    check_names(names, "engine.report")
    longest = -2.2250738585072014e-308
    mine, theirs = (
        Ballot(
            step=2**53,
            generation=2**53,
            hyper="0" * 64,
            losses=[longest] * len(spans),
            reports={name: [longest] * len(spans) for name in names},
            skipped=2**31,
            micro_batches=2**31,
            skipped_before=2**53,
            bad_loss=f"the loss of lane {2**31} is {longest}",
            bad_gradient=describe_gradient(BUCKET, 0, torch.tensor([math.nan]), (2**31 - 64, 2**31)),
            not_finite_before=2**53,
            evaluations={name: [longest] * (1 + MOST_PARTS) for name in names},
            requests=requests,
            saving="writing",
            saved=2**53,
            is_scaled=1,
        )
        for spans, requests in zip(traffic.lane_spans, ((_longest_request(),), ()), strict=True)
    )
    rows: list[Tensor] = []
    with pytest.raises(_Gathered):
        cast(lambda row: _keep(rows, row), traffic, theirs, torch.ones(1, dtype=torch.float64))
    record = cast(lambda row: torch.stack([row, rows[0]]), traffic, mine, torch.ones(1, dtype=torch.float64))
    assert record.requests == (_longest_request(),) and set(record.reports) == set(names)


class _Gathered(Exception):
    """The row is known."""


def _keep(rows: list[Tensor], row: Tensor) -> Tensor:
    rows.append(row)
    raise _Gathered


def _longest_request() -> Request:
    empty = len(json.dumps([asdict(Request("export"))], separators=(",", ":")))
    request = Request("export", "x" * (REQUESTS_BYTES - empty))
    check_requests([request], "engine.export")
    return request


def test_names_and_requests_are_refused_where_they_are_given() -> None:
    with pytest.raises(UserError, match=r"engine\.report got 17 names with \d+ bytes in one step; at most 16"):
        check_names([f"metric{number}" for number in range(17)], "engine.report")
    with pytest.raises(UserError, match="at most 16 with 512 bytes fit into a vote"):
        check_names(["ü" * 100], "engine.report")
    with pytest.raises(UserError, match=r"engine\.export: what is asked for in this step takes \d+ bytes; at most 800"):
        check_requests([Request("export", "x" * 800)], "engine.export")


def test_the_record_survives_its_bytes() -> None:
    record = cast(
        lambda row: row.reshape(1, -1), TRAFFIC, Ballot(1, 1, "00", (0.1,), requests=(Request("stop"),)), None
    )
    assert Record.from_bytes(record.to_bytes()) == record


@rule(
    "A gradient that overflows at the loss scale makes the step a skipped one for all alike, and is no reason to "
    "stop; the scale moves at the commit alone, by DeepSpeed's rule; joiners and checkpoints have it",
    "A step",
    broken_by=[
        Edit(
            "shoal.state.training_state",
            '            self.loss_scale = self.loss_scale.at(given["loss_scale"])\n',
            "            pass\n",
        ),
        Edit(
            "shoal.exchange.vote",
            "updates=bool(counted) and not overflow,",
            "updates=bool(counted),",
        ),
        Edit(
            "shoal.core.loss_scale",
            "state.hysteresis_left > 1 and rule.hysteresis != 1:",
            "state.hysteresis_left > 1 and rule.consecutive_hysteresis:",
        ),
    ],
)
def test_an_overflow_of_one_makes_the_step_a_skipped_one_for_all() -> None:
    traffic = Traffic(recovery(1, "ab"), 0, LAYOUT)
    rows: list[Tensor] = []
    theirs = Ballot(4, 1, "00", (math.inf,), bad_loss="the loss of lane 1 is inf", is_scaled=1)
    with pytest.raises(_Gathered):
        cast(lambda row: _keep(rows, row), traffic, theirs, torch.full((1,), math.inf, dtype=torch.float64))
    mine = Ballot(4, 1, "00", (1.0,))
    record = cast(lambda row: torch.stack([row, rows[0]]), traffic, mine, torch.ones(1, dtype=torch.float64))
    assert record.overflow.startswith("the loss of lane 1 is inf")
    assert (record.updates, record.not_finite, record.not_finite_steps) == (False, "", 0)
    assert Record.from_bytes(record.to_bytes()) == record


numbers = st.floats(allow_nan=False)
texts = st.text(max_size=20)
lists = st.dictionaries(texts, st.lists(numbers, max_size=4), max_size=4)
ballots = st.builds(
    Ballot,
    step=st.integers(-1, 2**53), generation=st.integers(0, 2**53), hyper=texts, losses=st.lists(numbers), reports=lists,
    skipped=st.integers(0, 2**31), saved=st.integers(-1, 2**53), bad_loss=texts, bad_gradient=texts, saving=texts,
    evaluations=lists, is_scaled=st.sampled_from([0, 1]),
    requests=st.lists(st.builds(Request, texts, texts, st.integers(-1, 9), st.integers(-1, 2**53))).map(tuple),
)  # fmt: skip


@given(ballots, st.binary(max_size=9))
def test_a_ballot_survives_its_bytes_exactly_whatever_stands_behind_it(ballot: Ballot, behind: bytes) -> None:
    assert repr(Ballot.from_bytes(memoryview(ballot.to_bytes() + behind))) == repr(ballot)


def test_a_loss_that_is_not_a_number_survives_its_bytes() -> None:
    ballot = Ballot(1, 1, "00", (math.nan, -math.inf, -0.0))
    assert repr(Ballot.from_bytes(memoryview(ballot.to_bytes())).losses) == "[nan, -inf, -0.0]"
