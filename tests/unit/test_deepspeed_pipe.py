"""`deepspeed.pipe`: which layers a stage has, their first values, what is refused, and its engine in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import shoal.deepspeed as deepspeed
import torch
from pipeline_parallel import PIPELINE
from shoal.cells.marks import ties
from shoal.deepspeed import initializing, lone_group, pipe
from shoal.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from shoal.deepspeed.pipeline_engine import PipelineEngine
from shoal.deepspeed.surface import NOT_OF_PIPELINES
from shoal.deepspeed.surface import PIPELINE as NAMES
from shoal.deepspeed.utils import RepeatingLoader
from shoal.session import cell_opening, seat
from shoal_protos.errors import UserError
from shoal_protos.shape import Shape
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, Dataset

WIDTH = 4
CONFIG = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
          "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has no seat yet, and no controller."""
    monkeypatch.setattr(seat, "_taken", [])
    monkeypatch.setattr(cell_opening, "_opened", [])
    monkeypatch.delenv("SHOAL_CONTROLLER", raising=False)
    yield
    lone_group.leave()


class Place:
    """Of a cell, without a process group."""

    def __init__(self, place: int, shape: Shape = PIPELINE) -> None:
        self.shape, self._place = shape, place

    def index(self, dimension: str) -> int:
        return self._place if dimension == "pipeline" else 0

    def group(self, dimension: str) -> None:
        raise AssertionError(dimension)


def linears(count: int) -> list[Any]:
    return [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(count)]


def bounds(layers: list[Any], stages: int, method: str) -> list[int]:
    return PipelineModule(layers, stages, partition_method=method, cell=Place(0, Shape(pipeline=stages))).parts


# ---- which layers a stage has


@pytest.mark.parametrize(
    ("widths", "stages", "expected"),
    [
        ([9, 1, 1, 1, 1, 9], 2, [0, 3, 6]),
        ([1, 1, 1, 9], 2, [0, 3, 4]),
        ([9, 1, 1, 1], 3, [0, 1, 3, 4]),
        ([1, 1, 1], 3, [0, 1, 2, 3]),
        ([5, 5, 5, 5, 5], 2, [0, 3, 5]),
    ],
)
def test_stages_have_as_equal_numbers_of_parameters_as_layers_allow(
    widths: list[int], stages: int, expected: list[int]
) -> None:
    assert bounds([LayerSpec(nn.Linear, width, 1) for width in widths], stages, "parameters") == expected


def test_stages_have_as_many_layers_or_as_many_of_a_class() -> None:
    layers: list[Any] = [LayerSpec(nn.Embedding, 2, 2), *linears(4), torch.relu, nn.LayerNorm(2)]
    assert bounds(layers, 2, "uniform") == [0, 4, 7]
    assert bounds(layers, 3, "Uniform") == [0, 3, 5, 7]
    assert bounds(layers, 2, "type:linear") == [0, 3, 7]
    assert bounds(layers, 4, "type:Lin.*") == [0, 2, 3, 4, 7]
    assert bounds([torch.relu] * 3, 2, "parameters") == [0, 2, 3], "no parameters at all"


def test_a_layer_has_the_same_first_values_in_every_number_of_stages_and_elsewhere_none() -> None:
    layers = [
        TiedLayerSpec("words", nn.Embedding, 3, WIDTH),
        *linears(3),
        TiedLayerSpec("words", nn.Embedding, 3, WIDTH),
    ]
    found: dict[str, list[Tensor]] = {}
    for stages in (1, 2, 5):
        for place in range(stages):
            torch.manual_seed(0)
            model = PipelineModule(
                layers, stages, partition_method="uniform", cell=Place(place, Shape(pipeline=stages))
            )
            for name, parameter in model.named_parameters():
                found.setdefault(name.partition(".")[2], []).append(parameter.detach())
            others = [one for number, one in enumerate(model.places) if number != place]
            assert all(parameter.is_meta for one in others for parameter in one.parameters())
    assert set(found) == {f"{n}.{kind}" for n in (1, 2, 3) for kind in ("weight", "bias")} | {
        "tied_modules.words.weight"
    }
    assert len(found["tied_modules.words.weight"]) == 1 + 2 + 2
    for values in found.values():
        assert all(torch.equal(one, values[0]) for one in values)


def test_layers_are_tied_where_they_are_in_several_stages() -> None:
    words = TiedLayerSpec("words", nn.Linear, 3, 3)
    apart = PipelineModule([words, *linears(2), words], 2, cell=Place(0))
    assert {name: tie.name for name, tie in ties(apart.places).items()} == {
        "0.tied_modules.words.weight": "words.weight", "1.tied_modules.words.weight": "words.weight"
    }  # fmt: skip
    together = PipelineModule([words, words, *linears(2)], 2, partition_method="uniform", cell=Place(0))
    assert ties(together.places) == {}


