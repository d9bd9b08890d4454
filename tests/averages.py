"""Jobs that keep averages of weights, in every form of state, and what their engines hold of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from crew import ONE_AT_A_TIME, Task, engine_of, train
from late_device import LateDevice
from shoal.blocks.loaded_state import AVERAGE
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.engine import Engine
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

Values = dict[str, Tensor]  # each of its parameter's shape

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 16, "hysteresis": 1}}
"""The first steps overflow, and are skipped."""
DECAY = 0.9
STEPS = 6


def options(average: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"max_steps": STEPS, "shoal": {"average": average or {"decay": DECAY}}, **more}


def averages_of(engine: Engine) -> dict[str, Tensor]:  # each of its parameter's shape
    """By parameter, of what this worker holds, which is all."""
    state = engine.context.state
    found: dict[str, Tensor] = {}
    for stretch, parts in state.held.home.stream(state.everything):
        if AVERAGE not in parts:
            continue  # frozen, or none is made yet
        start, _ = state.layout.elements(stretch)
        for slot in state.layout.buckets[stretch.bucket].slots:
            name, end = slot.parameter.name, slot.start + slot.parameter.elements
            first, last = max(slot.start, start), min(end, start + parts[AVERAGE].numel())
            if first < last:
                flat = found.setdefault(name, torch.zeros(slot.parameter.elements, dtype=parts[AVERAGE].dtype))
                flat[first - slot.start : last - slot.start] = parts[AVERAGE][first - start : last - start]
    shapes = {slot.parameter.name: slot.parameter.shape for one in state.layout.buckets for slot in one.slots}
    return {name: flat.view(shapes[name]) for name, flat in found.items()}


def averaged_by_torch(task: Task, every: int, from_step: int) -> tuple[Engine, AveragedModel]:
    """An engine alone that has trained, and what torch makes of its weights beside it."""
    made: list[AveragedModel] = []

    def update(engine: Engine) -> None:
        if not made:
            made.append(AveragedModel(engine.module, multi_avg_fn=get_ema_multi_avg_fn(DECAY)))
        step = engine.global_step
        if step > from_step and (step - from_step) % every == 0:
            made[0].update_parameters(engine.module)

    with ONE_AT_A_TIME:
        own = Task(**{**vars(task), "prepare": lambda engine: engine.on_commit(update)})
        engine = engine_of(own, AloneLink(), Faults([]))
        train(engine, own, lambda: None)
    return engine, made[0]


FORMS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0}, "1": {"stage": 1}, "2": {"stage": 2}, "3": {"stage": 3},
    "1, bf16": {"stage": 1, "precision": BF16}, "3, bf16": {"stage": 3, "precision": BF16},
    "1, fp16": {"stage": 1, "precision": FP16},
    "1, files": {"stage": 1, "offload": "files"}, "3, files, bf16": {"stage": 3, "offload": "files", "precision": BF16},
    "1, host of a device": {"stage": 1, "offload": "cpu"},
    "3, host of a device": {"stage": 3, "offload": "cpu", "offload_param": True},
    "2, files of a device": {"stage": 2, "offload": "files"},
}  # fmt: skip


def in_form(form: str, place: Path, **more: Any) -> Task:
    given = options(**{**FORMS[form], **more})
    if given.get("offload") == "files":
        given["offload"] = str(place)
    device: dict[str, Any] = {"device": LateDevice} if form.endswith("of a device") else {}
    return Task(given, **device)


def in_memory(form: str, **more: Any) -> Task:
    """The same bits in the simplest world."""
    return Task(options(**{"precision": FORMS[form].get("precision", {}), **more}))


def options_of(form: str) -> dict[str, Any]:
    return {"precision": FORMS[form]["precision"]} if "precision" in FORMS[form] else {}


def with_options(task: Task, more: dict[str, Any]) -> Task:
    return replace(task, options={**task.options, **more})
