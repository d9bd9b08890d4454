"""What scripts for DeepSpeed ask of engine, optimizer and module besides their loop, and DeepSpeed's commands."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import shoal.deepspeed as deepspeed
import torch
from crew import Crew, Task, undisturbed
from safetensors.torch import load_file
from shoal.deepspeed import comm
from shoal.deepspeed.__main__ import hand_over, run_command
from shoal.deepspeed.deepspeed_engine import DeepSpeedEngine, EngineFacts
from shoal.deepspeed.hf_config import stand_in_for_theirs
from shoal.deepspeed.initializing import Made
from shoal.deepspeed.surface import REFUSED_FLAGS, UNREAD_FLAGS
from shoal.training.engine import Engine
from shoal_protos.errors import UserError
from torch import nn

SAMPLES = [(torch.full((2,), float(number)), torch.zeros(1)) for number in range(16)]
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}}


def made(shoal: dict[str, Any] | None = None, **config: Any) -> Made:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    basis = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
             "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}  # fmt: skip
    return deepspeed.initialize(
        model=model, training_data=SAMPLES, config={**basis, **config}, shoal={"lanes": 2, "epochs": 1, **(shoal or {})}
    )


# ---- the engine, its optimizer and its scheduler


def test_rates_momenta_and_scales_are_told_where_deepspeeds_objects_tell_them() -> None:
    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": 0.0, "cycle_max_lr": 0.1}}
    engine, optimizer, _, scheduler = made(scheduler=cycle)
    its: Any = optimizer
    schedule: Any = scheduler
    assert (its.cur_scale, its.loss_scale, its.overflow) == (1.0, 1.0, False)
    assert (engine.skipped_steps, engine.dynamic_loss_scale()) == (0, False)
    assert engine.get_mom() == schedule.get_mom() == [(0.8, 0.99)]
    assert type(optimizer).__name__ == "AdamW" and isinstance(optimizer, torch.optim.AdamW)
    momentum = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}}
    flat, *_, schedule = made(optimizer=momentum, scheduler={"type": "WarmupLR", "params": {}})
    assert flat.get_mom() == [0.5] and schedule.get_mom() is None
    muon, *_ = made(optimizer={"type": "Muon", "params": {"momentum": 0.8}})
    assert muon.get_mom() == [0.8, (0.9, 0.95)]


def test_skipped_steps_are_the_jobs_also_on_a_joiner_and_after_a_resume(tmp_path: Path) -> None:
    skipped: list[bool] = []

    def script(elastic: Engine, before: Any) -> None:
        engine = DeepSpeedEngine(elastic)
        optimizer: Any = engine.optimizer
        for batch in elastic:
            before()
            step, scale = engine.global_steps, optimizer.cur_scale
            engine.backward(engine(**batch))
            engine.step()
            if engine.global_steps > step:
                assert optimizer.overflow is not engine.was_step_applied()
                skipped.append(optimizer.overflow and optimizer.cur_scale < scale)

    def facts(elastic: Engine) -> EngineFacts:
        found = EngineFacts()
        found.elastic = elastic
        return found

    options = {"max_steps": 14, "precision": FP16}
    undisturbed(Task(options, script=script))
    once = sum(skipped)
    assert once > 1
    saving = Task({**options, "shoal": {"checkpoint": {"path": str(tmp_path), "every_steps": 6}}})
    with Crew("ab", saving) as crew:
        crew.train_to(5)
        joiner = crew.add("c")
        crew.train_until("c to be in", lambda: joiner in crew.members())
        crew.finish()
        assert [facts(one.engine).skipped_steps for one in crew.members()] == 3 * [once]
    with Crew("a", saving) as crew:
        crew.finish()
        assert facts(crew.workers["a"].engine).skipped_steps == once


def test_backward_gives_the_loss_by_the_accumulation_and_takes_nothing_that_would_change_the_gradient() -> None:
    engine, _, loader, _ = made()
    for points, targets in loader:
        loss = nn.functional.mse_loss(engine(points), targets)
        for odd in ({"retain_graph": True}, {"scale_wrt_gas": False}, {"inputs": [loss]}):
            with pytest.raises(UserError, match=f"engine.backward got {next(iter(odd))}=.*; expected the loss alone"):
                engine.backward(loss, **odd)
        value = engine.backward(loss, retain_graph=False, scale_wrt_gas=True)
        assert value.item() == loss.item() / 2 and not value.requires_grad
        engine.step()


# ---- deepspeed.comm


def test_comm_says_which_member_this_is_and_refuses_what_would_wait_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as before:
        before.setattr(comm, "engines", list)
        assert comm.get_rank() == 0
        with pytest.raises(UserError, match=r"get_world_size was called before deepspeed\.initialize"):
            comm.get_world_size()
    engine, *_ = made()
    assert (comm.get_rank(), deepspeed.comm.get_world_size(), comm.barrier()) == (0, engine.dp_world_size, None)
    for rank, warming_up, answer in ((-1, False, 0), (-1, True, -1), (1, False, 1)):
        with monkeypatch.context() as patch:
            patch.setattr(EngineFacts, "global_rank", rank)
            patch.setattr(Engine, "warming_up", warming_up)
            assert comm.get_rank() == answer
    with pytest.raises(UserError, match=r"deepspeed\.comm\.get_rank got a group"):
        comm.get_rank(group=object())
    with pytest.raises(UserError, match=r"deepspeed\.comm\.all_reduce is not in Shoal; workers come and go, .*report"):
        comm.all_reduce(torch.ones(1))
    assert not hasattr(comm, "broadcast")
    with pytest.raises(UserError, match=r"deepspeed\.checkpointing\.configure is not in Shoal; what the config"):
        deepspeed.checkpointing.configure(None)


# ---- commands


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ("train.py --epochs 3", "run train.py -- --epochs 3"),
        ("--num_gpus=2 --master_port 29501 train.py --num_gpus 4", "run --workers 2 train.py -- --num_gpus 4"),
        ("--num_nodes 1 --num_gpus -1 -q --enable_each_rank_log logs t.py", "run --log-dir logs t.py --"),
        (f"{' '.join(UNREAD_FLAGS)} t.py", "run t.py --"),
        ("--module --num_gpus 2 package.train --epochs 3", "run --workers 2 -m package.train -- --epochs 3"),
        ("--no_python bash train.sh --module", "run bash -- train.sh --module"),
    ],
)
def test_deepspeeds_command_becomes_shoal_run(given: str, becomes: str) -> None:
    assert run_command(given.split()) == becomes.split()


@pytest.mark.parametrize("flag", [*REFUSED_FLAGS, "-H", "-i", "--num_nodes", "--gpus"])
def test_a_flag_of_deepspeeds_command_that_has_no_meaning_here_is_refused_with_what_to_do(flag: str) -> None:
    with pytest.raises(UserError, match=r"`shoal |CUDA_VISIBLE|before\.|docs/deepspeed\.md"):
        run_command([flag, "2", "train.py"])


def test_a_script_is_a_module_or_a_program_and_not_both() -> None:
    with pytest.raises(UserError, match=r"--no_python: not allowed with argument --module; docs/deepspeed\.md"):
        run_command(["--module", "--no_python", "train"])


@pytest.mark.parametrize("comes_first", ["shoal", "transformers"])
def test_transformers_configuration_for_deepspeed_is_the_doors_in_either_order_of_imports(
    comes_first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "transformers" / "integrations"
    package.mkdir(parents=True)
    (tmp_path / "transformers" / "__init__.py").touch()
    (package / "__init__.py").write_text("from .deepspeed import HfDeepSpeedConfig\n")
    wants = "    def __init__(self, given):\n        raise ImportError('deepspeed')\n"
    own = "class Own(HfDeepSpeedConfig):\n    def __init__(self, given):\n        self.given = given\n"
    (package / "deepspeed.py").write_text(f"class HfDeepSpeedConfig:\n{wants}\n{own}")
    before = [one for one in sys.meta_path if type(one).__module__ != stand_in_for_theirs.__module__]
    monkeypatch.setattr(sys, "meta_path", before)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        if comes_first == "shoal":
            stand_in_for_theirs()
        theirs: Any = importlib.import_module("transformers.integrations")
        if comes_first == "transformers":
            stand_in_for_theirs()
        made = theirs.HfDeepSpeedConfig({"zero_optimization": {"stage": 2}})
        assert isinstance(made, deepspeed.HfDeepSpeedConfig) and made.is_zero2()
        assert theirs.deepspeed.Own(7).given == 7, "a subclass stays what it is"
    finally:
        for name in [one for one in sys.modules if one.partition(".")[0] == "transformers"]:
            del sys.modules[name]


def test_a_command_of_deepspeeds_is_handed_over_or_ends_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    becomes: list[Any] = []

    def become(program: str, command: list[str]) -> None:
        becomes.extend((Path(program).name, *command[1:]))
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", become)
    monkeypatch.setattr(sys, "argv", ["env_report.py", "--for", "worker"])
    with pytest.raises(SystemExit):
        runpy.run_module("shoal.deepspeed.env_report", run_name="__main__")
    assert becomes == ["shoal", "doctor", "--for", "worker"]
    with pytest.raises(SystemExit, match="2"):
        hand_over(lambda: run_command(["-H", "hosts", "train.py"]))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="2"):
        hand_over(lambda: ["doctor"])
    refused, missing = capsys.readouterr().err.splitlines()
    assert "-H has no meaning here: workers of other hosts join a controller" in refused
    assert "the command `shoal` is not installed" in missing


def test_zero_to_fp32_beside_the_checkpoints_writes_float32_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place, out = tmp_path / "place", tmp_path / "out"
    engine, _, loader, _ = made({"checkpoint": {"path": str(place)}}, bf16={"enabled": True})
    for points, targets in loader:
        engine.backward(nn.functional.mse_loss(engine(points.bfloat16()), targets.bfloat16()))
        engine.step()
    engine.save_checkpoint(place, tag="last")

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["zero_to_fp32.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(place / "zero_to_fp32.py"), run_name="__main__")
        assert isinstance(ended.value.code, int)
        return ended.value.code

    assert run(place, out) == run(place, out / "last.safetensors", "--tag", "last") == 0
    weights, tagged = load_file(out / "model.safetensors"), load_file(out / "last.safetensors")
    assert weights["weight"].dtype == torch.float32 and torch.equal(weights["weight"], tagged["weight"])
    assert torch.equal(weights["weight"].bfloat16(), engine.module.weight)
    assert not torch.equal(weights["weight"], engine.module.weight.float()), "the masters"
    assert (run(place, out / "pytorch_model.bin"), run(place, out, "-t", "first")) == (2, 2)
    pickled, missing = capsys.readouterr().err.splitlines()[-2:]
    assert "would be a pickle; weights are written as safetensors" in pickled
    assert f'no checkpoint in {place} was saved as "first".' in missing
