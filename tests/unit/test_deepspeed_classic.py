"""Scripts for DeepSpeed as its own documents have them: no key of Shoal's, an end and a DataLoader of their own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import shoal.deepspeed as deepspeed
import torch
from crew import Crew, Task
from crew_saves import saved
from matrices import shortened
from reference import reference
from rule import Edit, holds, rule
from shoal.config.load import Beside, load_config
from shoal.config.training import Sizes, settle
from shoal.deepspeed import comm, rank_reads
from shoal.deepspeed.deepspeed_engine import DeepSpeedEngine
from shoal.training.engine import Engine
from shoal_protos.errors import UserError
from tiers import check
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, DistributedSampler

pytestmark = check("trains whole jobs")

EPOCHS, STEPS = 3, 15
"""Of 40 samples in steps of 8."""
OPTIONS, OPEN = {"max_steps": STEPS}, {"max_steps": None}


def over(elastic: Engine) -> DeepSpeedEngine:
    """As `deepspeed.initialize` makes it."""
    return DeepSpeedEngine(elastic)


def script(elastic: Engine, before: Callable[[], None]) -> DeepSpeedEngine:
    """Whole epochs."""
    engine = over(elastic)
    for _ in range(EPOCHS):
        for batch in engine.training_dataloader:
            before()
            engine.backward(engine(**batch))
            engine.step()
    return engine


def whole(elastic: Engine, before: Callable[[], None]) -> None:
    """All that it does."""
    script(elastic, before)


# ---- an end that nothing says beforehand


@holds("Where nothing says beforehand")
@pytest.mark.parametrize("stage", shortened([1, 3], 3))
def test_a_loop_over_epochs_ends_its_job_when_all_scripts_have_ended(stage: int) -> None:
    ends: list[int | None] = []

    def evaluate_long(elastic: Engine, before: Callable[[], None]) -> None:
        script(elastic, before)
        elastic.context.link.pause(0.0)  # an interval of heartbeats, each worker's own
        ends.append(elastic.context.state.last_step)

    with Crew("abc", Task({**OPEN, "stage": stage}, script=evaluate_long)) as crew:
        crew.train_to(3)
        crew.plant("b", 4, "exchange")
        crew.train_to(7)
        crew.add("d")
        crew.train_to(11)
        assert crew.job.durable.last_step is None
        assert crew.finish() == reference(Task(OPTIONS))
        assert crew.job.durable.last_step == STEPS
    assert set(ends) == {0}, "nobody knew it before"


def test_a_worker_that_dies_while_others_have_ended_is_none_that_they_wait_for() -> None:
    def die_after_the_loop(elastic: Engine, before: Callable[[], None]) -> None:
        script(elastic, before)
        before()  # a gate: it is killed there

    with Crew("ab", Task(OPEN, script=whole), odd={"b": Task(OPEN, script=die_after_the_loop)}) as crew:
        crew.allow(STEPS)
        crew.until("the end of a's script", lambda: crew.workers["a"].engine.context.awaits_end)
        crew.kill("b")
        assert crew.finish() == reference(Task(OPTIONS))


@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_loop_that_is_left_by_the_engines_counter_ends_the_job_there(names: str) -> None:
    def leave(elastic: Engine, before: Callable[[], None]) -> None:
        engine = over(elastic)
        for _ in range(EPOCHS):
            for batch in engine.training_dataloader:
                if engine.global_steps >= 7:
                    break
                before()
                engine.backward(engine(**batch))
                engine.step()
        engine.destroy()
        assert (elastic.context.is_over, engine.elastic.global_step) == (True, 7)

    with Crew(names, Task(OPEN, script=leave)) as crew:
        assert crew.finish() == reference(Task({"max_steps": 7}))


@pytest.mark.parametrize("steps", [STEPS, None], ids=["known", "open"])
def test_a_loop_that_is_left_in_the_body_of_the_last_step_tells_callbacks_of_its_end(steps: int | None) -> None:
    ends: list[int] = []

    def leave(elastic: Engine, before: Callable[[], None]) -> None:
        engine = over(elastic)
        elastic.training.add_ending(lambda: ends.append(engine.global_steps))
        for _ in range(EPOCHS):
            for batch in engine.training_dataloader:
                before()
                engine.backward(engine(**batch))
                engine.step()
                if engine.global_steps >= STEPS:
                    break

    with Crew("ab", Task({"max_steps": steps}, script=leave)) as crew:
        assert crew.finish() == reference(Task(OPTIONS))
    assert ends == [STEPS, STEPS]


@rule(
    "A worker that ran no body of the last step, for it had no lanes, ends with those whose scripts have ended there: "
    "it is stopped in the step after it, and a new world begins once all of it know which step was the last",
    "A change of the world",
    broken_by=[
        Edit("shoal_controller.core.machine.phases.running", " if not lanes)", " if False)"),
        Edit("shoal_controller.core.machine.phases.running", "        return world.workers\n", "        pass\n"),
        Edit(
            "shoal_controller.core.machine.phases.next_message",
            "return ends if ends and not status.last_step else Open(world.generation)",
            "return Open(world.generation)",
        ),
    ],
)
@pytest.mark.parametrize("at", [4, 5])
@pytest.mark.parametrize("place", ["the top of the body", "after engine.step"])
def test_a_joiner_without_lanes_hears_that_the_others_have_left_their_loop(at: int, place: str) -> None:
    """Also one that gets its first lanes with the step after theirs: no body of its own has seen the counter."""
    ends: list[int] = []

    def leave(elastic: Engine, before: Callable[[], None]) -> None:
        engine = over(elastic)
        for _ in range(EPOCHS):
            for batch in engine.training_dataloader:
                if place == "the top of the body" and engine.global_steps >= 7:
                    break
                before()
                engine.backward(engine(**batch))
                engine.step()
                if place == "after engine.step" and engine.global_steps >= 7:
                    break
            if engine.global_steps >= 7:
                break
        ends.append(engine.global_steps)

    with Crew("ab", Task(OPEN, script=leave)) as crew:
        crew.train_to(at)
        crew.add("c")
        crew.beat(3)
        assert crew.finish() == reference(Task({"max_steps": 7}))
        assert crew.now < 100, "in virtual seconds; none was waited for until it was evicted"
    assert ends == [7, 7, 7]


def test_a_loop_that_is_left_by_a_count_of_its_own_is_told_where() -> None:
    def leave(elastic: Engine, before: Callable[[], None]) -> None:
        engine = over(elastic)
        for number, batch in enumerate(engine.training_dataloader):
            before()
            engine.backward(engine(**batch))
            engine.step()
            if number == 5:
                break

    with Crew("ab", Task(OPEN, script=leave)) as crew:
        crew.allow()
        crew.until("the end", lambda: crew.job.durable.phase.is_over)
        reason = crew.job.durable.reason
    line = leave.__code__.co_firstlineno + 7
    assert f"test_deepspeed_classic.py:{line} has left the loop over the loader at step" in reason, reason


def test_a_look_at_the_data_before_the_loop_is_no_epoch() -> None:
    def look(elastic: Engine, before: Callable[[], None]) -> None:
        engine = over(elastic)
        next(iter(engine.training_dataloader))
        for _ in range(EPOCHS):
            for batch in engine.training_dataloader:
                before()
                engine.backward(engine(**batch))
                engine.step()

    with Crew("ab", Task(OPEN, script=look)) as crew:
        assert crew.finish() == reference(Task(OPTIONS))


def test_what_is_saved_after_the_last_epoch_is_there_at_the_end(tmp_path: Path) -> None:
    def save(elastic: Engine, before: Callable[[], None]) -> None:
        script(elastic, before).save_checkpoint(tmp_path, client_state={"epochs": EPOCHS})

    place = {"checkpoint": {"path": str(tmp_path)}}
    with Crew("ab", Task({**OPEN, "shoal": place}, script=save)) as crew:
        assert crew.finish() == reference(Task(OPTIONS))
    assert [folder.name[:17] for folder in tmp_path.glob("step-*")] == ["step-000000000015"]


@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_script_that_goes_on_from_its_end_and_passes_over_its_loops_ends_its_job_at_once(
    names: str, tmp_path: Path
) -> None:
    def from_its_counter(elastic: Engine, before: Callable[[], None]) -> None:
        engine = over(elastic)
        engine.load_checkpoint(tmp_path)
        for _ in range(engine.global_steps * EPOCHS // STEPS, EPOCHS):
            for batch in engine.training_dataloader:
                before()
                engine.backward(engine(**batch))
                engine.step()
        engine.save_checkpoint(tmp_path)

    place = {"checkpoint": {"path": str(tmp_path), "every_steps": STEPS}}
    for _ in range(2):
        with Crew(names, Task({**OPEN, "shoal": place}, script=from_its_counter)) as crew:
            assert crew.finish() == reference(Task(OPTIONS))
            assert crew.job.durable.step == STEPS


@holds("A pass over the loader")
@pytest.mark.parametrize("loads", [True, False])
def test_a_script_that_counts_its_epochs_on_comes_to_the_jobs_end_where_it_joins_and_where_it_is_started_again(
    loads: bool, tmp_path: Path
) -> None:
    """Its counter and its first pass begin at the same step, whatever the job has come to by then."""

    def count_on(elastic: Engine, before: Callable[[], None]) -> None:
        engine = over(elastic)
        if loads:
            engine.load_checkpoint(tmp_path)
        for _ in range(engine.global_steps * EPOCHS // STEPS, EPOCHS):
            for batch in engine.training_dataloader:
                before()
                engine.backward(engine(**batch))
                engine.step()

    task = Task({**OPEN, "shoal": {"checkpoint": {"path": str(tmp_path), "every_steps": 6}}}, script=count_on)
    with Crew("a", task) as crew:
        crew.train_to(6)
        saved(crew, 6)
        crew.train_to(11)
        crew.beat(2)  # the job's step is shown once a second
        crew.add("b")
        assert crew.finish() == reference(Task(OPTIONS))
    assert {12} <= {int(folder.name[5:17]) for folder in tmp_path.glob("step-*")} <= {6, 12}
    with Crew("a", task) as crew:
        assert crew.finish() == reference(Task(OPTIONS))
        assert crew.job.durable.step == STEPS


@pytest.mark.parametrize("place", ["in the body", "between epochs"])
def test_an_error_that_ends_a_script_is_said_though_the_script_destroys_its_engine_in_the_end(place: str) -> None:
    def fail(elastic: Engine, before: Callable[[], None]) -> None:
        engine = over(elastic)
        try:
            for _ in range(EPOCHS):
                for batch in engine.training_dataloader:
                    before()
                    if place == "in the body" and engine.global_steps == 6:
                        raise ValueError("a torn sample")
                    engine.backward(engine(**batch))
                    engine.step()
                if place == "between epochs":
                    raise ValueError("a torn sample")
        finally:
            engine.destroy()

    with Crew("ab", Task(OPEN, script=whole), odd={"b": Task(OPEN, script=fail)}) as crew:
        assert crew.finish() == reference(Task(OPTIONS))
        assert "ValueError: a torn sample" in crew.story()


# ---- sizes


@pytest.mark.parametrize(
    ("batch", "accumulated", "lanes", "micro"),
    [(64, 2, 8, 4), (32, None, 8, 4), (30, 2, 5, 3), (7, None, 7, 1), (22, 2, 1, 11)],
)
def test_a_batch_alone_is_cut_into_as_many_lanes_up_to_eight_as_divide_it(
    batch: int, accumulated: int | None, lanes: int, micro: int
) -> None:
    assert settle(Sizes(batch, None, None, accumulated)) == Sizes(batch, micro, lanes, accumulated or 1)


def test_lanes_that_follow_from_the_batch_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    four_lines = {"train_batch_size": 64, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}
    assert load_config(four_lines, Beside(open_end=True)).lanes == 8
    [line] = capsys.readouterr().err.splitlines()
    assert '"lanes": 8' in line and "`shoal.lanes` may say another" in line


def test_what_accumulates_follows_from_batch_micro_batch_and_lanes() -> None:
    assert settle(Sizes(32, 8, 2, None)) == Sizes(32, 8, 2, 2)


# ---- a loader of the script's own


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layer(input), target)


SAMPLES = [{"input": torch.full((2,), float(number)), "target": torch.zeros(1)} for number in range(16)]
CONFIG: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    """A script's group of torch.distributed, and its engine, end with it."""
    yield
    gc.collect()
    if distributed.is_initialized():
        distributed.destroy_process_group()


