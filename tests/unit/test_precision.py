"""Half precision: equal bits in every world and stage, master weights that lose nothing, scaled losses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from crew import ONE_AT_A_TIME, Crew, Task, engine_of, undisturbed
from integration.scripts import Model, optimizer_of
from matrices import shortened
from reference import reference
from rule import Edit, holds, rule
from safetensors.torch import load_file
from shoal.blocks.held import State
from shoal.checkpoint.catalogue import checkpoints
from shoal.checkpoint.export import export
from shoal.checkpoint.restore import _load_loss_scale, load_blocks
from shoal.checkpoint.storage import LocalStorage
from shoal.config.load import load_config
from shoal.core.checkpoint_errors import CheckpointDamaged
from shoal.core.layout import Stretch
from shoal.core.plain import encode
from shoal.exchange.fill_slices import blank_states, head_of
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.state.small_state import pack, unpack
from shoal.state.training_state import TrainingState
from shoal.training.engine import Engine
from shoal_protos.errors import PeerError, UserError
from shoal_protos.plan import Fill

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


@rule(
    "A lane's gradient travels in half precision only where it is of one micro-batch and was made in half "
    "precision: a gradient that autograd makes in two parts is refused; all sums are float32",
    "Arithmetic and layout",
    broken_by=[
        Edit(
            "shoal.state.training_state",
            "rank, self.held_layout, self._one_micro_batch)\n",
            "rank, self.held_layout, True)\n",
        ),
        Edit("shoal.core.tree", "    return all(stop - start == 1 for start, stop in spans)\n", "    return True\n"),
    ],
)
@holds("A gradient that overflows")
@pytest.mark.parametrize("micro_batches", shortened([1, 2], 2))
@pytest.mark.parametrize(
    "precision",
    shortened([BF16, FP16, AUTOCAST, AUTOCAST_FP16], BF16, AUTOCAST_FP16),
    ids=["bf16", "fp16", "auto", "auto-fp16"],
)
@pytest.mark.parametrize(
    ("stage", "mirrors", "workers"),
    shortened([(0, 1, "ab"), (1, 1, "abc"), (1, 2, "abcd"), (1, 0, "ab")], (0, 1, "ab"), (1, 2, "abcd")),
)
def test_every_world_and_stage_ends_with_the_same_bits_in_half_precision(
    precision: dict[str, Any], micro_batches: int, stage: int, mirrors: int, workers: str
) -> None:
    task = Task(options(precision, micro_batches_per_lane=micro_batches, stage=stage, mirrors=mirrors))
    with Crew(workers, task) as crew:
        crew.train_to(2)
        if mirrors:
            crew.plant(workers[-1], 3, "exchange")
        crew.add("e")
        assert crew.finish() == reference(Task(options(precision, micro_batches_per_lane=micro_batches)))


@pytest.mark.parametrize("point", shortened(["backward", "vote", "optimizer", "hand_out"], "vote"))
def test_a_kill_at_any_point_changes_no_bit_in_half_precision(point: str) -> None:
    task = Task(options(FP16))
    with Crew("abc", task) as crew:
        crew.plant("b", 3, point)
        assert crew.finish() == undisturbed(task)


@pytest.mark.parametrize("point", shortened(["gather", "backward", "in_vote"], "in_vote"))
def test_fp16_in_stage_3_goes_through_a_kill_with_its_overflows_and_its_scale(point: str) -> None:
    task = Task(options(FP16, stage=3, mirrors=1))
    with Crew("abc", task) as crew:
        crew.plant("b", 3, point)
        crew.train_to(4)
        crew.add("d")
        fingerprint = crew.finish()
        positions = [one.engine.context.state.loss_scale for one in crew.members()]
    engine = alone(Task(options(FP16)))
    assert fingerprint == engine.fingerprint()
    assert positions and all(one == engine.context.state.loss_scale for one in positions)
    assert engine.context.state.scale != 2.0**18, "the scale never changed"


@rule(
    "Master weights are a part of a block's state, and begin with the script's values from before they were rounded",
    "Arithmetic and layout",
    broken_by=Edit(
        "shoal.blocks.originals", "before[name].to(bucket.wide_dtype)", "parameter.data.to(bucket.wide_dtype)"
    ),
)
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
    for stretch, held in state.held.home.states(state.held.runs).items():
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
    with ONE_AT_A_TIME, pytest.raises(UserError, match=r'torch.bfloat16; .*the config, `bf16: \{"enabled": true\}`'):
        engine_of(Task(options({}), model=lambda: Model(0.1, True).bfloat16()), AloneLink(), Faults([]))


@holds("A lane's gradient travels in half")
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


@holds("A gradient that overflows")
def test_a_step_that_overflows_updates_nothing_and_halves_the_scale() -> None:
    state = alone(Task(options(FP16))).context.state
    assert state.loss_scale is not None and state.scheduler is not None
    assert state.scale < 2**18 and state.step == STEPS
    assert state.scheduler.last_epoch < STEPS  # steps that overflowed moved no schedule


def test_an_overflow_at_the_smallest_scale_fails_the_job_in_one_sentence() -> None:
    precision = {"fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1, "min_loss_scale": 2**18}}
    with pytest.raises(Exception, match=r"at step 1 .* not finite .*its minimum \(`fp16.min_loss_scale`\)"):
        alone(Task(options(precision)))


def test_in_stage_0_every_overflow_halves_the_scale_and_at_its_smallest_it_stays_as_in_deepspeed() -> None:
    patient = {"fp16": {"enabled": True, "initial_scale_power": 40, "hysteresis": 9, "min_loss_scale": 2**38}}
    state = alone(Task(options(patient, stage=0))).context.state
    assert state.loss_scale is not None
    assert (state.scale, state.step, state.loss_scale.skipped_steps) == (2.0**38, STEPS, STEPS)


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


@holds("Master weights are a part of")
def test_a_checkpoint_in_half_precision_goes_on_in_any_world_and_is_exported_exactly(tmp_path: Path) -> None:
    right = undisturbed(Task(options(FP16)))
    place = {"checkpoint": {"path": str(tmp_path / "saves"), "every_steps": 4}}
    with Crew("abc", Task(options(FP16, shoal=place, max_steps=4))) as crew:
        crew.finish()
    with Crew("ab", Task(options(FP16, shoal=place))) as crew:
        assert crew.finish() == right
        state = crew.workers["a"].engine.context.state
        masters = {s: held["master"].clone() for s, held in state.held.home.states(state.held.runs).items()}
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
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "not supported .*: master weights"),
        ({"fp16": {"enabled": True, "min_loss_scale": 2**17}}, "the smallest cannot be above the first"),
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


# ---- what comes from outside


def without_masters(state: TrainingState) -> dict[Stretch, State]:
    """Of all blocks."""
    found = state.held.home.states(state.everything)
    return {
        where: {key: value.clone() for key, value in one.items() if key != "master"} for where, one in found.items()
    }


@rule(
    "Blocks whose state comes from a checkpoint or a peer have whole float32 master weights where the update "
    "needs them, and a loss scale is above 0; else they are refused before anything is taken",
    "Arithmetic and layout",
    broken_by=[
        Edit("shoal.exchange.fill_slices", "        check_masters(held.layout, states)\n", ""),
        Edit("shoal.checkpoint.restore", "        check_masters(state.layout, states)\n", "        assert states\n"),
        Edit("shoal.core.loss_scale", '            or not position["scale"]\n', ""),
    ],
)
@pytest.mark.parametrize(
    ("master", "found"),
    [
        (None, "found none"),
        (lambda size: torch.zeros(size, dtype=torch.bfloat16), r"found torch\.bfloat16"),
        (lambda _: torch.zeros(()), r"found torch\.float32 of shape \(\)"),
    ],
)
def test_blocks_whose_master_weights_are_none_are_refused_before_anything_is_taken(
    master: Callable[[int], torch.Tensor] | None, found: str
) -> None:
    state = alone(Task(options(BF16, max_steps=1))).context.state
    states = without_masters(state)
    if master is not None:
        for where, one in states.items():
            one["master"] = master(where.blocks * state.layout.block_elements)
    sentence = f"need one torch.float32 master weight per element; {found}"
    reader: Any = SimpleNamespace(where="the place", manifest=SimpleNamespace(step=1), states=lambda _: states)
    with pytest.raises(CheckpointDamaged, match=rf"the place is damaged: blocks 0 to .* {sentence}"):
        load_blocks(reader, state, state.everything)
    state.held.expect(state.everything)
    with pytest.raises(PeerError, match=f"rank 1 sent a fill that cannot be read: .* {sentence}"):
        blank_states(head_of(states), Fill(1, 0, state.everything), state.held)


class Mastered(torch.optim.SGD):
    """Keeps something of its own by the name of master weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                own = self.state[parameter].setdefault("master", torch.zeros_like(parameter))
                own.add_(parameter.grad)
                parameter.sub_(own, alpha=group["lr"])


