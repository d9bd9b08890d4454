"""Half precision: equal bits in every world and stage, master weights that lose nothing, scaled losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from crew import ONE_AT_A_TIME, Crew, Task, engine_of, undisturbed
from integration.scripts import Model, optimizer_of
from safetensors.torch import load_file
from shoal.checkpoint.catalogue import checkpoints
from shoal.checkpoint.export import export
from shoal.checkpoint.storage import LocalStorage
from shoal.config.load import load_config
from shoal.faults import Faults
from shoal.session.alone import AloneLink
from shoal.training.engine import Engine
from shoal_protos.errors import UserError

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}}
AUTOCAST = {"bf16": {"enabled": True, "auto_cast": True}}
AUTOCAST_FP16 = {"fp16": {"enabled": True, "auto_cast": True}}
STEPS = 7


def options(precision: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"max_steps": STEPS, "precision": precision, **more}


def alone(task: Task) -> Engine:
    """The engine of a world of one that has trained."""
    with ONE_AT_A_TIME:
        engine = engine_of(task, AloneLink(), Faults([]))
        for batch in engine:
            engine.backward(engine.module(**batch))
            engine.step()
        return engine


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("precision", [BF16, FP16, AUTOCAST, AUTOCAST_FP16], ids=["bf16", "fp16", "auto", "auto-fp16"])
def test_every_world_and_stage_ends_with_the_same_bits_in_half_precision(
    precision: dict[str, Any], micro_batches: int
) -> None:
    right = undisturbed(Task(options(precision, micro_batches_per_lane=micro_batches)))
    for stage, mirrors, workers in ((0, 1, "ab"), (1, 1, "abc"), (1, 2, "abcd"), (1, 0, "ab")):
        task = Task(options(precision, micro_batches_per_lane=micro_batches, stage=stage, mirrors=mirrors))
        with Crew(workers, task) as crew:
            crew.train_to(2)
            if mirrors:
                crew.plant(workers[-1], 3, "exchange")
            crew.add("e")
            assert crew.finish() == right, (stage, mirrors, workers)


@pytest.mark.parametrize("point", ["backward", "vote", "optimizer", "hand_out"])
def test_a_kill_at_any_point_changes_no_bit_in_half_precision(point: str) -> None:
    task = Task(options(FP16))
    with Crew("abc", task) as crew:
        crew.plant("b", 3, point)
        assert crew.finish() == undisturbed(task)


def test_masters_begin_with_the_scripts_own_values_and_parameters_are_these_rounded() -> None:
    with ONE_AT_A_TIME:
        torch.manual_seed(0)
        wanted = dict(Model(0.1, True).named_parameters())
        engine = engine_of(Task(options(BF16)), AloneLink(), Faults([]))
        originals = engine.context.state.originals
        assert originals is not None
        for name, exact in originals.named.items():
            assert torch.equal(exact, wanted[name]) and exact.dtype == torch.float32
            assert torch.equal(engine.module.get_parameter(name), exact.bfloat16())
        state = alone(Task(options(BF16))).context.state
    assert state.originals is None
    for stretch, held in state.held.states(state.held.runs).items():
        assert held["master"].dtype == held["exp_avg"].dtype == torch.float32
        assert torch.equal(state.weights.of(stretch), held["master"].bfloat16())
        assert not torch.equal(state.weights.of(stretch).float(), held["master"])


def test_a_model_that_is_rounded_already_trains_with_masters_from_what_it_has() -> None:
    task = Task(options(BF16), model=lambda: Model(0.1, True).bfloat16())
    with Crew("abc", task) as crew:
        crew.train_to(2)
        crew.kill("c")
        assert crew.finish() == undisturbed(task)
    assert undisturbed(task) != undisturbed(Task(options(BF16)))


def test_a_half_precision_model_without_the_section_is_one_sentence() -> None:
    with ONE_AT_A_TIME, pytest.raises(UserError, match=r'has dtype torch.bfloat16; .*set `bf16: \{"enabled": true\}`'):
        engine_of(Task(options({}), model=lambda: Model(0.1, True).bfloat16()), AloneLink(), Faults([]))


def test_a_lanes_gradient_and_a_handed_out_parameter_travel_in_half_precision() -> None:
    def sent(precision: dict[str, Any], lanes: int) -> int:
        with Crew("ab", Task(options(precision, lanes=lanes, mirrors=0, gradient_clipping=0.0, buffers=False))) as crew:
            crew.train_to(2)
            wire = list(crew.wires.values())[-1]
            before = wire.bytes
            crew.train_to(4)
            return wire.bytes - before

    one_lane, exact = sent(BF16, 2), sent({}, 2)
    assert one_lane < 0.6 * exact
    assert one_lane < sent(BF16, 4) < exact  # a sum of two lanes travels in float32


def test_a_step_that_overflows_updates_nothing_and_halves_the_scale() -> None:
    state = alone(Task(options(FP16))).context.state
    assert state.loss_scale is not None and state.scheduler is not None
    assert state.scale < 2**18 and state.step == STEPS
    assert state.scheduler.last_epoch < STEPS  # steps that overflowed moved no schedule


def test_an_overflow_at_the_smallest_scale_fails_the_job_in_one_sentence() -> None:
    precision = {"fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1, "min_loss_scale": 2**18}}
    with pytest.raises(Exception, match=r"at step 1 .* not finite .*its minimum \(`fp16.min_loss_scale`\)"):
        alone(Task(options(precision)))


def test_a_gradient_that_is_not_finite_without_a_scale_fails_the_job_as_in_float32() -> None:
    def body(engine: Engine, batch: Any) -> None:
        loss = engine.module(**batch)
        engine.backward(loss * float("inf"))
        engine.step()

    with Crew("ab", Task(options(BF16), body=body)) as crew, pytest.raises(Exception, match="is not finite"):
        crew.finish()


def test_the_forward_runs_under_autocast_and_the_rest_of_the_loop_does_not() -> None:
    seen: list[tuple[torch.dtype, bool, torch.dtype]] = []

    def body(engine: Engine, batch: Any) -> None:
        model = engine.module
        hidden = model.up(model.embedding(batch["tokens"]))
        loss = model(**batch)
        engine.backward(loss)
        seen.append((hidden.dtype, torch.is_autocast_enabled("cpu"), model.up.weight.dtype))
        engine.step()

    with ONE_AT_A_TIME:
        engine = engine_of(task := Task(options(AUTOCAST), body=body), AloneLink(), Faults([]))
        for batch in engine:
            body(engine, batch)
        assert task.body is body and not torch.is_autocast_enabled("cpu")
        with engine.evaluating():
            assert torch.is_autocast_enabled("cpu")
    assert set(seen) == {(torch.bfloat16, False, torch.float32)}


def test_a_checkpoint_in_half_precision_goes_on_in_any_world_and_is_exported_exactly(tmp_path: Path) -> None:
    right = undisturbed(Task(options(FP16)))
    place = {"checkpoint": {"path": str(tmp_path / "saves"), "every_steps": 4}}
    with Crew("abc", Task(options(FP16, shoal=place, max_steps=4))) as crew:
        crew.finish()
    with Crew("ab", Task(options(FP16, shoal=place))) as crew:
        assert crew.finish() == right
        state = crew.workers["a"].engine.context.state
        masters = {s: held["master"].clone() for s, held in state.held.states(state.held.runs).items()}
    found = next(one for one in checkpoints(LocalStorage(tmp_path / "saves"), lambda _: None) if one.name.step == 4)
    for dtype, is_exact in ((torch.float32, True), (None, False)):
        export(found.reader(), tmp_path / "model.safetensors", dtype)
        weights = load_file(tmp_path / "model.safetensors")["up.weight"]
        assert weights.dtype == (torch.float32 if is_exact else torch.float16)
        assert torch.equal(weights, weights.half().float()) is not is_exact
    assert masters


def test_weights_are_taken_from_a_checkpoint_of_another_precision_by_name(tmp_path: Path) -> None:
    place = {"checkpoint": {"path": str(tmp_path), "every_steps": 4}}
    with Crew("ab", Task(options({}, shoal=place, max_steps=4))) as crew:
        crew.finish()
    theirs = checkpoints(LocalStorage(tmp_path), lambda _: None)
    source = str(next(iter(theirs)).path)
    place = {"checkpoint": {"resume": source, "allow": ["new", "missing"]}}
    task = Task(options(BF16, shoal=place), optimizer=optimizer_of)
    right = undisturbed(task)
    assert right != undisturbed(Task(options(BF16)))
    with Crew("abc", task) as crew:
        crew.train_to(2)
        crew.kill("b")
        assert crew.finish() == right


@pytest.mark.parametrize(
    ("precision", "sentence"),
    [
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "both true; keep one"),
        ({"communication_data_type": "bf16"}, "would be rounded before they are added up"),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp16"}, "would be rounded before they are added up"),
        ({"bf16": {"enabled": "yes"}}, 'expected true, false or "auto"'),
        ({"fp16": {"enabled": True, "loss_scale": -1}}, "a number of at least 0"),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "a number above 0"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "not supported yet"),
    ],
)
def test_a_precision_that_cannot_be_is_refused_in_one_sentence(precision: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load_config({"train_micro_batch_size_per_gpu": 1, "shoal": {"lanes": 1, "max_steps": 1}, **precision})


def test_the_names_that_configs_of_deepspeed_use_for_bf16_are_understood() -> None:
    basis = {"train_micro_batch_size_per_gpu": 1, "shoal": {"lanes": 1, "max_steps": 1}}
    for name in ("bf16", "bfloat16"):
        assert load_config({**basis, name: {"enabled": True}}).precision.parameters == "bfloat16"
        assert load_config({**basis, name: {"enabled": "auto"}}).precision.parameters is None
    found = load_config({**basis, "fp16": {"enabled": True, "loss_scale": 128}, "communication_data_type": "fp16"})
    assert found.precision.scaling is not None and not found.precision.scaling.is_dynamic
