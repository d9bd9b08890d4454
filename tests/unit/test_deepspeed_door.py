"""`shoal.deepspeed`: a script for DeepSpeed in worlds that change, its checkpoints, and what it is refused."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shoal.deepspeed as deepspeed
import torch
from crew import Crew, Task, undisturbed
from crew_saves import saved
from matrices import shortened
from reference import reference
from rule import Edit, holds, rule
from shoal.deepspeed.deepspeed_engine import DeepSpeedEngine, is_within, saved_in
from shoal.deepspeed.elastic_loader import ElasticLoader
from shoal.deepspeed.initializing import Made
from shoal.deepspeed.surface import ABSENT, ENGINE
from shoal.training.engine import Engine
from shoal_protos.errors import UserError
from torch import Tensor, nn
from torch.utils.data import DataLoader

EPOCHS, STEPS = 3, 15
"""Of 40 samples in steps of 8."""
OPTIONS = {"max_steps": STEPS}


def over(elastic: Engine) -> DeepSpeedEngine:
    """As `deepspeed.initialize` makes it."""
    return DeepSpeedEngine(elastic)


def script(
    elastic: Engine, before: Callable[[], None], after: Callable[[DeepSpeedEngine, int], None] | None = None
) -> None:
    """A loop as scripts for DeepSpeed have it. `after`: what it does at the end of an epoch."""
    engine = over(elastic)
    for epoch in range(EPOCHS):
        for batch in engine.training_dataloader:
            before()
            loss = engine(**batch)
            engine.backward(loss)
            engine.step()
        if after is not None:
            after(engine, epoch)


TASK = Task(OPTIONS, script=script)


def test_a_loop_for_deepspeed_has_the_bits_of_shoals_own() -> None:
    assert reference(TASK) == reference(Task(OPTIONS))


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_it_has_the_same_bits_in_every_world(names: str) -> None:
    with Crew(names, TASK) as crew:
        assert crew.finish() == reference(Task(OPTIONS))


@pytest.mark.parametrize("stage", shortened([2, 3], 3))
@pytest.mark.parametrize("point", shortened(["exchange", "vote", "hand_out"], "exchange", "hand_out"))
def test_it_has_the_same_bits_through_a_kill_and_a_join(stage: int, point: str) -> None:
    options = {**OPTIONS, "stage": stage}
    with Crew("abc", Task(options, script=script)) as crew:
        crew.train_to(3)
        crew.plant("b", 4, point)
        crew.train_to(7)
        crew.add("d")
        crew.train_to(11)
        assert crew.finish() == reference(Task(OPTIONS))


def test_it_has_the_same_bits_with_several_micro_batches_to_a_lane() -> None:
    options = {**OPTIONS, "micro_batches_per_lane": 2, "lanes": 2}
    with Crew("ab", Task(options, script=script)) as crew:
        crew.train_to(3)
        crew.kill("a")
        crew.train_to(6)
        crew.add("c")
        assert crew.finish() == undisturbed(Task(options))


def test_it_has_the_same_bits_where_all_go_back_to_an_earlier_epoch(tmp_path: Path) -> None:
    options = {**OPTIONS, "mirrors": 0, "shoal": {"checkpoint": {"path": str(tmp_path), "every_steps": 3}}}
    with Crew("abc", Task(options, script=script)) as crew:
        crew.train_to(3)
        saved(crew, 3)
        crew.train_to(5)
        crew.kill("b")
        assert crew.finish() == reference(Task(OPTIONS))
        assert [one.from_step for one in crew.job.durable.history if one.reason.value == "restore"] == [3]


@pytest.mark.parametrize("stage", [1, 3])
def test_an_evaluation_between_epochs_as_scripts_write_it_changes_no_bit(stage: int) -> None:
    seen: dict[str, list[float]] = {}

    def note(elastic: Engine, before: Callable[[], None]) -> None:
        def evaluate(engine: DeepSpeedEngine, epoch: int) -> None:
            engine.eval()
            with torch.no_grad():
                tokens = torch.arange(32).view(2, 16)
                seen.setdefault(elastic.context.link.worker, []).append(float(engine(tokens, tokens)))
            engine.train()

        script(elastic, before, evaluate)

    with Crew("abc", Task({**OPTIONS, "stage": stage}, script=note)) as crew:
        crew.train_to(4)
        crew.plant("b", 5, "vote")
        assert crew.finish() == reference(Task(OPTIONS))
    assert len(seen["a"]) == 3
    assert seen["a"] == seen["c"]


@rule(
    "A pass over the loader of a script for DeepSpeed ends with a step of the job, its epoch's last one, and not "
    "after so many batches of the worker's own: workers have different numbers of them, joiners come in the "
    "middle, and whoever ran past the others' end would leave them waiting",
    "Arithmetic and layout",
    broken_by=[
        Edit(
            "shoal.training.training_loop",
            "context.is_over or context.state.step >= end",
            "context.is_over or context.state.step > end",
        ),
        Edit(
            "shoal.deepspeed.elastic_loader",
            "return self._begins_at if begins_here else self._asked_at",
            "return self._asked_at",
        ),
    ],
)
def test_a_joiner_goes_through_the_epochs_before_it_and_trains_in_that_of_the_others() -> None:
    ends: dict[int, list[tuple[int, int]]] = {}

    def note(elastic: Engine, before: Callable[[], None]) -> None:
        script(
            elastic, before, lambda engine, epoch: ends.setdefault(id(elastic), []).append((epoch, engine.global_steps))
        )

    with Crew("a", Task(OPTIONS, script=note)) as crew:
        crew.train_to(8)
        joiner = crew.add("b")
        crew.train_until("lanes of the joiner", lambda: bool(joiner.engine.lanes))
        assert crew.finish() == reference(Task(OPTIONS))
        first = crew.workers["a"].engine
        assert ends[id(first)] == [(0, 5), (1, 10), (2, 15)]
        assert [epoch for epoch, _ in ends[id(joiner.engine)]] == [0, 1, 2]
        assert ends[id(joiner.engine)][0][1] > 5, "nothing was left of the first epoch"


@holds("A pass over the loader")
def test_every_epoch_ends_at_its_last_step_also_where_the_job_goes_on_from_the_middle_of_one(tmp_path: Path) -> None:
    place = {"checkpoint": {"path": str(tmp_path), "every_steps": 7, "resume": "latest"}}
    options = {**OPTIONS, "shoal": place}
    whole = reference(Task(OPTIONS))

    def no_faster_than_the_disk(elastic: Engine, before: Callable[[], None]) -> None:
        saver = elastic.parts.saving._saver
        assert saver is not None

        def wait_too() -> None:
            before()
            saver.join()

        script(elastic, wait_too)

    assert undisturbed(Task(options, script=no_faster_than_the_disk)) == whole
    for folder in tmp_path.glob("step-000000000014*"):
        for file in folder.iterdir():
            file.unlink()
    ends: list[tuple[int, int]] = []

    def go_on(elastic: Engine, before: Callable[[], None]) -> None:
        script(elastic, before, lambda engine, epoch: ends.append((epoch, engine.global_steps)))

    assert undisturbed(Task(options, script=go_on)) == whole
    assert ends == [(0, 7), (1, 10), (2, 15)]


# ---- checkpoints


def saving(place: Path, losses: list[Any]) -> Task:
    def run(elastic: Engine, before: Callable[[], None]) -> None:
        engine = over(elastic)
        path, state = engine.load_checkpoint(str(place))
        first = state.get("epoch", -1) + 1
        losses.append((path is not None, first))
        for epoch in range(first, EPOCHS):
            for batch in engine.training_dataloader:
                before()
                engine.backward(engine(**batch))
                engine.step()
            engine.save_checkpoint(
                place / "epochs", tag=f"epoch{epoch}", client_state={"epoch": epoch, "seen": torch.ones(2)}
            )

    return Task({**OPTIONS, "shoal": {"checkpoint": {"path": str(place)}}}, script=run)


def test_what_a_script_saves_beside_the_model_is_there_when_it_goes_on(tmp_path: Path) -> None:
    starts: list[Any] = []
    with Crew("ab", saving(tmp_path, starts)) as crew:
        crew.train_to(5)
        saved(crew, 5)
    [folder] = tmp_path.glob("step-*")
    state = saved_in(str(folder))
    assert (state.tag, state.content["epoch"], state.content["seen"].tolist()) == ("epoch0", 0, [1.0, 1.0])
    assert undisturbed(saving(tmp_path, starts)) == reference(Task(OPTIONS))
    assert starts == [(False, 0), (False, 0), (True, 1)]


def test_a_joiner_saves_no_epoch_that_was_over_before_it_was_there(tmp_path: Path) -> None:
    asked: list[tuple[str, int]] = []

    def note(elastic: Engine, before: Callable[[], None]) -> None:
        def save(engine: DeepSpeedEngine, epoch: int) -> None:
            engine.save_checkpoint(tmp_path)
            if engine.elastic.parts.saving.pending:
                asked.append((elastic.context.link.worker, epoch))

        script(elastic, before, save)

    with Crew("a", Task({**OPTIONS, "shoal": {"checkpoint": {"path": str(tmp_path)}}}, script=note)) as crew:
        crew.train_to(7)
        joiner = crew.add("b")
        crew.train_until("lanes of the joiner", lambda: bool(joiner.engine.lanes))
        crew.train_to(10)
        crew.train_to(11)
        first, second = (worker.link.worker for worker in crew.workers.values())
        assert (first, 0) in asked and (first, 1) in asked
        assert (second, 0) not in asked


def test_a_checkpoint_elsewhere_or_of_another_tag_is_one_sentence(tmp_path: Path) -> None:
    losses: list[Any] = []
    undisturbed(saving(tmp_path, losses))

    def ask(call: Callable[[DeepSpeedEngine], Any]) -> str:
        def run(elastic: Engine, before: Callable[[], None]) -> None:
            call(over(elastic))

        with pytest.raises(UserError) as refusal:
            undisturbed(Task({**OPTIONS, "shoal": {"checkpoint": {"path": str(tmp_path)}}}, script=run))
        return str(refusal.value)

    assert f'`shoal.checkpoint.path` of the config says "{tmp_path}"' in ask(lambda e: e.load_checkpoint("elsewhere"))
    assert 'was to load "best"' in ask(lambda e: e.load_checkpoint(tmp_path, tag="best"))
    assert "load_module_only=True, which is not supported" in ask(
        lambda e: e.load_checkpoint(tmp_path, load_module_only=True)
    )
    assert "expected a dict" in ask(lambda e: e._client_state.put(None, [1]))
    assert "client_state.of" in ask(lambda e: e._client_state.put(None, {"of": object()}))


def test_a_worker_that_joins_goes_on_where_the_others_are_whatever_its_script_loads(tmp_path: Path) -> None:
    tag: list[str | None] = [None]

    def run(elastic: Engine, before: Callable[[], None]) -> None:
        engine = over(elastic)
        _, state = engine.load_checkpoint(tmp_path, tag=tag[0])
        for epoch in range(state.get("epoch", -1) + 1, EPOCHS):
            for batch in engine.training_dataloader:
                before()
                engine.backward(engine(**batch))
                engine.step()
            engine.save_checkpoint(tmp_path, tag=f"epoch{epoch}", client_state={"epoch": epoch})

    task = Task({**OPTIONS, "shoal": {"checkpoint": {"path": str(tmp_path)}}}, script=run)
    with Crew("a", task) as crew:
        crew.train_to(5)
        saved(crew, 5)
    tag[0] = "epoch0"
    with Crew("a", task) as crew:
        crew.train_to(10)
        saved(crew, 10)
        crew.add("b")
        assert crew.finish() == reference(Task(OPTIONS))
        assert not crew.workers["b"].failure


@pytest.mark.parametrize(
    ("folder", "path", "within"),
    [("runs/a", "runs", True), ("runs", "runs/", True), ("runs2", "runs", False), ("s3://b/x/1", "s3://b/x", True)],
)
def test_a_folder_lies_in_the_place_of_the_checkpoints_or_not(folder: str, path: str, within: bool) -> None:
    assert is_within(folder, path) is within


# ---- initialize


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.width = 2

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layer(input), target)


SAMPLES = [{"input": torch.full((2,), float(number)), "target": torch.zeros(1)} for number in range(16)]
CONFIG: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}


def made(**more: Any) -> Made:
    torch.manual_seed(0)
    given = {"model": Line(), "training_data": SAMPLES, "config": CONFIG, "shoal": {"epochs": 2}, **more}
    return deepspeed.initialize(**{name: value for name, value in given.items() if value is not None})


def refused(**more: Any) -> str:
    with pytest.raises(UserError) as refusal:
        made(**more)
    return str(refusal.value)


def trained(engine: DeepSpeedEngine, loader: ElasticLoader, seen: Callable[[DeepSpeedEngine], Any]) -> list[Any]:
    found = []
    for _ in range(2):
        for batch in loader:
            loss = engine(**batch)
            assert engine.backward(loss) == loss / engine.gradient_accumulation_steps()
            before = seen(engine)
            engine.step()
            found.append((before, seen(engine)))
    return found


def test_the_engine_says_where_its_step_is_and_when_it_updates() -> None:
    engine, optimizer, loader, scheduler = made()
    assert (len(loader), loader.batch_size, scheduler) == (4, 2, None)
    seen = trained(
        engine, loader, lambda one: (one.is_gradient_accumulation_boundary(), one.was_step_applied(), one.global_steps)
    )
    before, after = zip(*seen, strict=True)
    assert [at_boundary for at_boundary, _, _ in before] == [False, False, False, True] * 4
    assert [applied for _, applied, _ in after] == [False, False, False, True] * 4
    assert [step for _, _, step in after][3::4] == [1, 2, 3, 4]
    assert (engine.global_samples, engine.micro_steps, engine.get_lr()) == (32, 8, [0.01])
    assert optimizer is engine.optimizer
    assert (engine.train_batch_size(), engine.dp_world_size, engine.gradient_accumulation_steps()) == (8, 2, 2)


@pytest.mark.parametrize("divisor, times", [(1, 0), (2, 1)])
def test_a_loss_that_the_script_divides_itself_is_one_warning(
    divisor: int, times: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine divides by the accumulation, as DeepSpeed's does."""
    engine, _, loader, _ = made()
    for batch in loader:
        engine.backward(engine(**batch) / divisor)
        engine.step()
    assert capsys.readouterr().err.count("loss_of_another_loop") == times


