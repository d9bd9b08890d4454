"""Groups of one optimizer that keep different state."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from crew import Crew, Task, undisturbed
from fills import pair
from integration.scripts import optimizer_of
from matrices import shortened
from rule import Edit, rule
from shoal.checkpoint.fingerprint import ENTRY, _exchange
from shoal.exchange.packing import FramedSend
from shoal.exchange.traffic import DIGESTS
from shoal_protos.errors import PeerError
from torch import nn

Make = Callable[[nn.Module], torch.optim.Optimizer]
BF16 = {"precision": {"bf16": {"enabled": True}}}


def made(name: str, **arguments: Any) -> Make:
    return lambda model: optimizer_of(model, name, **arguments)


MAKES: dict[str, Make] = {
    "SGD, momentum in one": made("SGD", apart={"momentum": 0.9}),
    "Adam, amsgrad in one": made("Adam", apart={"amsgrad": True}),
    "RMSprop, all there is in one": made("RMSprop", apart={"momentum": 0.9, "centered": True}),
}
FORMS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "3, bf16": {"stage": 3, **BF16},
    "1, bf16, on the host": {"stage": 1, "offload": "cpu", **BF16},
}
CASES = product(MAKES, FORMS, ("a", "ab", "abc", "abcd"))
KEPT = [
    ("SGD, momentum in one", "1", "abc"),
    ("SGD, momentum in one", "3", "abcd"),
    ("Adam, amsgrad in one", "0", "ab"),
    ("Adam, amsgrad in one", "2", "ab"),
    ("RMSprop, all there is in one", "3, bf16", "abc"),
    ("RMSprop, all there is in one", "1, bf16, on the host", "ab"),
]


@rule(
    "A member's digests say of each block how wide they are: groups of one optimizer may keep different state",
    "Arithmetic and layout",
    broken_by=Edit(
        "shoal.checkpoint.fingerprint",
        "        at += ENTRY.size + width\n",
        "        width = ENTRY.unpack_from(content)[1]\n        at += ENTRY.size + width\n",
    ),
)
@pytest.mark.parametrize(("kind", "form", "workers"), shortened(CASES, *KEPT))
def test_groups_that_keep_other_state_give_the_same_bits_through_a_loss_and_a_join(
    kind: str, form: str, workers: str
) -> None:
    task = Task({"max_steps": 5, **FORMS[form]}, optimizer=MAKES[kind])
    with Crew(workers, task) as crew:
        crew.train_to(2)
        if len(workers) > 1:
            crew.kill(workers[0])
        crew.add("x")
        assert crew.finish() == undisturbed(task)


def test_digests_of_any_width_arrive_as_they_were_sent() -> None:
    mine, theirs = {3: b"a" * 64, 4: b"b" * 32}, {0: b"c" * 96, 1: b"", 7: b"d" * 32}
    send = b"".join(ENTRY.pack(number, len(digests)) + digests for number, digests in theirs.items())
    here, there = pair()
    with here.wire.changed:
        FramedSend(there, 0, DIGESTS, send)
        assert _exchange(here, mine) == list(theirs.items())


@pytest.mark.parametrize("sent", [b"1", ENTRY.pack(0, 64) + b"a" * 63, ENTRY.pack(0, 1) + b"a" + b"rest"])
def test_digests_that_end_within_a_block_are_refused(sent: bytes) -> None:
    here, there = pair()
    with here.wire.changed, pytest.raises(PeerError, match="rank 1 sent digests that end within a block's"):
        FramedSend(there, 0, DIGESTS, sent)
        _exchange(here, {})
