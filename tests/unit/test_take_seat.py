"""The seat of a process: where it asks for none, where it is refused one, and what must agree with it afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from rule import Edit, rule
from shoal.session import seat
from shoal.session.driver import SeatDriver
from shoal.session.seat import TakenSeat, check_seat, own_identity, take_seat
from shoal.session.settings import SessionSettings
from shoal.training.start import initialize
from shoal_protos.errors import UserError
from shoal_protos.messages import NO_CONTROLLER, WRONG_USE, AskSeat, Ending, Refusal, Seat, Shutdown
from shoal_protos.shape import ONE, Shape

PAIR = Shape(tensor=2)
CONTROLLED = {"SHOAL_CONTROLLER": "127.0.0.1:1", "SHOAL_JOB": "demo"}
ASK = AskSeat("demo", "", "a1", "here", 1, PAIR)


@pytest.fixture(autouse=True)
def _no_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seat, "_taken", [])


def test_a_cell_of_one_process_asks_for_nothing() -> None:
    assert take_seat(ONE, {}) == TakenSeat(ONE, "w0", 0) and own_identity() is None
    seat._taken.clear()
    assert take_seat(ONE, {**CONTROLLED, "SHOAL_WORKER_ID": "w7"}) == TakenSeat(ONE, "w7", 0) and own_identity() is None


def test_a_process_of_a_larger_cell_does_not_begin_without_a_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["examples/tensor.py", "--steps", "3"])
    with pytest.raises(UserError) as refused:
        take_seat(Shape(tensor=4), {})
    assert str(refused.value) == (
        "this script's cell has 4 processes (tensor 4), and no controller has started this one; start it with \"shoal "
        'run --workers 4 tensor.py".'
    )
    with pytest.raises(UserError, match="WORLD_SIZE is 4: torchrun has started this script 4 times"):
        take_seat(ONE, {"WORLD_SIZE": "4"})  # before `shoal.cell` sets it to the size of the cell
    with pytest.raises(UserError, match="SHOAL_COORDINATE is 'left'; expected a whole number from 0 to 1023"):
        SessionSettings.from_environment({"SHOAL_COORDINATE": "left"})


@rule(
    "A process trains only cells of the shape that it was seated for before its model was built",
    "A change of the world",
    broken_by=[
        Edit("shoal.training.start", "    check_seat(given.config.cell)\n", ""),
        Edit("shoal.session.seat", "    if not _taken and shape.processes > 1:", "    if False:"),
        Edit("shoal.session.seat", "    if _taken and _taken[0].cell != shape:", "    if False:"),
    ],
)
def test_the_config_and_the_seat_are_of_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"train_batch_size": 8, "shoal": {"max_steps": 1, "cell": {"tensor": 2}}}
    model = torch.nn.Linear(1, 1)
    given = {"model": model, "config": config, "optimizer": torch.optim.SGD(model.parameters(), lr=1)}
    with pytest.raises(UserError, match=r"call shoal\.cell before the model is built"):
        initialize(**given, dataset=[1] * 8)
    take_seat(ONE, {})
    with pytest.raises(UserError, match="for cells of one process, and the config's are of tensor 2; give"):
        check_seat(PAIR)
    with pytest.raises(
        UserError, match="for cells of one process before, and now for cells of tensor 2; a process has"
    ):
        take_seat(PAIR, {})


def test_what_shoal_cell_refuses_ends_the_script_with_its_sentence_and_a_status_of_its_own() -> None:
    script = "import shoal; shoal.cell(expert=0)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == WRONG_USE
    assert done.stderr.startswith("shoal: `shoal.cell.expert` is 0; expected a whole number")


def test_the_answer_to_the_question_ends_the_wait_and_what_may_come_back_does_not() -> None:
    driver = SeatDriver(ASK, is_launched=False)
    assert driver.say_hello() == ASK and driver.take_outgoing(beat=True) == []
    for refusal in (Refusal("no leader", final=False), Refusal("no leader", final=False)):
        driver.on_message(refusal)
    driver.on_controller_unreachable(1e6)
    assert not driver.silent
    driver.on_message(Seat("w3", 1))
    driver.on_message(Refusal("too late"))
    assert driver.silent and driver.wait() == Seat("w3", 1)


def test_a_final_refusal_a_job_that_is_over_and_a_bug_end_it_with_a_sentence() -> None:
    for end, sentence in (
        (lambda driver: driver.on_message(Refusal("another shape")), "another shape"),
        (lambda driver: driver.on_message(Shutdown(Ending.DONE, "job demo is done")), "job demo is done"),
        (lambda driver: driver.on_failure(RuntimeError("a bug")), "the session with the controller failed: a bug"),
    ):
        driver = SeatDriver(ASK, is_launched=True)
        end(driver)
        with pytest.raises(UserError, match=f"^{sentence}$"):
            driver.wait()


def test_a_launched_process_waits_no_longer_than_one_that_says_hello() -> None:
    driver = SeatDriver(ASK, is_launched=True)
    driver.on_controller_unreachable(70.0)
    assert not driver.silent
    driver.on_controller_unreachable(70.1)
    with pytest.raises(SystemExit) as ended:
        driver.wait()
    assert ended.value.code == NO_CONTROLLER