def test_every_name_of_the_engine_that_the_page_has_is_there_and_no_other_of_deepspeeds() -> None:
    engine, *_ = made()
    for name in ENGINE:
        assert hasattr(engine, name.partition("(")[0].replace("engine", "forward")), name
    assert engine.width == 2, "the model's"
    for name in ABSENT:
        with pytest.raises(AttributeError, match=f"engine.{name} of DeepSpeed is not in Shoal"):
            getattr(engine, name)
    with pytest.raises(UserError, match=r"deepspeed\.ops is not in Shoal; use torch\.optim's own classes"):
        _ = deepspeed.ops


def test_the_optimizer_that_is_handed_back_says_that_its_state_is_elsewhere() -> None:
    engine, optimizer, loader, _ = made()
    trained(engine, loader, lambda one: None)
    with pytest.raises(UserError, match="the optimizer's state lies in blocks on all workers"):
        optimizer.state_dict()
    assert [sorted(group["params"][0].shape) for group in optimizer.param_groups] == [[1, 2]]


def test_a_data_loader_gives_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    def together(samples: list[Any]) -> dict[str, Tensor]:
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    given = DataLoader(SAMPLES, batch_size=2, shuffle=True, collate_fn=together, drop_last=True)  # type: ignore[arg-type]
    auto = {**CONFIG, "train_micro_batch_size_per_gpu": "auto"}
    engine, _, loader, _ = made(
        training_data=given, config={**auto, "train_batch_size": "auto"}, shoal={"epochs": 1, "lanes": 2}
    )
    assert (loader.batch_size, engine.train_batch_size()) == (2, 8)
    assert '"drop_last": "the rest of an epoch' in capsys.readouterr().err
    assert len(trained(engine, loader, lambda one: None)) == 8
    assert "a DataLoader whose order is that of a SequentialSampler" in refused(
        training_data=DataLoader(SAMPLES, batch_size=2)
    )  # type: ignore[arg-type]
    assert "batch_size is 4, and micro-batches have 2" in refused(
        training_data=DataLoader(SAMPLES, batch_size=4, shuffle=True)
    )  # type: ignore[arg-type]


