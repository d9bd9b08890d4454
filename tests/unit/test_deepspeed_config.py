"""DeepSpeed's `ds_config.json`: every documented key has its place, and files as people have them load unchanged.

tests/deepspeed_configs holds such files, written in the manner of public repositories; tests/deepspeed_public.jsonl.gz
those of public repositories themselves, each a line of its repository and path and its object (or its text, where it is
a template); tests/deepspeed_keys.txt the keys that DeepSpeed's reference documents.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import shoal
import torch
from crew import Task, undisturbed
from shoal.config.deepspeed import FATES, REASONS, Renamed
from shoal.config.document import Document, Scheduler
from shoal.config.load import Beside, load_config
from shoal.config.sentences import keys_of
from shoal.config.sifting import is_one_edit
from shoal.optim.config_sections import build_optimizer, build_scheduler, optimizer_differs, scheduler_differs
from shoal.training.engine import Engine
from shoal_protos.errors import UserError
from shoal_protos.validation import each_of
from torch import nn
from torch.utils.data import DataLoader

from docs.generate.deepspeed import FILES, OUTCOMES, page

TESTS = Path(__file__).resolve().parents[1]
CONFIGS = sorted((TESTS / "deepspeed_configs").glob("*.json"))
SMALLEST: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "shoal": {"lanes": 2, "max_steps": 3}}


def sentence(config: dict[str, Any], beside: Beside | None = None) -> str:
    with pytest.raises(UserError) as refusal:
        load_config({**SMALLEST, **config}, *([beside] if beside else []))
    return str(refusal.value)


def test_every_documented_key_is_honoured_left_alone_or_refused() -> None:
    known = {*keys_of(Document), *FATES}
    documented = (TESTS / "deepspeed_keys.txt").read_text().split()
    assert len(documented) > 150

    def has_a_place(key: str) -> bool:
        parts = key.split(".")
        above = {".".join(parts[:depth]) for depth in range(1, len(parts))} - {"optimizer", "scheduler"}
        whole = {name for name in above if name in FATES}
        return key in known or bool(whole)

    assert [key for key in documented if not has_a_place(key)] == []


def test_no_key_has_two_places() -> None:
    assert [key for key in keys_of(Document) if key in FATES] == []
    renamed = [fate.to for fate in FATES.values() if isinstance(fate, Renamed)]
    assert [key for key in renamed if key not in {*keys_of(Document), *FATES}] == []


def test_the_page_about_deepspeed_is_current() -> None:
    assert (TESTS.parent / "docs" / "deepspeed.md").read_text() == page(), "run `make docs`"


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_config_as_people_have_it_loads_unchanged(file: Path) -> None:
    """With what only the script knows: lanes, the end of the job, objects where the file leaves their values open."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    text = json.loads(file.read_text())
    sizes = [text.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu")]
    lanes = {} if all(isinstance(size, int) for size in sizes) else {"lanes": 4}
    settled = load_config(file, Beside({"epochs": 2, **lanes}, micro_batch_size=2, optimizer=True, scheduler=True))
    assert settled.train_batch_size == settled.lanes * settled.micro_batch_size * settled.micro_batches_per_lane
    if settled.optimizer is not None and settled.optimizer.params.get("lr") != "auto":
        optimizer = build_optimizer(settled.optimizer, model)  # type: ignore[assignment]
    elif settled.optimizer is not None:
        assert list(optimizer_differs(settled.optimizer, optimizer)) == []
    if settled.scheduler is not None and settled.scheduler.params.get("warmup_num_steps") != "auto":
        build_scheduler(settled.scheduler, optimizer, last_step=100)
    elif settled.scheduler is not None:
        assert list(scheduler_differs(settled.scheduler, scheduler)) == []


def refusals_of(file: Path, batch: object) -> list[str]:
    """The sentences of a file with what a script adds; none: an optimizer and a schedule were made of it too."""
    model = nn.Linear(2, 2)
    given = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lanes = {} if isinstance(batch, int) else {"lanes": 4}
    try:
        beside = Beside({"epochs": 2, **lanes}, micro_batch_size=1, optimizer=True, scheduler=True)
        settled = load_config(file, beside)
        if settled.optimizer is not None and settled.optimizer.params.get("lr") != "auto":
            given = build_optimizer(settled.optimizer, model)  # type: ignore[assignment]
        if settled.scheduler is not None and settled.scheduler.params.get("warmup_num_steps") != "auto":
            build_scheduler(settled.scheduler, given, last_step=100)
    except UserError as refusal:
        return each_of(str(refusal))
    return []


def test_every_public_file_trains_or_is_refused_for_reasons_that_the_page_lists(tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    files = gzip.decompress((TESTS / "deepspeed_public.jsonl.gz").read_bytes()).splitlines()
    for line in files:
        name, content = json.loads(line)
        (tmp_path / "ds_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
        batch = content.get("train_batch_size") if isinstance(content, dict) else 1
        sentences = refusals_of(tmp_path / "ds_config.json", batch)
        reasons = {phrase for phrase in REASONS for one in sentences if phrase in one}
        assert all(any(phrase in one for phrase in REASONS) for one in sentences), (name, sentences)
        outcomes.update(reasons or {"trains"})
    assert (len(files), outcomes) == (FILES, OUTCOMES)


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"_comment": "for the small machine", "logging": {"level": "info"}, "int8": False}, "_comment logging int8"),
        ({"pipe-parallel-size": 1, "log": {"steps_per_print": 50}}, "pipe-parallel-size log"),
        ({"zero_optimization": {"find_unused_parameters": True}}, "zero_optimization.find_unused_parameters"),
        ({"data_types": {"x": 1}, "optimizer": None}, "data_types.x"),
    ],
)
def test_keys_that_deepspeed_never_reads_are_one_line_of_the_log(
    keys: dict[str, Any], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load_config({**SMALLEST, **keys}) == load_config(SMALLEST)
    [line] = map(json.loads, capsys.readouterr().err.splitlines())
    assert line["event"] == "keys that neither Shoal nor DeepSpeed reads are left alone"
    assert (line["level"], line["keys"]) == ("info", names.split())


def test_a_key_that_is_read_elsewhere_is_one_line_that_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    misplaced = {"stage3_gather_16bit_weights_on_model_save": True, "lr": 1}
    apex = {"fp16": {"enabled": True, "opt_level": "O2"}}
    assert load_config({**SMALLEST, **misplaced, **apex}).precision.parameters == "float16"
    [line] = map(json.loads, capsys.readouterr().err.splitlines())
    assert (line["level"], line["belong_at"]) == (
        "warning",
        {
            "stage3_gather_16bit_weights_on_model_save": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            "lr": "optimizer.params.lr",
            "fp16.opt_level": "fp16.auto_cast",
        },
    )


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("gradient_cliping", "gradient_clipping"), ("step_per_print", "steps_per_print"), ("fp61", "fp16"),
        ("Gradient-Clipping", "gradient_clipping"), ("zero_optimisation", "zero_optimization"),
        ("zero_optimization.overlap_com", "zero_optimization.overlap_comm"), ("wandb.projects", "wandb.project"),
    ],
)  # fmt: skip
def test_a_key_that_is_one_edit_from_a_known_one_is_refused_with_it(written: str, meant: str) -> None:
    section, _, key = written.rpartition(".")
    found = {key: True, **({"enabled": True} if section == "wandb" else {})}
    assert f"`{written}` is an unknown key (given: true); did you mean `{meant}`?" in sentence(
        {section: found} if section else found
    )


