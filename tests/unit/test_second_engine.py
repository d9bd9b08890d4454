"""Two engines in one script: refused to a worker, and a warning to a script that is alone."""

from __future__ import annotations

import copy

import pytest
import shoal
import torch
from integration.scripts import optimizer_of
from shoal_protos.errors import UserError
from torch import nn


def initialize() -> shoal.Engine:
    model = nn.Linear(4, 2)
    config = {"train_micro_batch_size_per_gpu": 2, "shoal": {"lanes": 2, "max_steps": 2}}
    data = torch.utils.data.TensorDataset(torch.randn(8, 4))
    return shoal.initialize(model=model, config=config, dataset=data, optimizer=optimizer_of(model))


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> shoal.Engine:
    monkeypatch.setattr("shoal.training.start._engines", [])
    monkeypatch.setattr("shoal.training.start.serve_at_exit", lambda _: None)
    return initialize()


def test_a_worker_is_one_engine(first: shoal.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is built, and no controller is asked, before it is refused."""
    monkeypatch.setenv("SHOAL_CONTROLLER", "127.0.0.1:1")
    before = copy.deepcopy(first.module.state_dict())
    with pytest.raises(UserError, match=r"the second shoal\.initialize of this script.*engine\.turn\(name\)"):
        initialize()
    assert all(map(torch.equal, first.module.state_dict().values(), before.values()))


def test_alone_a_second_engine_is_a_warning_while_the_first_is_at_work(
    first: shoal.Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    second = initialize()
    assert capsys.readouterr().err.count("second_engine") == 1
    for engine in (first, second):
        for (x,) in engine:
            engine.backward(engine.module(x).square().mean())
            engine.step()
    capsys.readouterr()
    initialize()
    assert "second_engine" not in capsys.readouterr().err