def test_a_state_of_an_optimizers_own_that_is_called_master_is_no_master_weight() -> None:
    more = {"shoal": {"elementwise": True}}
    task = Task(options({}, **more), optimizer=lambda model: Mastered(model.parameters(), lr=0.01))
    with Crew("ab", task) as crew:
        crew.train_to(2)
        crew.add("c")
        crew.train_until("a fill", crew.at_rest)
        assert crew.finish() == undisturbed(task)


@holds("Blocks whose state comes from")
@pytest.mark.parametrize(
    "position",
    [
        {"scale": 0.0, "good_steps": 1, "hysteresis_left": 1},
        {"scale": 10**400, "good_steps": 1, "hysteresis_left": 1},
        {"scale": float("nan"), "good_steps": 1, "hysteresis_left": 1},
        {"scale": True, "good_steps": 1, "hysteresis_left": 1},
        {"scale": 2.0, "good_steps": -1, "hysteresis_left": 1},
        {"scale": 2.0},
    ],
)
def test_a_loss_scale_that_cannot_be_is_refused_from_a_checkpoint_and_from_a_peer(position: dict[str, Any]) -> None:
    """A scale of 0 would make every gradient 0, and 0 / 0 of it, without an overflow."""
    state = alone(Task(options(FP16, max_steps=1))).context.state
    assert state.loss_scale is not None
    with pytest.raises(PeerError, match="the small state that another worker sent cannot be read: a loss scale has"):
        state.load_small_state(pack({**unpack(state.small_state()), "loss_scale": position}))
    reader: Any = SimpleNamespace(where="the place", manifest=SimpleNamespace(scaler=encode(position, {}, "it")))
    with pytest.raises(CheckpointDamaged, match="the place is damaged: its loss scale cannot be read: a loss scale"):
        _load_loss_scale(reader, {}, state, state.loss_scale)
