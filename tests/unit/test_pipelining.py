"""Torch's schedules, as a pipeline's engine takes them: which, made how, and what it knows of their insides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pipeline_parallel import PIPELINE, Stage, as_default, loss_of
from pipeline_parallel import adam as two_groups
from rule import Edit, rule
from shoal.cells.hub import CellHub
from shoal.cells.pipelining import (
    FLAGS,
    SHAKES_HANDS,
    SUPPORTED,
    UNDER_WAY,
    PipelineSchedules,
    ends_of,
    plain_shapes,
    take_shapes,
)
from shoal.cells.stages import StageShapes, built_stages
from shoal.core.cell_part import CellPart, Division
from shoal.core.laying_out import lay_out
from shoal.core.layout import Trainable
from shoal.state.small_state import packed, unpacked
from shoal.state.training_state import Limits
from shoal.training.start import in_cell
from shoal_protos.errors import PeerError, UserError
from shoal_protos.runs import union
from shoal_protos.shape import Shape
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining import (
    _utils as metas,
)

MICRO_BATCHES = 2
CUBE = Shape(tensor=2, pipeline=2, context=2)


class Loss:
    """As the engine makes one."""

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        return loss_of(logits, targets)


@pytest.fixture
def made() -> Iterator[Callable[..., Any]]:
    """A schedule of a kind, on the last stage."""
    hub = CellHub(PIPELINE, 1)
    with as_default(hub) as group:

        def made(kind: Any, group: Any = group, **named: Any) -> Any:
            given = {"loss_fn": Loss(), "scale_grads": False, **named}
            several = issubclass(kind, (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble, ScheduleLoopedBFS))
            stages = [
                PipelineStage(nn.Linear(2, 2), number, 4 if several else 2, torch.device("cpu"), group=group)
                for number in ([1, 3] if several else [1])
            ]
            return kind(stages if several else stages[0], given.pop("micro_batches", MICRO_BATCHES), **given)

        yield made


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B])
def test_a_schedule_made_for_the_engine_is_taken(kind: Any, made: Callable[..., Any]) -> None:
    schedule = made(kind)
    assert PipelineSchedules(PIPELINE, MICRO_BATCHES).of(schedule.step, "step", Loss) is schedule


@pytest.mark.parametrize(
    ("kind", "named", "words"),
    [
        (ScheduleInterleavedZeroBubble, {}, "class ScheduleInterleavedZeroBubble, which is not supported; expected"),
        (ScheduleLoopedBFS, {}, "class ScheduleLoopedBFS, which is not supported; expected one of torch's Schedule"),
        (Schedule1F1B, {"scale_grads": True}, "scale_grads=True, which would divide gradients that have left already"),
        (Schedule1F1B, {"micro_batches": 4}, "has 4 micro-batches, and the config's .* is 2; make it with engine."),
        (Schedule1F1B, {"loss_fn": loss_of}, r"a loss function of its own; make it with loss_fn=engine\.loss_fn"),
        (Schedule1F1B, {"loss_fn": None}, r"no loss function; make it with loss_fn=engine\.loss_fn\(fu"),
    ],
)  # fmt: skip
def test_another_schedule_is_refused_in_a_sentence(
    kind: Any, named: dict[str, Any], words: str, made: Callable[..., Any]
) -> None:
    with pytest.raises(UserError, match=words):
        PipelineSchedules(PIPELINE, MICRO_BATCHES).of(made(kind, **named).step, "step", Loss)


def test_a_schedule_of_the_first_stage_that_would_make_no_backward_is_refused() -> None:
    with as_default(CellHub(PIPELINE, 0)) as group:
        stage = PipelineStage(nn.Linear(2, 2), 0, 2, torch.device("cpu"), group=group)
        schedule = Schedule1F1B(stage, MICRO_BATCHES, scale_grads=False)
        with pytest.raises(UserError, match=r"no loss function; make .* on every stage"):
            PipelineSchedules(PIPELINE, MICRO_BATCHES).of(schedule.step, "step", Loss)


def test_what_is_no_schedules_step_and_stages_of_another_group_are_refused(made: Callable[..., Any]) -> None:
    schedule = made(Schedule1F1B)
    for call in (print, schedule.eval, nn.Linear(2, 2).forward):
        with pytest.raises(UserError, match=r"engine\.run got .*; expected "):
            PipelineSchedules(PIPELINE, MICRO_BATCHES).of(call, "step", Loss)
    with pytest.raises(UserError, match="in a group of 2 processes, and the cell's pipeline has 3; give PipelineStage"):
        PipelineSchedules(Shape(pipeline=3), MICRO_BATCHES).of(schedule.step, "step", Loss)


def test_these_are_the_insides_of_this_torchs_schedules(made: Callable[..., Any]) -> None:
    """If this fails with a new torch, read its `_initialize_pp_stages` and `clear_runtime_states` anew."""
    assert torch.__version__.split(".")[:2] == ["2", "13"]
    assert all(hasattr(pipelining, name) for name in SUPPORTED)
    for kind in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B):
        schedule = made(kind)
        assert sum(hasattr(schedule, name) for name in SHAKES_HANDS) == 1
        assert all(sum(getattr(schedule, name, None) is False for name in names) == 1 for names in FLAGS)
        assert not schedule._internal_losses and schedule._has_backward
        stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
        assert all(type(stage._user_meta) is type(stage._stage_meta) is metas._StageMeta for stage in stages)
        assert all(hasattr(stage, name) for stage in stages for name in ("_recv_meta", "_validate_inferred_metadata"))
    assert all(hasattr(schedule, name) for name in UNDER_WAY), "of the last kind"


# ---- what another process has told

PURPOSE = 4, True


def known() -> StageShapes:
    """As a handshake leaves them: activations of 2 × 3, of which a backward returns gradients, become 2 × 5."""

    def meta(*shape: int, **named: Any) -> Any:
        return metas.extract_tensor_metas((torch.empty(*shape, dtype=torch.bfloat16, **named),))

    shapes = StageShapes()
    grads = {"input_grads": meta(2, 3), "output_grads": (None,)}
    shapes.find(PURPOSE, [metas._StageMeta(meta(2, 3, requires_grad=True), meta(2, 5), **grads)])
    return shapes


def test_shapes_that_are_told_are_those_that_were_found() -> None:
    shapes, others = known(), StageShapes()
    take_shapes(others, 3, unpacked(packed(plain_shapes(shapes), "shapes"), "shapes"))
    assert others.learnt(3, PURPOSE) == shapes.found[PURPOSE] and shapes.are_known and not others.are_known
    shapes.find(PURPOSE, shapes.found[PURPOSE])  # type: ignore[arg-type]
    assert plain_shapes(shapes), "found again"
    shapes.find(PURPOSE, [metas._StageMeta()])
    assert not plain_shapes(shapes) and not shapes.are_known, "another schedule has other ones"


def test_neighbours_whose_shapes_fit_have_the_same_number_for_what_one_gives_and_the_other_gets() -> None:
    shapes, next_ones = known(), StageShapes()
    assert ends_of(next_ones) == (0, 0)
    found = shapes.found[PURPOSE]
    assert found is not None
    next_ones.find(PURPOSE, [metas._StageMeta(found[0].outputs, found[0].inputs)])
    gets, gives = ends_of(shapes)
    assert ends_of(next_ones) == (gives, gets) and 0 < gets != gives > 0
    next_ones.find(PURPOSE, found)
    assert ends_of(next_ones) == (-1, -1), "schedules differ"


@pytest.mark.parametrize(
    "spoiled",
    [3, ["x"], [[4, True, 3]], [[4, True, [[[[2, 3]], None, None, None]]]], [[4, True, [[None] * 5]]]]
    + [[[4, True, [[[one], None, None, None]]]] for one in ([[2], [1], "nn", True], [["2"], [1], "int64", True])],
)
def test_shapes_that_are_none_are_refused_in_a_sentence(spoiled: Any) -> None:
    with pytest.raises(PeerError, match="the shapes of stages that another worker sent cannot be read: "):
        take_shapes(StageShapes(), 3, spoiled)


@rule(
    "What a stage is told of shapes holds in the world that begins with it, for a process that has met one schedule, "
    "whose inputs are like those",
    "Cells",
    broken_by=[
        Edit("shoal.cells.stages", " if generation == self._generation else None", ""),
        Edit("shoal.cells.pipelining", "len(self._shapes) == 1", "True"),
        Edit("shoal.cells.pipelining", "known[0].inputs != _metas_of(inputs)", "False"),
    ],
)
@pytest.mark.parametrize(
    ("number", "generation", "others", "inputs", "holds"),
    [
        (1, 3, 0, None, True),
        (1, 4, 0, None, False),
        (1, 3, 1, None, False),
        (0, 3, 0, (2, 3), True),
        (0, 3, 0, (2, 4), False),
    ],
    ids=["told", "in another world", "of another schedule", "of the first stage", "with other inputs"],
)
def test_what_a_stage_is_told_of_shapes_is_its_vote(
    number: int, generation: int, others: int, inputs: tuple[int, ...] | None, holds: bool
) -> None:
    shapes, schedules = StageShapes(), PipelineSchedules(PIPELINE, MICRO_BATCHES)
    take_shapes(shapes, 3, plain_shapes(known()))
    stages = built_stages(lambda _: nn.Linear(3, 5), 2, number, 2)
    kept: list[Any] = []
    given = None if inputs is None else torch.empty(inputs, dtype=torch.bfloat16, requires_grad=True)
    with as_default(CellHub(PIPELINE, number)) as group:
        for _ in range(others + 1):
            stage = PipelineStage(stages[str(number)], number, 2, torch.device("cpu"), group=group)
            schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=Loss(), scale_grads=False)
            schedules.enter(generation, schedule, stages, PURPOSE[0])
            with schedules._knowing_shapes(schedule, shapes, given):
                votes = stage._user_meta.outputs is not None
            kept.append(schedule)  # else it is forgotten
    assert votes == holds
    assert stage._user_meta.outputs is None, "the script has given none"


# ---- the stages of a model


def _built(number: int) -> nn.Module:
    return Stage(number, 4, 0.0, None, lambda: None)


def test_a_stage_has_the_same_values_wherever_it_is_built_and_elsewhere_none() -> None:
    torch.manual_seed(0)
    whole = built_stages(_built, 4, 0, 1)
    torch.manual_seed(0)
    first = built_stages(_built, 4, 0, 2)
    assert list(first) == ["0", "2"] and list(first.places[1]) == ["1", "3"] and first.places[0] is first
    values, here = dict(whole.named_parameters()), dict(first.named_parameters())
    assert here.keys() < values.keys() and all(torch.equal(one, values[name]) for name, one in here.items())
    assert all(one.is_meta for one in first.places[1].parameters()), "no memory of others' stages"


def test_stages_that_do_not_fit_the_places_are_refused() -> None:
    for count in (1, 3):
        with pytest.raises(UserError, match=f"given {count} stages, and the cell's pipeline has 2 places; expected as"):
            built_stages(_built, count, 0, 2)
    with pytest.raises(UserError, match=r"made a str of stage 0; expected an nn\.Module"):
        built_stages(lambda _: "stage", 2, 0, 2)  # type: ignore[arg-type,return-value]


def test_a_parameter_that_stages_of_two_places_have_is_refused() -> None:
    tied = nn.Linear(2, 2)
    with pytest.raises(
        UserError, match=r'"weight" is in stages of two places .* mark both by shoal\.tied\(parameter, n'
    ):
        built_stages(lambda _: tied, 2, 0, 2)
    assert len(built_stages(lambda _: tied, 2, 0, 1)) == 2, "one process has both"


LIMITS = Limits(4, 0.0, 6)


def test_a_model_that_is_no_stages_and_groups_that_are_not_known_elsewhere_are_refused() -> None:
    hub, model = CellHub(PIPELINE, 0), nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"has 2 places, and shoal\.initialize got a Linear.* model=cell\.stages"):
        in_cell(LIMITS, model, torch.optim.SGD(model.parameters()), hub)
    stages = built_stages(_built, 2, 0, 2)
    groups = [{"params": [one]} for one in stages.parameters()]
    with pytest.raises(UserError, match=r"has 7 groups of parameters, and nothing says .* give a function that"):
        in_cell(LIMITS, stages, torch.optim.SGD(groups, lr=0.1), hub)
    found = in_cell(LIMITS, stages, two_groups(stages), hub, two_groups)
    assert [{one.group for one in of_place} for of_place in found.stages] == [{0, 1}, {0, 1}]
    stages["0"].norm.weight.requires_grad_(False)
    with pytest.raises(UserError, match=r'"0\.norm\.weight" is frozen, and only one stage of a pipeline has it'):
        in_cell(LIMITS, stages, torch.optim.SGD(stages.parameters()), hub)


@rule(
    "Blocks of a pipeline's stages follow each other, and each lies at home at one coordinate of its stage",
    "Cells",
    broken_by=[
        Edit("shoal.core.layout", "for of in self._counts[:stage]", "for of in self._counts[:0]"),
        Edit("shoal.core.cell_part", "within = self.coordinate - self.mates[0]", "within = 0"),
    ],
)
@pytest.mark.parametrize(
    "shape", [PIPELINE, Shape(tensor=2, pipeline=3), Shape(tensor=2, pipeline=2, context=2)], ids=str
)
def test_every_block_is_at_home_at_one_coordinate_of_its_stage(shape: Shape) -> None:
    own = Division(by_tensor=True)

    def parameters(stage: int) -> list[Trainable]:
        many = range(3 + stage)
        names = [Trainable(f"{stage}.own{n}", (5_000 * (n + stage + 1),), torch.float32, 0, division=own) for n in many]
        return [*names, Trainable(f"{stage}.common", (30_000,), torch.float32, 0)]

    stages = [parameters(stage) for stage in range(shape.pipeline)]
    seen = set()
    for coordinate in shape.coordinates:
        part = CellPart(shape.processes, coordinate, contexts=shape.context, stages=shape.pipeline)
        layout = lay_out(stages[part.place], part=part, stages=stages)
        homes = [layout.home_of(one) for one in shape.coordinates]
        assert sum(map(len, homes)) == len(union(homes)) == layout.blocks
        assert all(home <= layout.model_at(one) for one, home in enumerate(homes))
        assert [name.split(".")[0] for bucket in layout.buckets for name in [bucket.slots[0].parameter.name]] == [
            str(part.place) for _ in layout.buckets
        ]
        assert layout.all_blocks == layout.runs(layout.whole(bucket) for bucket in layout.buckets)
        seen.add((layout.text(), layout.blocks, tuple(homes)))
        assert layout.at(0).at(coordinate).buckets == layout.buckets
    assert len(seen) == 1, "all coordinates know one layout"
