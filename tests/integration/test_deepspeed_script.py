"""The example of a script for DeepSpeed as it stands there: alone, in real processes of which one dies, in PyTorch."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import shoal.deepspeed as deepspeed
import torch
from integration.cluster import Cluster, alone
from shoal.core.sampler import Sampler
from tiers import promise
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "deepspeed_script.py"
SCRIPT = "integration.test_deepspeed_script:example"
EPOCHS = 2


def example(result: str) -> None:
    """What a worker runs."""
    sys.argv = [EXAMPLE.name, "--epochs", str(EPOCHS)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    Path(result).write_text(json.dumps({"printed": printed.getvalue()}))


def plain_loss() -> float:
    """The same script in PyTorch's own words: the mean loss of the last step."""
    given = runpy.run_path(str(EXAMPLE), run_name="imported")
    rings, sampler = given["Rings"](), Sampler(2048, lanes=8, micro_batch_size=8, micro_batches_per_lane=1, seed=0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, max(0, step - 1) / 20))
    total = 0.0
    for step in range(EPOCHS * sampler.steps_per_epoch):
        total = 0.0
        for lane in range(8):
            points, labels = zip(*(rings[number] for number in sampler.indices(step, lane, 0)), strict=True)
            loss = nn.functional.cross_entropy(model(torch.stack(points)), torch.stack(labels)) / 8
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
    return total


@promise("a script for DeepSpeed")
def test_a_script_for_deepspeed_has_the_loss_of_plain_pytorch_and_the_same_bits_through_a_kill() -> None:
    undisturbed = alone({}, SCRIPT)["printed"]
    found = re.fullmatch(r"step (\d+), loss ([\d.]+), fingerprint (\w+)\n", undisturbed)
    assert found is not None, undisturbed
    assert (int(found[1]), float(found[2])) == (64, pytest.approx(plain_loss(), rel=1e-4))
    with Cluster(workers=2, script=SCRIPT, faults="w1@20:exchange:kill") as cluster:
        cluster.wait_done()
        assert cluster.fingerprint == found[3]


def classic(result: str) -> None:
    """A script of DeepSpeed's own documents: no key of Shoal's, a DataLoader and a sampler of its own, whole epochs."""
    deepspeed.init_distributed()
    rings = runpy.run_path(str(EXAMPLE), run_name="imported")["Rings"](512)
    sampler: DistributedSampler[Any] = DistributedSampler(rings)
    loader = DataLoader(rings, batch_size=16, sampler=sampler)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    config = {
        "train_batch_size": 32, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    batches = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for points, labels in loader:
            engine.backward(nn.functional.cross_entropy(engine(points), labels))
            engine.step()
            batches += len(labels)
        with torch.no_grad():
            assert sum(len(labels) for _, labels in DataLoader(rings, batch_size=64)) == 512
    engine.destroy()
    found = {"fingerprint": engine.elastic.fingerprint(), "step": engine.global_steps, "samples": batches}
    Path(result).write_text(json.dumps(found))


@promise("a script for DeepSpeed")
def test_a_classic_script_for_deepspeed_has_the_same_bits_alone_and_through_a_kill_without_a_key_of_shoals() -> None:
    script = "integration.test_deepspeed_script:classic"
    undisturbed = alone({}, script)
    assert (undisturbed["step"], undisturbed["samples"]) == (EPOCHS * 16, EPOCHS * 512)
    with Cluster(workers=2, script=script, faults="w1@20:exchange:kill") as cluster:
        cluster.wait_done()
        assert cluster.fingerprint == undisturbed["fingerprint"]
        assert cluster.job()["max_steps"] == EPOCHS * 16
