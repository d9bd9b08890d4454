"""The vote's row: on the CPU whatever the script makes its default device, and no longer than agreed."""

from __future__ import annotations

import pytest
import torch
from shoal.core.layout import Trainable, lay_out
from shoal.exchange.routes import Routes
from shoal.exchange.vote import TEXT_BYTES, Ballot, Record, Wish, cast
from shoal_protos.errors import UserError
from torch import Tensor
from worlds import recovery

ROUTES = Routes(recovery(1, "a"), 0, lay_out([Trainable("weight", (8,), torch.float32, 0)]))


def test_the_vote_runs_on_the_cpu_whatever_the_default_device_is() -> None:
    rows: list[Tensor] = []

    def gather(row: Tensor) -> Tensor:
        rows.append(row)
        return row.reshape(1, -1)

    with torch.device("meta"):
        record = cast(gather, ROUTES, Ballot(step=3, generation=1, hyper="00", losses=(2.0,)), None)
    assert [row.device.type for row in rows] == ["cpu"]
    assert (record.step, record.generations, record.loss) == (3, (1,), 2.0)


def test_a_row_has_the_same_length_whatever_is_in_it_and_more_is_refused() -> None:
    lengths: list[int] = []

    def gather(row: Tensor) -> Tensor:
        lengths.append(row.numel())
        return row.reshape(1, -1)

    reports = {f"metric{number}": [float(number)] for number in range(16)}
    cast(gather, ROUTES, Ballot(1, 1, "00", (1.0,)), None)
    cast(gather, ROUTES, Ballot(1, 1, "00", (1.0,), reports, wishes=(Wish("save"),)), None)
    assert lengths == [TEXT_BYTES] * 2
    with pytest.raises(UserError, match="at most 4096 fit into a vote"):
        cast(gather, ROUTES, Ballot(1, 1, "00", (1.0,), {"x" * 5000: [1.0]}), None)


def test_the_record_survives_its_bytes() -> None:
    record = cast(lambda row: row.reshape(1, -1), ROUTES, Ballot(1, 1, "00", (0.1,), wishes=(Wish("stop"),)), None)
    assert Record.from_bytes(record.to_bytes()) == record
