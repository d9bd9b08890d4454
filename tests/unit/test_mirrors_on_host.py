"""Mirrors in host memory: what a worker holds of others' blocks is off the device, and has the bits of its owners.

On a device that is late: what is read before it has come down, or not brought up, is a wrong bit or an assertion.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shoal.blocks.unit_flats
import torch
from crew import Crew, Task, Worker, undisturbed
from integration.scripts import config
from late_device import LateDevice
from matrices import shortened
from ordered_crew import OrderedCrew
from rule import Edit, holds, rule
from shoal.blocks.flat import adopt, lay_out_model, trainable
from shoal.blocks.shard_sums import ShardSums
from shoal.blocks.values import WholeValues
from shoal.config.load import load_config
from shoal.offload.state_place import StatePlace, held_blocks
from shoal.process.device import HOST
from shoal.training.engine import Engine
from shoal_protos.acts import DrainWorker, Scale
from shoal_protos.errors import UserError
from tiers import check
from torch import nn

pytestmark = check("tries every step on a device of the tests")

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}
TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.blocks.unit_flats, "POISON", True)


def look_where_state_lies(engine: Engine) -> None:
    """Owned blocks are on the device, and all others off it."""
    state, world = engine.context.state, engine.context.world
    if world is None:
        return
    for segment in state.held.segments.in_order:
        is_owned = state.held_layout.runs([segment.stretch]) <= world.owned
        kept = [one for one in state.held.segments.state_of(segment).values() if one.dim()]
        assert {state.device.holds(one) for one in kept} <= {is_owned}, f"{segment.stretch}, owned: {is_owned}"


def on_host(options: dict[str, Any], **more: Any) -> Task:
    shoal_section = {"mirrors_on": "host", **options.get("shoal", {})}
    given = {"max_steps": 6, **options, "shoal": shoal_section}
    return Task(given, **{"device": LateDevice, "in_loop": look_where_state_lies, **more})


def right(task: Task) -> str:
    """Of a world of one on the CPU, with mirrors where they are by default."""
    section = {**task.options["shoal"], "mirrors_on": "device"}
    return undisturbed(replace(task, options={**task.options, "shoal": section}, device=lambda: HOST))


def look_at_votes(worker: Worker, point: str, _: int) -> None:
    """The gradients of owned blocks are on the device, and those of others off it."""
    state, world = worker.engine.context.state, worker.engine.context.world
    if point != "vote" or not isinstance(state.sums, ShardSums) or world is None:
        return
    reduced, owned = state.sums.reduced, world.traffic.owned[world.rank]
    for runs, is_owned in ((reduced.runs & owned, True), (reduced.runs - owned, False)):
        for stretch in state.layout.stretches(runs):
            assert state.device.holds(reduced.of(stretch)) is is_owned


def through_a_loss_and_a_join(task: Task, point: str = "", names: str = "abc") -> None:
    with Crew(names, task) as crew:
        crew.watchers.append(look_at_votes)
        crew.train_to(2)
        if point:
            crew.plant("b", 3, point)
        else:
            crew.kill("b")
        crew.train_to(4)
        crew.add("z")
        assert crew.finish() == right(task)


FORMS: list[tuple[int, dict[str, Any]]] = [
    (stage, precision) for stage in range(4) for precision in ({}, BF16, FP16)
]  # fmt: skip


@rule(
    "Each piece of a mirror on the host is updated from the numbers that its blocks shared before the update",
    "Devices",
    broken_by=Edit(
        "shoal.blocks.state_home",
        "place.bring_up(one) if one.dim() else one.clone()",
        "place.bring_up(one)",
        by="test_a_mirror_on_the_host_that_goes_through_the_device_in_pieces_has_its_bits",
    ),
)
@rule(
    "A block's state moves with its ownership: to the device of its new owner, and to the host of its mirror",
    "Devices",
    broken_by=Edit(
        "shoal.training.resize",
        "        context.state.held.own(world.owned)\n        context.world,",
        "        context.world,",
    ),
)
@pytest.mark.parametrize(("stage", "precision"), shortened(FORMS, (1, {}), (3, BF16)))
def test_mirrors_on_the_host_have_their_bits_through_a_loss_and_a_join(stage: int, precision: dict[str, Any]) -> None:
    through_a_loss_and_a_join(on_host({"stage": stage, "precision": precision}))


@holds("Each piece of a mirror")
@pytest.mark.parametrize("stage", shortened([1, 2, 3], 3))
def test_a_mirror_on_the_host_that_goes_through_the_device_in_pieces_has_its_bits(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.blocks.state_home.PIECE_ELEMENTS", 1)  # a block
    through_a_loss_and_a_join(on_host({"stage": stage, "precision": BF16 if stage == 2 else {}}))


@rule(
    "A mirror on the host lies there whole before the update is over",
    "Devices",
    broken_by=Edit(
        "shoal.blocks.state_home",
        "        for copy in (one for copies in self._going for one in copies):\n            copy.wait()\n",
        "",
    ),
)
def test_after_an_update_a_mirror_on_the_host_has_come_down() -> None:
    place, model = StatePlace(device=LateDevice(), copies_on_host=True), nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    layout, parameters = lay_out_model(trainable(model, optimizer))
    held = held_blocks(place, layout, optimizer, WholeValues(layout, adopt(layout, parameters)), {}, keeps_weights=True)
    held.hold(layout.all_blocks)
    held.apply(WholeValues(layout, [torch.ones(bucket.elements) for bucket in layout.buckets]), 1.0)
    values = [
        one for state in held.home.states(layout.all_blocks, with_weights=True).values() for one in state.values()
    ]
    assert len(values) == 4 and not any(one.isnan().any() for one in values)


POINTS = [(1, "in_vote"), (2, "mirror"), (3, "in_vote"), (3, "optimizer"), (3, "gather"), (3, "exchange")]


@pytest.mark.parametrize(("stage", "point"), shortened(POINTS, (2, "mirror"), (3, "in_vote")))
def test_a_death_within_a_step_changes_no_bit(stage: int, point: str) -> None:
    through_a_loss_and_a_join(on_host({"stage": stage}), point)


MORE: dict[str, dict[str, Any]] = {
    "two mirrors": {"stage": 3, "mirrors": 2},
    "fills of several steps": {"stage": 3, "max_steps": 12, "shoal": {"fill_bytes_per_step": 100_000}},
    "averages": {"stage": 3, "precision": BF16, "shoal": {"average": {"decay": 0.9}}},
    "several micro-batches": {"stage": 3, "micro_batches_per_lane": 2},
    "no clipping": {"stage": 2, "gradient_clipping": 0.0},
}


@pytest.mark.parametrize("more", shortened([*MORE], "two mirrors", "averages"))
def test_whatever_else_a_job_has_its_bits_are_the_same(more: str) -> None:
    through_a_loss_and_a_join(on_host(MORE[more]), names="abcd" if more == "two mirrors" else "abc")


def test_a_spares_mirrors_are_on_the_host_until_it_trains_in_the_recovery() -> None:
    task = on_host({"stage": 3, "max_steps": 14})
    with Crew("abc", task) as crew:
        crew.watchers.append(look_at_votes)
        crew.train_to(2)
        crew.request(Scale(2, spares=1))
        crew.train_until("the spare", lambda: crew.at_rest() and len(crew.job.durable.current.trainers) == 2)
        before = crew.job.durable.current
        assert len(before.shares[2].mirrored) == before.blocks
        crew.kill("a")
        crew.train_until("the recovery", lambda: crew.job.durable.current.generation > before.generation)
        assert crew.finish() == right(task)


def test_workers_drain_and_blocks_go_to_others_with_equal_bits() -> None:
    task = on_host({"stage": 3, "max_steps": 8})
    with Crew("abcd", task) as crew:
        crew.watchers.append(look_at_votes)
        crew.train_to(2)
        crew.request(DrainWorker("c"))
        crew.train_until("it to leave", lambda: [worker.name for worker in crew.members()] == ["a", "b", "d"])
        assert crew.finish() == right(task)


@pytest.mark.parametrize("stage", shortened([1, 3], 3))
def test_a_checkpoint_goes_on_with_mirrors_on_the_host_and_on_the_device(stage: int, tmp_path: Path) -> None:
    place = {"checkpoint": {"path": str(tmp_path), "every_steps": 3}}
    with Crew("abc", on_host({"stage": stage, "max_steps": 3, "shoal": place})) as crew:
        crew.finish()
    beside = on_host({"stage": stage, "shoal": {**place, "mirrors_on": "device"}}, in_loop=lambda _: None)
    with Crew("ab", beside) as crew:
        assert crew.finish() == right(beside)
    with Crew("abc", on_host({"stage": stage, "max_steps": 9, "shoal": place})) as crew:
        assert crew.finish() == right(on_host({"stage": stage, "max_steps": 9}))


@rule(
    "What is mirrored to the memory of hosts goes by the host's group, whatever wire joins the devices",
    "Devices",
    broken_by=Edit(
        "shoal.exchange.round_reduction", "MIRRORED_BY_HOST if sums.are_mirrored_by_host else MIRRORED", "MIRRORED"
    ),
)
@pytest.mark.parametrize("stage", shortened([1, 2, 3], 3))
def test_over_a_wire_between_devices_gradients_of_mirrors_go_by_the_host(stage: int) -> None:
    task = on_host({"stage": stage})
    with OrderedCrew("abc", task) as crew:
        crew.train_to(3)
        crew.kill("b")
        assert crew.finish() == right(task)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"shoal": {"mirrors_on": "disk"}},
            '`shoal.mirrors_on` is "disk"; expected "device" or "host".',
        ),
        (
            {"stage": 3, "mirrors": 0, "shoal": {"mirrors_on": "host"}},
            '`shoal.mirrors_on` is "host" and `shoal.mirrors` is 0: there are none; leave `mirrors_on` out.',
        ),
        (
            {"offload": "/disk", "shoal": {"mirrors_on": "host"}},
            '`shoal.mirrors_on` is "host" and `zero_optimization.offload_optimizer.device` is "nvme": all state is in '
            "files then, that of mirrors too; leave one of the two out.",
        ),
        (
            {"offload": "cpu", "shoal": {"mirrors_on": "host"}},
            '`shoal.mirrors_on` is "host" and `zero_optimization.offload_optimizer.device` is "cpu": all state is in '
            "host memory then, that of mirrors too; leave one of the two out.",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(config(given))
    assert str(caught.value) == sentence


class OwnClass(torch.optim.SGD):
    """Not torch's: it may count its steps."""


