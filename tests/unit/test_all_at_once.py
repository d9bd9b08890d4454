"""A script that has several things wrong hears of all of them at once, and what would train wrongly is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from crew import ONE_AT_A_TIME, Task, engine_of, train
from shoal.callbacks import EarlyStopping, SaveBest
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.engine import Engine
from shoal_protos.errors import UserError
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset, default_collate

SAMPLES = TensorDataset(torch.zeros(16, 1), torch.zeros(16, 1))
CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "shoal": {"lanes": 2, "max_steps": 2}}
NAMED = {**CONFIG, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def refused(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(UserError) as caught:
        shoal.initialize(*args, **kwargs)
    return str(caught.value)


def test_arguments_that_are_wrong_in_many_ways_are_one_message() -> None:
    config = {**CONFIG, "gradient_cliping": 1.0, "shoal": {"lane": 2, "max_steps": 2}}
    message = refused([nn.Linear(1, 1)], config, DataLoader(SAMPLES, batch_size=4), torch.optim.SGD)
    assert message.startswith("shoal.initialize has 5 faults:\n  - ")
    parts = ["model is a list; expected one torch.nn.Module", "optimizer is the class SGD; expected an object",
             "order is that of a SequentialSampler", "`gradient_cliping` is an unknown", "`shoal.lane` is"]  # fmt: skip
    assert [message.count(part) for part in parts] == 5 * [1]


def test_what_only_the_job_shows_to_be_wrong_is_one_message_too(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = {"enabled": True, "output_path": str(tmp_path / "file")}
    config = {
        **CONFIG,
        "csv_monitor": place,
        "tensorboard": place,
        "optimizer": {"type": "SGD", "params": {"l": 1, "r": 2}},
    }
    message = refused(nn.Linear(1, 1), config, [1])
    assert message.startswith("the job has 5 faults:")
    for part in (
        "`csv_monitor.output_path`",
        "`tensorboard.output_path`",
        "the dataset has 1 sample",
        "params.l`",
        "params.r`",
    ):
        assert message.count(part) == 1


@pytest.mark.parametrize("config", [CONFIG, NAMED])
def test_a_schedule_of_another_optimizer_is_refused(config: dict[str, Any]) -> None:
    """It would change no rate that trains. Where the config names the optimizer, a given schedule is another one's."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if config is CONFIG else None
    schedule = StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 1)
    assert "a StepLR, sets the rates of another optimizer" in refused(model, config, SAMPLES, optimizer, schedule)


def test_a_model_that_an_engine_has_is_refused_by_another_one() -> None:
    """As where a cell of a notebook is run again."""
    model = nn.Linear(1, 1)
    shoal.initialize(model, NAMED, SAMPLES)
    assert "the model was given to an engine before" in refused(model, NAMED, SAMPLES)


def test_of_two_collate_fns_none_is_ignored() -> None:
    loader = DataLoader(SAMPLES, batch_size=2, shuffle=True, collate_fn=list)
    assert "a collate_fn of its own; keep one" in refused(nn.Linear(1, 1), NAMED, loader, collate_fn=default_collate)


def test_a_model_that_exchanges_gradients_itself_is_refused_by_its_wrapper() -> None:
    """Such a class is made without a process group: only what it is is looked at."""
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = nn.Linear(1, 1)
    assert "(DistributedDataParallel) is a DistributedDataParallel, whose own" in refused(wrapped, NAMED, SAMPLES)
    assert 'module "0" is a DistributedDataParallel' in refused(nn.Sequential(wrapped), NAMED, SAMPLES)
    assert "(DataParallel) is a DataParallel, which splits each batch" in refused(
        nn.DataParallel(nn.Linear(1, 1)), NAMED, SAMPLES
    )
    fully_sharded = nn.Linear(1, 1)
    fully_sharded.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})  # as fully_shard does
    sentence = refused(nn.Sequential(fully_sharded), NAMED, SAMPLES)
    assert 'module "0" is a FSDPModule, whose own' in sentence and "leave fsdp_size out, and give experts" in sentence


def alone(use: Callable[[Engine], object], prepare: Callable[[Engine], None] = lambda _: None) -> None:
    with ONE_AT_A_TIME:
        task = Task({"max_steps": 2}, prepare=prepare)
        engine = engine_of(task, AloneLink(), Faults([]))
        train(engine, task, lambda: None)
        use(engine)


def shard(dataset: Any) -> Callable[[Engine], object]:
    def use(engine: Engine) -> None:
        with engine.evaluating():
            next(iter(engine.shard(dataset)))

    return use


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (lambda engine: engine.report(accuracy="0.9"), r"engine\.report got accuracy='0\.9'; expected one number"),
        (lambda engine: engine.report(accuracy=None), r"engine\.report got accuracy=None"),
        (lambda engine: engine.on_step("print"), r"engine\.on_step got 'print'; expected a function that takes the"),
        (lambda engine: engine.on_step(EarlyStopping), r"engine\.on_step got <class .*EarlyStopping'>"),
        (
            shard(DataLoader(SAMPLES)),
            r"engine\.shard got a DataLoader; give its dataset, engine\.shard\(loader\.dataset",
        ),
        (shard(iter(SAMPLES)), r"engine\.shard got a .*, which has no numbered samples"),
    ],
)
def test_what_a_call_cannot_use_is_a_sentence(use: Callable[[Engine], object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        alone(use)


def test_callbacks_say_all_that_is_wrong_with_them(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        EarlyStopping(patience=0, mode="minimum", smallest_change="x")  # type: ignore[arg-type]
    assert [
        word in str(caught.value) for word in ("patience is 0", "mode is 'minimum'", "smallest_change is 'x'")
    ] == 3 * [True]
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"SaveBest: .*file/below cannot be made"):
        SaveBest(tmp_path / "file" / "below" / "best.safetensors")
    with pytest.raises(UserError, match=r"SaveBest: .* is a folder; name a file in it"):
        SaveBest(tmp_path)


def test_a_number_that_nobody_reports_and_a_second_loop_are_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    alone(lambda engine: list(engine), lambda engine: engine.on_step(EarlyStopping("val_los")))
    log = capsys.readouterr().err.splitlines()
    [never] = [line for line in log if "number_never_reported" in line]
    [over] = [line for line in log if "the_job_is_over" in line]
    assert '"number": "val_los"' in never and "one loop over the engine is the whole job" in over
