"""The body of the loop cannot tell a warm-up: what it sees is the job's, and what it asks for is ignored."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from crew import Crew, Task, engine_of, train
from reference import reference
from rule import Edit, holds, rule
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.engine import Engine
from shoal_protos.errors import UserError
from shoal_protos.messages import Welcome
from shoal_protos.wire.controller import decode_controller, encode_controller

TASK = Task({"max_steps": 8})


@rule(
    "… during which requests of the loop's body are ignored and `rank` is -1: otherwise a joiner could write "
    "untrained weights over a running job's",
    "A change of the world",
    broken_by=Edit("shoal.training.training_loop", "if context.loop.is_warming_up or _is_in", "if _is_in"),
    after="A joiner warms up on",
)
def test_a_joiners_body_sees_the_jobs_step_and_loss_and_no_rank() -> None:
    seen: list[tuple[int, int, float, bool]] = []

    def look(engine: Engine) -> None:
        if engine.context.world is None:
            seen.append((engine.rank, engine.global_step, engine.loss, engine.warming_up))
        else:
            assert not engine.warming_up and engine.rank >= 0

    with Crew("ab", Task(TASK.options, in_loop=look)) as crew:
        crew.train_to(3)
        assert [(rank, step) for rank, step, *_ in seen] == [(-1, 0), (-1, 0)]
        assert all(math.isnan(loss) and warm for *_, loss, warm in seen)
        loss = crew.workers["a"].engine.loss
        crew.beat(2)  # a step is told with the next heartbeat
        joiner = crew.add("c")
        crew.until("its warm-up", lambda: len(seen) == 3)
        assert seen[2] == (-1, 3, loss, True)
        crew.train_until("c to be in", lambda: joiner in crew.members())
        assert crew.finish() == reference(TASK)


@holds("… during which requests of")
def test_requests_of_a_warm_up_are_ignored(tmp_path: Path) -> None:
    """Whoever asks there is not in the job yet: the job must not end, and no untrained weights be written."""
    file, asked = tmp_path / "model.safetensors", []

    def ask(engine: Engine) -> None:
        if engine.warming_up:
            asked.append([engine.stop(), engine.export(file), engine.save_checkpoint(), engine.fingerprint()])
            engine.report(noise=1.0)
            with engine.evaluating():
                engine.report(noise=1.0)

    options = {**TASK.options, "shoal": {"checkpoint": {"path": str(tmp_path / "saves")}}}
    with Crew("ab", Task(options, in_loop=ask)) as crew:
        crew.train_to(2)
        crew.add("c")
        assert crew.finish() == reference(TASK)
        assert "noise" not in crew.workers["a"].engine.reports
    assert asked == [[None] * 4] * 3
    assert not file.exists() and not list((tmp_path / "saves").glob("*/manifest.json"))


@pytest.mark.parametrize("loss", [None, 1.25])
def test_the_welcome_tells_step_and_loss(loss: float | None) -> None:
    welcome = Welcome("w3", 1.0, 10.0, 1800.0, step=171, loss=loss)
    assert decode_controller(encode_controller(welcome)) == welcome


# ---- requests in the loop, and after it


def alone(**options: Any) -> Engine:
    return engine_of(Task({"max_steps": 2, **options}), AloneLink(), Faults([]))


def test_in_the_loop_a_request_returns_at_once_even_after_the_last_step(tmp_path: Path) -> None:
    """It is carried out before the loop ends."""
    engine, file = alone(), tmp_path / "model.safetensors"
    for batch in engine:
        engine.backward(engine.module(**batch))
        assert engine.step() in (True, False)
        if engine.context.is_over:
            assert engine.fingerprint() is None
            engine.export(file)
            assert not file.exists()
    assert file.exists()
    assert len(engine.fingerprint() or "") == 64


def test_the_loss_prints_before_the_first_step_and_after() -> None:
    engine, printed = alone(), []
    for batch in engine:
        printed.append(f"{engine.loss:.3f}")
        engine.backward(engine.module(**batch))
        engine.step()
    assert printed[0] == "nan" and printed[-1] != "nan"


def test_a_request_after_a_loop_that_was_left_early_is_refused_in_a_sentence() -> None:
    engine = alone()
    for _ in engine:
        break
    with pytest.raises(UserError, match=r"engine\.stop was called after the loop was left at step 0 of 2"):
        engine.stop()
    engine.context.ended = True
    with pytest.raises(UserError, match=r"engine\.fingerprint was called after the script's end"):
        engine.fingerprint()


def test_alone_the_script_is_rank_0_from_the_start() -> None:
    engine = alone()
    assert (engine.rank, engine.global_step) == (0, 0)
    train(engine, TASK, lambda: None)
    assert (engine.rank, engine.global_step) == (0, 2)