@pytest.mark.parametrize(
    ("optimizer", "sentence"),
    [
        (
            lambda model: OwnClass(model.parameters(), lr=0.1),
            '`shoal.mirrors_on` is "host", and mirrors on the host are updated piece by piece, and OwnClass may count '
            'its steps; use a class of torch.optim; set "device", or leave `mirrors_on` out.',
        ),
        (
            lambda model: torch.optim.Muon(model.parameters()),
            '`shoal.mirrors_on` is "host", and Muon updates whole tensors, whose state is read before the vote of a '
            'step and again after it; set "device", or leave `mirrors_on` out.',
        ),
    ],
)
def test_optimizers_that_cannot_be_updated_piece_by_piece_are_refused(optimizer: Any, sentence: str) -> None:
    place = StatePlace(device=LateDevice(), copies_on_host=True)
    model = nn.Linear(2, 2, bias=False)
    layout, parameters = lay_out_model(trainable(model, torch.optim.SGD(model.parameters())))
    flats = WholeValues(layout, adopt(layout, parameters))
    with pytest.raises(UserError) as caught:
        held_blocks(place, layout, optimizer(model), flats, {})
    assert str(caught.value) == sentence


def test_on_the_cpu_a_warning_says_that_nothing_is_saved(capsys: pytest.CaptureFixture[str]) -> None:
    task = on_host({"max_steps": 1}, device=lambda: HOST, in_loop=lambda _: None)
    assert undisturbed(task) == right(task)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    warnings = [(line["level"], line["means"]) for line in lines if line["event"] == "mirrors_on_host"]
    assert warnings == [("warning", "the model is on the CPU, whose memory is the host's: nothing is saved")]