@pytest.mark.parametrize("one", ["log", "comment", "zero_optimizations_", "stage_gather", "clipping"])
def test_other_words_are_no_misspelt_ones(one: str) -> None:
    known = {key.rpartition(".")[2] for key in (*keys_of(Document), *FATES)}
    assert [other for other in known if is_one_edit(one, other)] == []


OFF: dict[str, Any] = {
    "fp16": {"enabled": False, "loss_scale_window": -1, "opt_level": "O2"},
    "bf16": {"enabled": "auto", "bf16_optimizer_states": True},
    "wandb": {"team": 3},
    "csv_monitor": {"enabled": None, "output_path": 3},
    "amp": {"enabled": False, "opt_level": "O1"},
    "curriculum_learning": {"curriculum_type": "seqlen"},
    "data_efficiency": {"enabled": True, "data_routing": {"enabled": False, "random_ltd": {"enabled": True}}},
    "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}, "different_groups": {}}},
    "sparse_attention": {"mode": "dense"},
    "tensor_parallel": {"autotp_size": 1.0},
    "elasticity": {"enabled": False, "micro_batch_sizes": "none", "prefer_larger_batch_size": True},
}


@pytest.mark.parametrize("section", OFF)
def test_a_section_that_is_off_is_never_refused(section: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert load_config({**SMALLEST, section: OFF[section]}) == load_config(SMALLEST)
    assert load_config({**SMALLEST, section: None}) == load_config(SMALLEST)
    assert capsys.readouterr().err == ""


ON: dict[str, Any] = {
    "data_efficiency": {"enabled": True, "data_sampling": {"enabled": False}, "data_routing": {"enabled": True}},
    "compression_training": {"row_pruning": {"shared_parameters": {"enabled": True, "mixed": {"enabled": False}}}},
    "quantize_training": {"enabled": True, "fp16_mixed_quantize": {"enabled": False}},
    "progressive_layer_drop": {"enabled": True},
    "sparse_attention": {"mode": "fixed"},
    "fp8": True,
}


@pytest.mark.parametrize("section", ON)
def test_a_section_of_what_shoal_lacks_is_refused_where_it_is_on(section: str) -> None:
    assert f"`{section}` is not supported" in sentence({section: ON[section]})


WHOLE: dict[str, Any] = {
    "steps_per_print": 1e5,
    "fp16": {"enabled": True, "initial_scale_power": 8.0, "hysteresis": 1.0},
    "zero_optimization": {"stage": 3.0},
    "sequence_parallel_size": 1.0,
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 1e1, "total_num_steps": 2000.0}},
    "train_micro_batch_size_per_gpu": 4.0,
    "shoal": {"lanes": 2.0, "max_steps": 3.0, "seed": 7.0, "checkpoint": {"resume": 5.0}},
}