def test_functions_make_optimizer_and_scheduler() -> None:
    without = {name: value for name, value in CONFIG.items() if name != "optimizer"}
    _, optimizer, _, scheduler = made(
        config=without,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
    )
    assert (type(optimizer).__name__, type(scheduler).__name__) == ("SGD", "StepLR")


def test_only_the_parameters_that_are_given_are_trained() -> None:
    model = Line()
    model.layer.bias.requires_grad_(False)
    _, optimizer, *_ = made(model=model, model_parameters=model.parameters())
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
    model = Line()
    grouped = [{"params": [model.layer.weight], "weight_decay": 0.5}]
    model.layer.bias.requires_grad_(False)
    _, optimizer, *_ = made(model=model, model_parameters=grouped)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5]


def test_the_config_may_come_by_any_of_deepspeeds_names(tmp_path: Path) -> None:
    parser = deepspeed.add_config_arguments(ArgumentParser())
    (tmp_path / "ds.json").write_text('{"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, '
                                      '"optimizer": {"type": "SGD", "params": {"lr": 1}}}')  # fmt: skip
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json")])
    assert made(args=args, config=None)[0].train_batch_size() == 4
    assert made(config=None, config_params=CONFIG)[0].train_batch_size() == 8
    assert "got no config" in refused(config=None)
    assert "got config and args.deepspeed_config, which differ" in refused(args=args)


