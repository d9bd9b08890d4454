"""Planted faults: nothing where none is planted, the right signal where one is, a sentence for a wrong plan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from shoal.process.faults import POINTS, Faults
from shoal_protos.errors import UserError

FORM = "expected WORKER@STEP:POINT:ACTION, as in w1@5:vote:kill."


def struck(text: str, point: str = "vote", step: int = 5) -> subprocess.Popen[bytes]:
    """A worker w1 that stands at a point and would then end with 7."""
    strike = f"Faults.parse({text!r}, 'w1').at({point!r}, {step})"
    program = f"from shoal.process.faults import Faults; {strike}; raise SystemExit(7)"
    return subprocess.Popen([sys.executable, "-c", program])


def test_a_planted_kill_kills() -> None:
    assert struck("w0@5:vote:stop,w1@5:vote:kill").wait(100) == -signal.SIGKILL


def test_a_planted_stop_stops_and_goes_on() -> None:
    worker = struck("w1@5:vote:stop")
    _, status = os.waitpid(worker.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP
    worker.send_signal(signal.SIGCONT)
    assert worker.wait(100) == 7


def test_an_abort_happens_once_at_its_point_of_its_step() -> None:
    at: list[tuple[int, str]] = []
    here = (0, "")
    faults = Faults.parse("w1@5:vote:abort", "w1", lambda: at.append(here))
    for step in (4, 5, 5, 6):
        for point in POINTS:
            here = (step, point)
            faults.at(point, step)
    assert at == [(5, "vote")]


def test_nothing_happens_where_nothing_is_planted_for_this_worker() -> None:
    for text in ("", "  ", "w2@1:vote:kill"):
        for point in POINTS:
            Faults.parse(text, "w1").at(point, 1)


def test_an_abort_without_a_group_says_so() -> None:
    with pytest.raises(UserError, match="SHOAL_FAULT asks for an abort where there is no group"):
        Faults.parse("w1@1:vote:abort", "w1").at("vote", 1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("w1", f'SHOAL_FAULT has "w1"; {FORM}'),
        (
            "w1@x:vote:kill",
            'SHOAL_FAULT has "w1@x:vote:kill"; expected WORKER@STEP:POINT:ACTION, as in w1@5:vote:kill.',
        ),
        (
            "w1@-1:vote:kill",
            'SHOAL_FAULT has "w1@-1:vote:kill"; expected WORKER@STEP:POINT:ACTION, as in w1@5:vote:kill.',
        ),
        ("w1@1:vote:kill,", f'SHOAL_FAULT has ""; {FORM}'),
        ("w2@1:lunch:kill", f'SHOAL_FAULT names the point "lunch"; expected {", ".join(POINTS)}.'),
        ("w1@1:vote:maim", 'SHOAL_FAULT names the action "maim"; expected kill, stop, abort.'),
    ],
)
def test_a_wrong_plan_gets_its_sentence(text: str, sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        Faults.parse(text, "w1")
    assert str(refusal.value) == sentence