def test_a_whole_number_may_have_a_point_or_an_exponent() -> None:
    settled = load_config({**SMALLEST, **WHOLE})
    numbers = (settled.lanes, settled.stage, settled.checkpoint.resume, settled.seed)
    assert list(map(repr, numbers)) == ["2", "3", "5", "7"]
    assert settled.scheduler is not None
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1)
    build_scheduler(settled.scheduler, optimizer, last_step=3)
    one_cycle = Scheduler(type="OneCycleLR", params={"max_lr": 0.5, "total_steps": 2000.0})
    assert vars(build_scheduler(one_cycle, optimizer, last_step=3))["total_steps"] == 2000
    assert "`steps_per_print` is 2000.5; expected a whole number" in sentence({"steps_per_print": 2000.5})


def test_a_file_may_have_comments_and_what_else_hjson_allows(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text("""{
        // sizes for the small machine
        train_micro_batch_size_per_gpu: 4, "shoal": {"lanes": 2, 'max_steps': 3,} # of a test
        /* "bf16": {"enabled": true} */
    }""")
    assert load_config(tmp_path / "ds_config.json") == load_config(SMALLEST)


def test_old_names_are_those_of_today() -> None:
    old = load_config(TESTS / "deepspeed_configs" / "zero3_old_names.json", Beside({"epochs": 1}))
    assert (old.precision.parameters, old.state_on_host, old.parameters_on_host) == ("bfloat16", True, True)
    assert load_config({**SMALLEST, "zero_optimization": True}).stage == 1
    assert "is an old name" in sentence({"bfloat16": {}, "bf16": {}})
    both = {"cpu_offload": True, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}}
    assert "`zero_optimization.offload_optimizer` says another place" in sentence({"zero_optimization": both})
    assert sentence({"zero_optimization": {"cpu_offload": 1}}) == (
        "`zero_optimization.cpu_offload` is 1; expected true or false."
    )


