"""What a joiner is given: nothing in it can run code, and what is no small state is refused in one sentence."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from crew import Crew, Task, undisturbed
from rule import Edit, holds, rule
from shoal.state.small_state import FIELDS, pack, unpack
from shoal.state.training_state import Limits, TrainingState
from shoal.training.residency import residency_of
from shoal_protos.errors import PeerError, UserError
from torch import nn

CONTENT: dict[str, Any] = {
    "step": 7, "committed_in": 3, "record": b'{"step": 7}', "hyper": [{"betas": (0.9, 0.999), "lr": 1e-3}],
    "evaluating": ["norm"],
    "scheduler": {"last_epoch": 7, "best": float("inf"), "milestones": {5: 1}},
    "buffers": {"norm.running_mean": torch.tensor([0.1, -0.0, 3.0]), "norm.count": torch.tensor(7)},
    "loss_scale": {"scale": 65536.0, "good_steps": 3, "hysteresis_left": 2},
    "last_step": 100, "lineage": [], "frozen": "ab", "registered": {"ema": {"shadow": torch.ones(2, 3)}},
    "streams": [], "followed": 7, "missed": ((3, 2, False), (1, 4, True)),
}  # fmt: skip


def framed(tree: bytes, tensors: bytes | None = None) -> bytes:
    return struct.pack("<Q", len(tree)) + tree + (safetensors.torch.save({}) if tensors is None else tensors)


def test_what_is_packed_is_unpacked_in_types_and_bits() -> None:
    found = unpack(pack(CONTENT))
    for tensors in ("buffers", "registered"):
        given, expected = found.pop(tensors), CONTENT[tensors]
        assert repr(given) == repr(expected)
    assert found == {name: value for name, value in CONTENT.items() if name not in ("buffers", "registered")}
    assert isinstance(found["hyper"][0]["betas"], tuple)


class Bomb:
    """A pickle of it calls what it likes when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(Path.cwd() / "executed"),)


@rule(
    "What a joiner receives from a peer cannot run code: it has the plain form of checkpoints and is never a pickle",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal.state.small_state",
        "        return decode(tree, safetensors.torch.load(message[LENGTH.size + length :]))\n",
        "        return __import__('pickle').loads(message)\n",
    ),
)
def test_a_pickle_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bomb = pickle.dumps({**CONTENT, "scheduler": Bomb()})
    saved = tmp_path / "saved"
    torch.save({"step": Bomb()}, saved)
    for message in (bomb, saved.read_bytes(), framed(bomb), framed(b"{}", bomb)):
        with pytest.raises(PeerError, match=r"^the small state that another worker sent "):
            unpack(message)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (b"", "cannot be read: unpack_from requires a buffer of at least 8 bytes"),
        (struct.pack("<Q", 1 << 63) + b"{}", "cannot be read: "),
        (framed(b"["), "cannot be read: Expecting value"),
        (framed(b"[" * 100_000), "cannot be read: maximum recursion depth exceeded"),
        (framed(b"{}", b"x" * 40), "cannot be read: Error while deserializing"),
        (framed(b"[1, 2]"), "has list; expected ['buffers', 'committed_in'"),
        (framed(b'{"step": 1}'), "has ['step']; expected ['buffers', 'committed_in'"),
        (
            framed(b'{"$": "os.system", "of": "id"}'),
            'cannot be read: a state cannot be read: ValueError("it holds the kind',
        ),
        (framed(b'{"$": "tensor", "of": "weights"}'), "cannot be read: a state cannot be read: KeyError('weights')"),
        (pack({**CONTENT, "step": "7"}), "has str as step"),
        (pack({**CONTENT, "buffers": [1]}), "has list as buffers"),
    ],
)
def test_what_is_no_small_state_is_refused_in_one_sentence(message: bytes, sentence: str) -> None:
    with pytest.raises(PeerError) as refused:
        unpack(message)
    assert str(refused.value).startswith(f"the small state that another worker sent {sentence}")


@holds("What a joiner receives from")
def test_a_joiner_with_a_registered_state_gets_it_without_a_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a pickle was read or written")

    for module, name in ((pickle, "loads"), (pickle, "dumps"), (torch, "load"), (torch, "save")):
        monkeypatch.setattr(module, name, never)
    task = Task({"max_steps": 8})
    with Crew("ab", task) as crew:
        crew.train_to(2)
        crew.add("c")
        assert crew.finish() == undisturbed(task)


class Lambda(torch.optim.lr_scheduler.LambdaLR):
    """Keeps an object of its own in its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"schedule": Bomb()}


def test_a_scheduler_that_no_joiner_can_be_given_is_refused_at_the_start() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    scheduler = Lambda(optimizer, lambda step: 1.0)
    with pytest.raises(UserError, match=r"^the scheduler's state\.schedule is a \S+Bomb, which cannot be saved"):
        TrainingState(module, optimizer, scheduler, Limits(1, 0.0, 10), residency_of(0))
    assert set(FIELDS) == set(CONTENT)