def test_seed_layers_seeds_each_layer_by_its_number() -> None:
    torch.manual_seed(1234 + 1)
    second = nn.Linear(WIDTH, WIDTH)
    model = PipelineModule(linears(2), 2, seed_layers=True, cell=Place(1))
    assert torch.equal(next(model.parameters()), second.weight)
    seeds: list[int] = []
    PipelineModule(linears(2), 2, seed_layers=True, seed_fn=seeds.append, base_seed=5, cell=Place(1))
    assert seeds == [5, 6]


def test_checkpointed_layers_have_the_same_gradients_and_change_buffers_once() -> None:
    found = []
    for interval in (0, 2):
        layers = [*linears(2), LayerSpec(nn.BatchNorm1d, WIDTH), LayerSpec(nn.Dropout, 0.5), torch.relu, *linears(1)]
        model = PipelineModule(layers, 1, seed_layers=True, activation_checkpoint_interval=interval)
        torch.manual_seed(3)
        model(torch.randn(8, WIDTH, requires_grad=True)).square().sum().backward()
        (stage,) = model.values()
        assert [checkpoints for *_, checkpoints in stage._spans] == ([False] if not interval else [True, True, True])
        found.append([*(one.grad for one in model.parameters()), *model.buffers()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    chosen = PipelineModule([*linears(1), torch.relu], 1, activation_checkpoint_interval=1, checkpointable_layers=["X"])
    assert [checkpoints for *_, checkpoints in next(iter(chosen.values()))._spans] == [False, False]


# ---- what is refused


class Topology:
    def __init__(self, **axes: int) -> None:
        self._axes = axes

    def get_axis_names(self) -> list[str]:
        return list(self._axes)

    def get_dim(self, axis: str) -> int:
        return self._axes[axis]


shared = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: PipelineModule(linears(2), 4, cell=Place(0)), r"given num_stages 4, and the cell's pipeline has 2 pl"),
        (lambda: PipelineModule(linears(2)), r"is given num_stages None; expected a number of stages, where shoal\.ce"),
        (lambda: PipelineModule(linears(2), "2"), r"is given num_stages '2'; expected a number"),
        (lambda: PipelineModule(linears(2), 2), r"this script's cell has 2 processes .* start it with \"shoal run"),
        (lambda: PipelineModule(linears(1), cell=Place(0)), "is given 1 layers for 2 stages; expected one for each at"),
        (lambda: PipelineModule(linears(2), topology=Topology(pipe=2, model=4, data=1)), "a Topology with model 4; ex"),
        (lambda: PipelineModule(linears(2), topology=Topology(data=2)), "a Topology with no axis pipe; expected the"),
        (lambda: PipelineModule(nn.Linear(2, 2), 1), "is given a Linear; expected a list of layers"),
        (lambda: PipelineModule([*linears(1), "x"], 1), "layer 1 of the PipelineModule is a str; expected a LayerSpec"),
        (lambda: PipelineModule(linears(2), 1, partition="x"), "has no argument partition; expected layers, num_st"),
        (lambda: PipelineModule(linears(2), 1, partition_method="best"), 'partition_method is "best"; expected "unif'),
        (lambda: PipelineModule(linears(2), 1, partition_method="type:Block"), "no layer is of such a class; expected"),
        (lambda: PipelineModule(linears(2), 1, partition_method="type:("), "whose pattern cannot be read"),
        (lambda: PipelineModule(linears(2), 1, dynamic_shape=True), "is given dynamic_shape=True, and stages of a cel"),
        (lambda: PipelineModule(linears(2), 1, activation_checkpoint_interval=-1), "activation_checkpoint_interval -1"),
        (lambda: PipelineModule(linears(2), 1, activation_checkpoint_func=print), "given an activation_checkpoint_fun"),
        (lambda: PipelineModule([shared, shared], cell=Place(0)), '"1.weight" is in stages of two places of the pip'),
        (lambda: LayerSpec(torch.relu), r"LayerSpec is given .*relu.*; expected a class of "),  # type: ignore[arg-type]
        (lambda: TiedLayerSpec("a.b", nn.Linear), r"TiedLayerSpec is given the key 'a\.b'; expected a text without a"),
        (
            lambda: PipelineModule([TiedLayerSpec("a", nn.Linear, 2, 2, tied_weight_attr="w")], 1),
            r'TiedLayerSpec "a" ties "w", and Linear\(2, 2\) has no such parameter; give its name as tied_weight_attr',
        ),
        (lambda: pipe.DualPipeVModule, r"deepspeed\.pipe\.DualPipeVModule is not in Shoal; there are PipelineModule, "),
        (lambda: deepspeed.utils.logger, r"deepspeed\.utils\.logger is not in Shoal; there is deepspeed\.utils\.Rep"),
    ],
)  # fmt: skip
def test_a_list_of_layers_that_cannot_be_divided_so_is_refused_in_a_sentence(
    call: Callable[[], Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        call()


def test_a_topology_of_pipe_and_data_says_the_stages() -> None:
    module = PipelineModule(linears(2), topology=Topology(pipe=2, data=8), cell=Place(1))
    assert (module.num_stages, module.stage_id, list(module)) == (2, 1, ["1"])


def test_the_cell_takes_the_place_of_the_group_that_init_distributed_has_made(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[bool] = []

    def open_cell(**sizes: int) -> Place:
        assert sizes == {"pipeline": 2}
        opened.append(distributed.is_initialized())
        return Place(0)

    monkeypatch.setattr(pipe, "open_cell", open_cell)
    deepspeed.init_distributed()
    assert distributed.is_initialized()
    PipelineModule(linears(2), 2)
    assert opened == [False]
    lone_group.leave()


# ---- its engine, of one stage


class Points(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return torch.full((WIDTH,), number / 40), torch.tensor([number / 20])


def made(**given: Any) -> PipelineEngine:
    torch.manual_seed(0)
    model = PipelineModule([*linears(2), LayerSpec(nn.Linear, WIDTH, 1)], 1, loss_fn=nn.functional.mse_loss)
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG, **{"shoal": {"max_steps": 12}, **given})
    assert isinstance(engine, PipelineEngine)
    return engine


def test_train_batch_takes_its_samples_from_training_data_or_from_a_loader_of_the_script() -> None:
    own = DataLoader(Points(), batch_size=2, shuffle=True)
    other = DataLoader(own.dataset, batch_size=2, shuffle=True)
    by: dict[str, Callable[[PipelineEngine], Any]] = {
        "nothing": lambda _: None, "the loader": lambda engine: RepeatingLoader(engine.training_dataloader)
    }  # fmt: skip
    of: dict[str, Callable[[PipelineEngine], Any]] = {
        "a loader": lambda _: RepeatingLoader(own), "another one over it": lambda _: RepeatingLoader(other)
    }  # fmt: skip
    found = []
    for ways, data in ((by, {"training_data": Points()}), (of, {})):
        for way in ways.values():
            engine = made(**data)
            feed = way(engine)
            found.append([engine.train_batch(feed).item() for _ in range(12)])
            assert (engine.global_steps, engine.gradient_accumulation_steps(), engine.dp_world_size) == (12, 2, 2)
            assert engine.train_micro_batch_size_per_gpu() == 2
    assert found[0][-1] < found[0][0] and all(losses == found[0] for losses in found)


def test_an_iterator_ends_with_the_epoch_and_after_the_job_nothing_is_trained() -> None:
    engine = made()
    loader, steps = DataLoader(Points(), batch_size=2, shuffle=True), []
    for _ in range(2):
        batches = iter(loader)
        with pytest.raises(StopIteration, match=r"at the end of its epoch, step \d+; make one for each epoch"):
            while True:
                engine.train_batch(batches)
        steps.append(engine.global_steps)
    assert steps == [5, 10]
    assert len(engine.training_dataloader) == 10, "micro-batches of a lane"
    losses = [engine.train_batch(RepeatingLoader(loader)).item() for _ in range(5)]
    assert engine.global_steps == 12 and len(set(losses[2:])) == 1 == len(set(losses[1:]))
    assert engine.eval_batch(iter(loader)).isnan(), "the script has gone on beyond the job"


def test_an_evaluation_is_of_the_iterators_dataset() -> None:
    engine = made(training_data=Points())
    engine.train_batch()
    with torch.no_grad():
        data = [Points()[number] for number in range(8)]
        expected = nn.functional.mse_loss(
            engine.module(torch.stack([one for one, _ in data])), torch.stack([one for _, one in data])
        )
    assert engine.eval_batch(iter(DataLoader(Points()))) == pytest.approx(expected.item(), abs=1e-6)
    assert engine.elastic.reports["eval_batch"] == pytest.approx(expected.item(), abs=1e-6)


def test_a_loop_of_the_script_over_a_loader_gets_torchs_own_batches() -> None:
    engine = made(training_data=Points())
    loader = DataLoader(Points(), batch_size=16)
    assert [len(labels) for _, labels in loader] == [16, 16, 8]
    assert [len(next(batches)[1]) for batches in [RepeatingLoader(loader)] for _ in range(5)] == [16, 16, 8, 16, 16]
    assert engine.global_steps == 0


def of_other(engine: PipelineEngine) -> None:
    engine.train_batch(iter(DataLoader(Points(), shuffle=True)))


CALLS: list[tuple[Callable[[PipelineEngine], Any], str]] = [
    (lambda engine: engine(torch.zeros(2)), r"engine\(…\) was called of a PipelineModule's engine, which trains whole"),
    (lambda engine: engine.forward(), r"engine\.forward was called of a PipelineModule's engine"),
    (lambda engine: engine.backward(), r"engine\.backward was called of a PipelineModule's engine"),
    (lambda engine: engine.step(), r"engine\.step was called of a PipelineModule's engine.*; call engine\.train_batch"),
    (lambda engine: engine.train_batch(iter([1])), "got a list_iterator, whose samples would be others in every world"),
    (lambda engine: engine.train_batch(DataLoader(Points())), r"got a DataLoader, .*; give it iter\(loader\) of a Dat"),
    (of_other, "got an iterator over another dataset; give it the loader that deepspeed.initialize has returned, or"),
    (lambda engine: next(iter(engine.training_dataloader)), r"was gone over; .*call engine\.train_batch\(\) in its pl"),
    (lambda engine: torch.no_grad()(engine.train_batch)(), r"called without gradients; to evaluate, call engine\.eval"),
    (lambda engine: engine.eval_batch(iter([1])), r"engine\.eval_batch was called before the first engine\.train_batc"),
    (lambda engine: engine.eval_batch(None, return_logits=True), r"got return_logits=True; expected the iterator alon"),
    (lambda engine: engine.eval_batch(None, num_micro_batches=9), "got num_micro_batches=9; expected the iterator alo"),
    (lambda engine: engine.eval_batch(None, logits=True), "engine.eval_batch has no argument logits; expected data_it"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), CALLS)
def test_what_a_pipelines_engine_does_not_do_is_refused_in_a_sentence(
    call: Callable[[PipelineEngine], Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        call(made(training_data=Points()))


def test_batches_that_are_no_pairs_and_a_call_without_data_are_refused() -> None:
    engine = made()
    with pytest.raises(
        UserError, match=r"train_batch got no data_iter, and deepspeed\.initialize no training_data; gi"
    ):
        engine.train_batch()
    for made_of_it, words in (
        ([1, 2, 3], "got a batch that is a list of 3; expected a pair of inputs and labels"),
        ((None, None), "got a batch whose inputs are None; expected a tensor or several"),
    ):
        engine = made(training_data=Points())
        engine.set_batch_fn(lambda _, found=made_of_it: found)
        with pytest.raises(UserError, match=words):
            engine.train_batch()


def test_a_last_layer_whose_output_is_no_loss_is_refused_where_there_is_no_loss_function() -> None:
    model = PipelineModule([*linears(2), LayerSpec(nn.Linear, WIDTH, 1)], 1)
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG, training_data=Points(), shoal={"max_steps": 1})
    with pytest.raises(UserError, match=r"has no loss_fn, and its last layer's output is of shape \(2, 1\); give it"):
        engine.train_batch()


def test_the_engine_has_the_names_of_the_page_and_refuses_those_of_the_loop() -> None:
    engine = made(training_data=Points())
    assert all(hasattr(engine, name.partition("(")[0]) for name in NAMES)
    assert {"engine(…)", "forward", "backward", "step"} == set(NOT_OF_PIPELINES)
    plain, *_ = deepspeed.initialize(model=nn.Linear(2, 2), training_data=Points(), config=CONFIG)
    with pytest.raises(
        AttributeError, match=r"engine\.train_batch of DeepSpeed is not in Shoal.* of a `PipelineModule`"
    ):
        _ = plain.train_batch


# ---- what `initialize` makes of it


def test_the_config_gets_the_models_pipeline_where_nothing_says_a_shape() -> None:
    model = PipelineModule(linears(2), cell=Place(0))
    assert initializing._section(None, CONFIG, model) == {
        "cell": {"pipeline": 2, "expert": 1, "context": 1, "tensor": 1, "tight": []}
    }
    sized = {**CONFIG, "pipeline": {"stages": 2}}
    assert initializing._section({"epochs": 1}, sized, model) == {"epochs": 1}
    assert initializing._section({"epochs": 1}, CONFIG, nn.Linear(2, 2)) == {"epochs": 1}


def test_groups_of_one_stages_parameters_are_refused_and_a_function_makes_those_of_all() -> None:
    model = PipelineModule(linears(2), cell=Place(0))
    groups = [{"params": [one]} for one in model.parameters()]
    for optimizer, parameters in ((None, groups), (torch.optim.SGD(groups, lr=0.1), None)):
        with pytest.raises(
            UserError, match=r"got 2 groups of parameters for a stage of a PipelineModule, .* give a fun"
        ):
            initializing._of_all_stages(model, optimizer, parameters)
    make = initializing._of_all_stages(model, torch.optim.SGD, None)
    assert [len(make(place).param_groups[0]["params"]) for place in model.places] == [2, 2]
    assert initializing._of_all_stages(model, None, list(model.parameters())) is None
