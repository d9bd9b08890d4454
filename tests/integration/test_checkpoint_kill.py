"""kill -9 of a process that writes and deletes checkpoints, at whatever instant: the newest whole one is whole."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
from integration.cluster import ended, fork, until
from matrices import shortened
from shoal.checkpoint.catalogue import checkpoints, resolve, saves
from shoal.checkpoint.fingerprint import verify
from shoal.checkpoint.storage import LocalStorage


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kills", shortened([6, 12], 6))
def test_a_kill_at_any_instant_leaves_whole_checkpoints_and_rests(tmp_path: Path, kills: int) -> None:
    chance = random.Random(4)
    rests = 0
    for kill in range(kills):
        storage = LocalStorage(tmp_path / str(kill))
        arguments = {"folder": storage.url, "keep": 2}
        pid = fork("integration.checkpoint_writer:save_for_ever", arguments, {}, tmp_path / "log")
        wanted, spins = chance.randint(2, 6), chance.randint(0, 4_000)
        until(f"a checkpoint of step {wanted}", lambda: _newest(storage) >= wanted)  # noqa: B023
        for _ in range(spins):  # an instant that nothing is aligned with
            os.getpid()
        os.kill(pid, signal.SIGKILL)
        until("its end", lambda: pid in ended())  # noqa: B023
        rests += _check(storage, wanted)
    assert rests, "no kill met a save or a deletion; the test shows nothing"


def _newest(storage: LocalStorage) -> int:
    return max((name.step for name in saves(storage)), default=0)


def _check(storage: LocalStorage, wanted: int) -> int:
    """How many folders were no whole checkpoint."""
    skipped: list[str] = []
    whole = list(checkpoints(storage, skipped.append))
    assert whole[0].name.step >= wanted - 1
    for found in whole:
        verify(found.reader())
    found = resolve(storage.url, "latest", print)
    assert found and found.name == whole[0].name
    assert all(" is incomplete: " in sentence for sentence in skipped)
    return len(skipped)