def test_auto_that_nothing_settles_is_named_and_all_of_it_at_once() -> None:
    text = json.loads((TESTS / "deepspeed_configs" / "zero3_offload_all_auto.json").read_text())
    with pytest.raises(UserError) as refusal:
        load_config(text)
    for key in (
        "`train_batch_size`, `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps` stays open",
        '`optimizer.params.lr` is "auto"',
        '`scheduler.params.warmup_num_steps` is "auto"',
        "neither `shoal.max_steps` nor `shoal.epochs`",
    ):
        assert key in str(refusal.value)


def test_what_a_script_says_beside_the_file_must_not_contradict_it() -> None:
    assert sentence({}, Beside({"lanes": 3})) == "`shoal.lanes` is 2 in the file and 3 beside it; keep one."
    assert load_config(SMALLEST, Beside({"lanes": 2, "seed": 5})).seed == 5


def made(section: dict[str, Any], **arguments: Any) -> list[str]:
    config = load_config({**SMALLEST, "optimizer": section}, Beside(optimizer=True))
    assert config.optimizer is not None
    return list(optimizer_differs(config.optimizer, torch.optim.AdamW(nn.Linear(2, 2).parameters(), **arguments)))


def test_an_optimizer_beside_its_section_is_the_one_that_the_section_describes() -> None:
    auto = {"type": "Adam", "params": {"lr": "auto", "betas": [0.9, 0.95], "torch_adam": True}}
    assert made(auto, lr=0.5, betas=(0.9, 0.95)) == []
    assert made({"type": "AdamW", "params": {"lr": 0.1}}, lr=0.2) == [
        '`optimizer.params.lr` is 0.1, and the optimizer that the script gives has 0.2; keep one, or write "auto".'
    ]
    assert made({"type": "SGD", "params": {"lr": 0.1}}, lr=0.1) == [
        '`optimizer.type` is "SGD", and the script gives a AdamW; keep one of them.'
    ]


def test_the_rate_of_a_section_is_compared_with_the_base_of_a_schedule_that_has_begun_below_it() -> None:
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=0.1)
    torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25)
    config = load_config({**SMALLEST, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}, Beside(optimizer=True))
    assert config.optimizer is not None and optimizer.param_groups[0]["lr"] == 0.025
    assert list(optimizer_differs(config.optimizer, optimizer)) == []


# ---- what is shown of a job


def lines(text: str, event: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, text.splitlines()) if line.get("event") == event]


def trained(config: dict[str, Any]) -> Engine:
    torch.manual_seed(0)
    samples = [{"input": torch.randn(2), "target": torch.randn(1)} for _ in range(16)]

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(self.layer(input), target)

    adam = {"type": "AdamW", "params": {"lr": 0.01}}
    engine = shoal.initialize(Line(), {**SMALLEST, "optimizer": adam, **config}, samples)
    for batch in engine:
        engine.backward(engine.module(**batch))
        engine.step()
    return engine


def test_progress_and_times_are_lines_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    trained({"steps_per_print": 2, "wall_clock_breakdown": True})
    [line] = lines(capsys.readouterr().err, "progress")
    assert (line["step"], line["lr"], sorted(line["milliseconds"])) == (
        2,
        [0.01],
        ["backward", "forward", "read", "step"],
    )
    trained({})
    assert lines(capsys.readouterr().err, "progress") == []


def test_a_dumped_state_says_what_was_settled(capsys: pytest.CaptureFixture[str]) -> None:
    trained({"dump_state": True})
    [line] = lines(capsys.readouterr().err, "state")
    assert (line["config"]["lanes"], line["parameters"], line["optimizer"], line["last_step"]) == (2, 3, "AdamW", 3)