def test_what_is_wrong_with_the_arguments_is_one_sentence() -> None:
    assert "deepspeed.initialize has no argument models" in refused(models=Line())
    both = refused(mpu=object(), shoal={"seed": -1})
    assert "got mpu; shoal.cell says which processes train a lane together" in both and "`shoal.seed` is -1" in both
    assert "`shoal.epochs` is 2, and deepspeed.initialize got no training_data" in refused(training_data=None)
    assert "model is a list; expected one torch.nn.Module" in refused(model=[])
    with pytest.raises(UserError, match="got model by position and by name"):
        deepspeed.initialize(None, Line(), model=Line())


def test_what_a_loop_does_wrong_is_one_sentence() -> None:
    engine, _, loader, _ = made()
    with pytest.raises(UserError, match="the loss of a batch that is not of the loader"):
        engine.backward(engine(torch.zeros(2, 2), torch.zeros(2, 1)))
    for batch in loader:
        engine.backward(engine(**batch))
        engine.step()
        break
    with pytest.raises(UserError, match="was left at step 0 of 2, in the middle of an epoch"):
        next(iter(loader))


def test_a_job_ends_early_by_stop() -> None:
    engine, _, loader, _ = made()
    for _ in range(2):
        for batch in loader:
            engine.backward(engine(**batch))
            engine.stop()
            engine.step()
    assert engine.global_steps == 1


# ---- zero


def test_a_model_built_in_zero_init_has_no_memory_until_it_is_initialized() -> None:
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = Line()
    assert model.layer.weight.is_meta
    with pytest.raises(UserError, match="parameters that have no values yet"):
        deepspeed.zero.GatheredParameters(model.layer.weight, modifier_rank=0)
    engine, _, loader, _ = made(model=model, config={**CONFIG, "zero_optimization": {"stage": 3}})
    trained(engine, loader, lambda one: None)
    with deepspeed.zero.GatheredParameters(model.parameters()):
        assert model.layer.weight.shape == (1, 2)
        assert torch.isfinite(model.layer.weight).all()
    with pytest.raises(UserError, match=r"got a modifier_rank after deepspeed\.initialize"):
        deepspeed.zero.GatheredParameters(model.layer.weight, modifier_rank=0)


def test_parameters_are_read_as_they_are_where_there_is_no_engine_or_it_is_off() -> None:
    with deepspeed.zero.Init(enabled=False):
        model = Line()
    with deepspeed.zero.GatheredParameters(model.layer.weight, modifier_rank=0), torch.no_grad():
        model.layer.weight.fill_(1.0)
    assert model.layer.weight.tolist() == [[1.0, 1.0]]