def made(**more: Any) -> DeepSpeedEngine:
    torch.manual_seed(0)
    return deepspeed.initialize(**{"model": Line(), "config": CONFIG, **more})[0]


def weights_of(loop: Callable[[DeepSpeedEngine], Any], **more: Any) -> list[float]:
    engine = made(**more)
    loop(engine)
    assert engine.global_steps == 4
    return [float(value) for parameter in engine.module.parameters() for value in parameter.detach().flatten()]


def train(engine: DeepSpeedEngine, loader: Any) -> None:
    for _ in range(2):
        for batch in loader:
            engine.backward(engine(**batch))
            engine.step()


def test_the_loop_over_a_loader_of_the_scripts_own_trains_as_over_the_engines() -> None:
    expected = weights_of(lambda engine: train(engine, engine.training_dataloader), training_data=SAMPLES)
    deepspeed.init_distributed()
    before = DataLoader(SAMPLES, batch_size=4, sampler=DistributedSampler(SAMPLES))  # type: ignore[arg-type, var-annotated]

    def after(engine: DeepSpeedEngine) -> None:
        rank, world = engine.global_rank, engine.world_size
        sampler = DistributedSampler(SAMPLES, num_replicas=world, rank=rank)  # type: ignore[arg-type, var-annotated]
        train(engine, DataLoader(SAMPLES, batch_size=4, sampler=sampler))  # type: ignore[arg-type]

    assert weights_of(lambda engine: train(engine, before)) == expected
    assert weights_of(after) == expected
    assert weights_of(lambda engine: train(engine, engine.deepspeed_io(SAMPLES))) == expected


