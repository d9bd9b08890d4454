"""The same bits in every world: any number of workers, any stage, whatever a model or an optimizer brings along.

The comparison is always with one worker that was never disturbed. Where it is not the number of workers that is tried,
one of three dies at the third step and is replaced, so that states are promoted, filled and handed out on the way.
"""

from __future__ import annotations

from typing import Any

import pytest
from integration.cluster import Cluster
from matrices import shortened
from tiers import promise

STEPS: dict[str, Any] = {"max_steps": 8}
DISTURBED: dict[str, Any] = {"max_steps": 24}

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "AdamW": {"fused": True},
    "Adam": {"amsgrad": True, "fused": False},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "Adadelta": {},
    "RMSprop": {"centered": True},
    "Rprop": {},
    "ASGD": {},
    "SGD, momentum in one group": {"name": "SGD", "apart": {"momentum": 0.9}},
    "AdamW, amsgrad in one group": {"name": "AdamW", "apart": {"amsgrad": True}},
}
SCHEDULERS = ("StepLR", "OneCycleLR", "ReduceLROnPlateau")
MODELS: dict[str, dict[str, Any]] = {
    "no clipping": {"gradient_clipping": 0.0},
    "two micro-batches per lane": {"micro_batches_per_lane": 2, "samples": 70},
    "five lanes": {"lanes": 5},
    "bfloat16, sharded gradients": {"precision": {"bf16": {"enabled": True}}, "stage": 2},
    "bfloat16, sharded parameters": {"precision": {"bf16": {"enabled": True}}, "stage": 3, "evaluate": True},
    "seven lanes": {"lanes": 7},
    "float16, sharded gradients": {"precision": {"fp16": {"enabled": True}}, "stage": 2},
    "float64": {"double": True},
    "no dropout, no buffers": {"dropout": 0.0, "buffers": False},
    "a step is the whole epoch": {"samples": 17},
}


WORLDS = [(1, 1), (1, 2), (2, 0), (2, 2), (3, 1), (3, 2), (4, 0), (4, 2), (8, 1), (8, 2), (1, 3), (3, 3), (8, 3)]


@pytest.mark.parametrize(("workers", "stage"), shortened(WORLDS, (2, 0), (3, 1), (8, 2), (3, 3)))
@promise("stage 0", "2-0")
@promise("stage 1", "3-1")
@promise("stage 2", "8-2")
@promise("stage 3", "3-3")
def test_every_world_gives_the_same_bits(workers: int, stage: int) -> None:
    with Cluster(workers=workers, options={**STEPS, "stage": stage}) as cluster:
        report = cluster.wait_undisturbed()
    assert [world["workers"] for world in report["generations"]] == [workers]


def disturbed(options: dict[str, Any]) -> None:
    with Cluster(workers=3, options={**DISTURBED, **options}, faults="w1@3:exchange:kill", pace=0.01) as cluster:
        cluster.wait_state("w1", "lost")
        cluster.add()
        cluster.wait_world(3)
        cluster.until("its blocks to be filled", lambda _: cluster.workers()["w3"]["blocks"])
        cluster.wait_undisturbed()


@pytest.mark.parametrize("name", shortened(OPTIMIZERS, "Adam"))
@promise("an optimizer and a scheduler", "Adam")
def test_every_elementwise_optimizer_gives_the_same_bits(name: str) -> None:
    disturbed({"optimizer": {"name": name, **OPTIMIZERS[name]}})


@pytest.mark.parametrize("name", shortened(SCHEDULERS, "ReduceLROnPlateau"))
@promise("an optimizer and a scheduler", "ReduceLROnPlateau")
def test_every_scheduler_gives_the_same_bits(name: str) -> None:
    disturbed({"scheduler": name})


@pytest.mark.parametrize(
    "name",
    shortened(MODELS, "two micro-batches per lane", "bfloat16, sharded parameters", "float16, sharded gradients"),
)
@promise("bfloat16", "bfloat16, sharded parameters")
@promise("float16", "float16, sharded gradients")
def test_every_model_and_config_gives_the_same_bits(name: str) -> None:
    disturbed(MODELS[name])