def test_the_csv_monitor_writes_a_file_for_each_number_and_goes_on_with_it(tmp_path: Path) -> None:
    section = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}}
    engine = trained(section)
    with (tmp_path / "run" / "Train_Samples_train_loss.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["step", "train_loss"]
    assert [row[0] for row in rows[1:]] == ["8", "16", "24"]
    assert float(rows[-1][1]) == engine.loss
    trained(section)
    text = (tmp_path / "run" / "Train_Samples_lr.csv").read_text()
    assert (text.count("step"), len(text.splitlines())) == (1, 7)


def test_all_of_a_job_is_one_run_of_weights_and_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    logged: list[dict[str, float]] = []

    class Run:
        def log(self, numbers: dict[str, float]) -> None:
            logged.append(numbers)

    fake = ModuleType("wandb")
    fake.init = lambda **arguments: made.append(arguments) or Run()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    engine = trained({"wandb": {"enabled": True, "team": "t", "project": "p"}})
    run = engine.context.link.job.run
    assert made == [{"project": "p", "entity": "t", "group": None, "name": None, "id": run, "resume": "allow"}]
    assert [one["Train/Samples"] for one in logged] == [8, 16, 24]
    assert logged[-1]["Train/Samples/train_loss"] == engine.loss


def test_a_tracker_that_fails_in_its_own_way_gets_no_more_numbers_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = ModuleType("wandb")
    fake.init = lambda **_: 1 / 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    assert trained({"wandb": {"enabled": True, "project": "p"}}).global_step == 3
    assert capsys.readouterr().err.count("tracker_failed") == 1


def test_tensorboard_gets_a_scalar_for_each_number(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    engine = trained({"tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}})
    engine.parts.boundary._observers[0].__self__._writers[0]._writer.close()  # type: ignore[attr-defined]
    found = EventAccumulator(str(tmp_path / "run")).Reload().Scalars("Train/Samples/train_loss")
    assert [scalar.step for scalar in found] == [8, 16, 24]
    assert found[-1].value == pytest.approx(engine.loss)


def test_trackers_that_are_not_installed_are_named_all_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for package in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError) as refusal:
        trained({"tensorboard": {"enabled": True}, "wandb": {"enabled": True}})
    assert "the package tensorboard is not installed: pip install tensorboard" in str(refusal.value)
    assert "the package wandb is not installed: pip install wandb" in str(refusal.value)


def test_a_tracker_that_cannot_write_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"`csv_monitor\.output_path`: .*run cannot be made \(Not a directory\)"):
        trained({"csv_monitor": {"enabled": True, "output_path": str(tmp_path / "file"), "job_name": "run"}})


def test_a_data_loader_given_as_the_dataset_settles_the_micro_batch() -> None:
    samples = [{"input": torch.ones(2) * number, "target": torch.ones(1)} for number in range(8)]
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "train_micro_batch_size_per_gpu": "auto"}
    config["shoal"] = {"lanes": 2, "max_steps": 1}
    loader: DataLoader[Any] = DataLoader(samples, batch_size=2, shuffle=True)  # type: ignore[arg-type]
    assert shoal.initialize(nn.Linear(2, 1), config, loader).context.config.train_batch_size == 4
    with pytest.raises(UserError, match="batch_size is 2, and micro-batches have 4 samples"):
        shoal.initialize(nn.Linear(2, 1), {**config, "train_micro_batch_size_per_gpu": 4}, loader)
    with pytest.raises(UserError, match="dataset is a DataLoader whose order is that of a SequentialSampler"):
        shoal.initialize(nn.Linear(2, 1), config, DataLoader(samples, batch_size=2))  # type: ignore[arg-type]


def test_watching_a_job_changes_no_bit(tmp_path: Path) -> None:
    watched = {"steps_per_print": 1, "csv_monitor": {"enabled": True, "output_path": str(tmp_path)}}
    assert undisturbed(Task({"max_steps": 2, "precision": watched})) == undisturbed(Task({"max_steps": 2}))


def test_an_unknown_argument_of_initialize_is_one_sentence() -> None:
    with pytest.raises(UserError) as refusal:
        shoal.initialize(nn.Linear(1, 1), SMALLEST, [], model_parameters=[])
    assert str(refusal.value) == (
        "shoal.initialize has no argument model_parameters; expected model, config, dataset, optimizer, scheduler, "
        "collate_fn."
    )