def test_a_script_that_has_only_looked_at_a_batch_comes_to_its_end() -> None:
    engine = made(training_data=SAMPLES)
    next(iter(engine.training_dataloader))
    engine.destroy()
    assert engine.global_steps == 0


def test_loops_that_do_not_train_are_left_as_they_are() -> None:
    engine = made()
    other = DataLoader(SAMPLES, batch_size=5)  # type: ignore[arg-type]
    with torch.no_grad():
        assert [len(batch["target"]) for batch in other] == [5, 5, 5, 1]
    engine.eval()
    assert len(list(other)) == 4
    engine.train()
    with pytest.raises(UserError, match=r"order is that of a SequentialSampler.* A loop that evaluates comes after"):
        next(iter(other))
    train(engine, DataLoader(SAMPLES, batch_size=4, shuffle=True))  # type: ignore[arg-type]
    rest = DataLoader(SAMPLES[:3])  # type: ignore[arg-type]
    assert len(list(rest)) == 3, "of another dataset"


def test_workers_whose_loops_go_over_datasets_of_other_lengths_fail_by_name() -> None:
    def of_length(samples: int) -> Task:
        def give(engine: Engine) -> None:
            engine.context.loop.fetcher.given_late = samples

        return Task(OPEN, script=whole, prepare=give)

    with Crew("ab", of_length(16), odd={"b": of_length(15)}) as crew:
        crew.allow()
        crew.until("the end", lambda: crew.job.durable.phase.is_over)
        assert "the dataset that rank 1 loops over has 15 samples, rank 0's has 16" in crew.job.durable.reason


