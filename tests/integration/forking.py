"""What forked processes of the tests of forks run: workers that fork children of their own."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from integration.linked_workers import DESCRIPTION, NEW
from integration.scripts import Samples, config, model_of, optimizer_of, scheduler_of
from shoal.session.client import ControllerLink
from shoal.session.settings import SessionSettings


def fork_beside_a_session(controller: str, count: int, result: str) -> None:
    """Fork children that end at once while the session talks; how they ended, by exit status, goes to `result`."""
    link = ControllerLink(SessionSettings(controller=controller, job="job", worker="a"))
    link.introduce(DESCRIPTION, NEW)
    link.rehearsed()
    ends: Counter[int] = Counter()
    for _ in range(count):
        child = os.fork()
        if child == 0:
            os._exit(0)
        ends[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])] += 1
    link.close()
    Path(result).write_text(json.dumps(ends))


def train_and_evaluate(result: str, **options: Any) -> None:
    """A loop that goes through a DataLoader with two worker processes after every step, as an evaluation does."""
    import shoal

    model = model_of(options)
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer, "CosineAnnealingLR")
    samples = Samples(100)
    engine = shoal.initialize(
        model=model, config=config(options), dataset=samples, optimizer=optimizer, scheduler=scheduler
    )
    evaluated = 0
    seen = 0
    for batch in engine:
        engine.backward(engine.module(**batch))
        engine.step()
        if engine.global_step > evaluated:
            evaluated = engine.global_step
            held_out = torch.utils.data.DataLoader(Samples(8), batch_size=2, num_workers=2)
            seen += sum(len(batch["tokens"]) for batch in held_out)
    Path(result).write_text(json.dumps({"fingerprint": engine.fingerprint(), "seen": seen}))