@pytest.mark.parametrize(
    ("rank", "line", "picks"),
    [
        ("engine.global_rank", "part = samples[rank :: engine.world_size]", True),
        ("engine.global_rank", "part = [one for number, one in enumerate(samples) if number % 4 == rank]", True),
        ("comm.get_rank()", "part = [samples[number] for number in range(rank, 16, 4)]", True),
        ("comm.get_rank()", "sampler = (samples, 4, rank)", False),
        ("engine.global_rank", "last = samples[-1:]", False),
    ],
)
def test_a_script_that_takes_samples_by_its_rank_is_refused_with_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, line: str, picks: bool
) -> None:
    monkeypatch.setattr(rank_reads, "_reads", {})
    engine, file = made(), tmp_path / "train.py"
    file.write_text(f"rank = {rank}\n\n{line}\n")
    exec(compile(file.read_text(), str(file), "exec"), {"engine": engine, "comm": comm, "samples": SAMPLES})
    loader = DataLoader(SAMPLES, batch_size=4, shuffle=True)  # type: ignore[arg-type]
    if picks:
        with pytest.raises(UserError, match=r"train\.py:3 takes samples by the worker's rank"):
            next(iter(loader))
    else:
        next(iter(loader))


def test_a_schedule_that_needs_the_end_and_has_none_says_so() -> None:
    decay = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 1, "total_num_steps": "auto"}}
    with pytest.raises(
        UserError, match=r"`scheduler\.params\.total_num_steps` is \"auto\".*nothing says where that is"
    ):
        made(config={**CONFIG, "scheduler": decay})


def test_the_configuration_for_transformers_answers_without_deepspeed() -> None:
    config = deepspeed.HfDeepSpeedConfig({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
    assert (config.is_zero3(), config.is_zero2(), config.is_offload()) == (True, False, True)
    assert (config.get_value("zero_optimization.stage"), config.get_value("optimizer.params.lr", 1)) == (3, 1)
    config.del_config_sub_tree("zero_optimization.offload_param", must_exist=True)
    assert not config.is_offload() and config.is_false("bf16.enabled") is False


def test_a_script_that_has_ended_says_in_each_new_world_that_it_evaluates_no_more() -> None:
    """Else a script that still evaluates would wait for it there."""

    def evaluates_late(elastic: Engine, before: Callable[[], None]) -> None:
        script(elastic, before)
        before()
        with elastic.evaluating():
            for _ in elastic.shard(range(8)):
                elastic.report(score=1.0)

    late = {"c": Task(OPEN, script=evaluates_late)}
    with Crew("abc", Task(OPEN, script=script), odd=late) as crew:
        crew.allow(STEPS)
        crew.until("both at their end", lambda: all(crew.workers[one].engine.context.awaits_end for one in "ab"))
        crew.kill("b")
        assert crew.finish() == reference(Task(OPTIONS))
        assert crew.now < 300
