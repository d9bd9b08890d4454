"""The configuration: what comes of a right one, and the one sentence that a wrong one gets.

Wrong ones are files in tests/attacks/config: the config's text, a line `---`, the sentence.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shoal.config import TrainingConfig, agreement, load_config
from shoal.config.load import shape_of
from shoal.config.training import Sizes, settle
from shoal.optim.config_sections import build_optimizer, build_scheduler
from shoal_protos.errors import UserError
from shoal_protos.shape import ONE, Shape

from docs.generate.configuration import page

ROOT = Path(__file__).parents[2]
ATTACKS = sorted((ROOT / "tests" / "attacks" / "config").glob("*.txt"))
SMALLEST: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "shoal": {"max_steps": 10},
}


def built(config: TrainingConfig) -> None:
    """The optimizer and scheduler sections are checked where they are built."""
    model = torch.nn.Linear(2, 2)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if config.optimizer:
        optimizer = build_optimizer(config.optimizer, model)
    if config.scheduler:
        build_scheduler(config.scheduler, optimizer, last_step=10)


def sentence(text: str, file: Path) -> str:
    """What a config of this text is refused with; the file's folder left out."""
    file.write_text(text)
    with pytest.raises(UserError) as refusal:
        built(load_config(file))
    return str(refusal.value).replace(str(file), file.name)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.stem)
def test_a_wrong_config_gets_its_sentence(attack: Path, tmp_path: Path) -> None:
    text, _, expected = attack.read_text().rpartition("---\n")
    assert sentence(text, tmp_path / "shoal.json") == expected.rstrip("\n")


@pytest.mark.parametrize("config", [
    {"shoal": {"cell": {"tensor": 2.0, "tight": ["tensor"]}}},
    {"shoal": {"cell": {"tight": ["tensor"]}}, "tensor_parallel": {"autotp_size": 2, "tp_overlap_comm": True}},
    {"shoal": {"cell": {"tensor": 2, "tight": ["tensor"]}}, "tensor_parallel": {"autotp_size": 2},
     "pipeline": {"stages": 1, "seed_layers": True}, "sequence_parallel_size": 1,
     "expert_parallel": {"enabled": False, "autoep_size": 4}},
])  # fmt: skip
def test_the_shape_of_a_cell_is_known_before_the_rest_is_read(config: dict[str, Any]) -> None:
    assert shape_of({**config, "train_batch_size": "none yet"}) == Shape(tensor=2, tight=("tensor",))
    rest = {"train_batch_size": 8, "shoal": {**config["shoal"], "max_steps": 3}}
    assert load_config({**config, **rest}).cell == Shape(tensor=2, tight=("tensor",))


def test_a_shape_that_cannot_be_is_refused_before_the_rest_is_read() -> None:
    assert shape_of(SMALLEST) == ONE
    with pytest.raises(UserError, match=r"did you mean `shoal\.cell\.tensor`\?"):
        shape_of({"shoal": {"cell": {"tensr": 2}}})
    with pytest.raises(UserError, match=r"`shoal\.cell` is no shape: it has 2048 processes"):
        shape_of({"shoal": {"cell": {"tensor": 1024, "expert": 2}}})
    with pytest.raises(UserError, match=r"`shoal\.cell` is 2; expected"):
        shape_of({"shoal": {"cell": 2}})


def test_a_dict_that_json_cannot_hold_gets_a_sentence() -> None:
    with pytest.raises(UserError, match="the config is not JSON: Object of type dtype is not JSON serializable"):
        load_config({"bf16": torch.bfloat16})


def test_a_config_that_is_no_path_and_no_dict_gets_a_sentence() -> None:
    with pytest.raises(UserError, match=r"^the config is a list; expected a path or a dict\.$"):
        load_config([SMALLEST])  # type: ignore[arg-type]


def test_a_config_that_cannot_be_read_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.json cannot be read: No such file or directory"):
        load_config(tmp_path / "nowhere.json")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        load_config(str(tmp_path))
    with pytest.raises(UserError, match=r'^config "a\\u0000b" is not a name that a file can have\.$'):
        load_config("a\0b")
    (tmp_path / "latin.json").write_bytes(b'{"\xe9": 1}')
    with pytest.raises(UserError, match=r"latin\.json is not text in UTF-8"):
        load_config(tmp_path / "latin.json")
    (tmp_path / "large.json").write_bytes(b" " * (1 << 20) + b"{}")
    with pytest.raises(UserError, match=r"large\.json is larger than 1048576 bytes"):
        load_config(tmp_path / "large.json")
    with pytest.raises(UserError, match=r"config /dev/zero is larger than 1048576 bytes"):
        load_config("/dev/zero")


def test_a_config_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "shoal.json").write_text(json.dumps(SMALLEST), encoding="utf-8-sig")
    assert load_config(tmp_path / "shoal.json") == load_config(SMALLEST)


def test_a_file_and_its_dict_are_the_same_config(tmp_path: Path) -> None:
    (tmp_path / "shoal.json").write_text(json.dumps(SMALLEST))
    assert load_config(tmp_path / "shoal.json") == load_config(str(tmp_path / "shoal.json")) == load_config(SMALLEST)


def test_the_smallest_config_has_the_documented_defaults() -> None:
    config = load_config(SMALLEST)
    assert (config.lanes, config.micro_batch_size, config.micro_batches_per_lane) == (8, 4, 1)
    assert config.train_batch_size == 32
    assert (config.mirrors, config.seed, config.max_steps, config.epochs, config.torch_threads) == (1, 0, 10, None, 1)
    assert (config.stage, config.gradient_clipping, config.fill_bytes_per_step) == (0, 0.0, 0)
    assert (config.elementwise, config.mixed_numerics, config.exact) == (False, False, True)
    assert (config.optimizer, config.scheduler) == (None, None)
    assert (config.checkpoint.keep, config.checkpoint.resume, config.checkpoint.path) == (3, "latest", None)


def test_auto_is_settled_from_the_rest() -> None:
    config = load_config(
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 3,
            "gradient_clipping": "auto",
            "fp16": {"enabled": "auto", "loss_scale": 0},
            "bf16": {"enabled": "auto"},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "betas": "auto", "weight_decay": "auto"}},
            "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}, "reduce_bucket_size": "auto"},
            "shoal": {"lanes": 4, "epochs": 2},
        }
    )
    assert config.train_batch_size == 24
    assert (config.micro_batches_per_lane, config.gradient_clipping, config.epochs) == (3, 0.0, 2)


@pytest.mark.parametrize(
    ("section", "folder"),
    [
        (None, None),
        ({"nvme_path": "/disk"}, None),
        ({"device": None, "nvme_path": "/disk"}, None),
        ({"device": "cpu", "nvme_path": "/disk"}, None),
        ({"device": "nvme", "nvme_path": "/disk", "buffer_count": 4, "pipeline_read": True, "ratio": 0.3}, "/disk"),
    ],
)
def test_optimizer_state_lies_in_files_where_deepspeeds_keys_say_so(section: object, folder: str | None) -> None:
    assert load_config({**SMALLEST, "zero_optimization": {"offload_optimizer": section}}).state_folder == folder


def test_keys_without_meaning_are_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    ignored = {"prescale_gradients": True, "aio": {"queue_depth": 8}, "flops_profiler": {"enabled": True}}
    offload = {"device": "cpu", "pin_memory": True}
    zero = {"stage": 1, "overlap_comm": True, "offload_optimizer": offload, "allgather_bucket_size": 5e8}
    load_config({**SMALLEST, **ignored, "zero_optimization": zero})
    captured = capsys.readouterr()
    known = ("overlap_comm", "offload_optimizer.pin_memory", "allgather_bucket_size")
    keys = [*ignored, *(f"zero_optimization.{name}" for name in known)]
    [line] = captured.err.splitlines()
    assert json.loads(line)["keys"] == keys
    assert captured.out == ""
    load_config(SMALLEST)
    assert capsys.readouterr().err == ""


@given(st.integers(1, 9), st.integers(1, 9), st.none() | st.integers(1, 9))
def test_any_two_batch_sizes_give_the_third(micro: int, lanes: int, accumulated: int | None) -> None:
    batch = micro * lanes * (accumulated or 1)
    whole = Sizes(batch, micro, lanes, accumulated or 1)
    assert settle(Sizes(batch, micro, lanes, accumulated)) == whole
    assert settle(Sizes(None, micro, lanes, accumulated)) == whole
    assert settle(Sizes(batch, None, lanes, accumulated)) == whole
    assert settle(Sizes(batch, micro, None, accumulated)) == whole


@given(*[st.none() | st.integers(1, 60)] * 4)
def test_batch_sizes_agree_or_get_a_sentence(
    batch: int | None, micro: int | None, lanes: int | None, accumulated: int | None
) -> None:
    given_sizes = Sizes(batch, micro, lanes, accumulated)
    try:
        found = settle(given_sizes)
    except UserError:
        return
    assert found.micro_batch_size and found.lanes and found.micro_batches_per_lane
    assert found.train_batch_size == found.micro_batch_size * found.lanes * found.micro_batches_per_lane
    for mine, wanted in zip(
        (found.train_batch_size, found.micro_batch_size, found.lanes, found.micro_batches_per_lane),
        (batch, micro, lanes, accumulated),
        strict=True,
    ):
        assert wanted is None or mine == wanted


def test_variables_in_paths_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS", "/data/runs")
    offload = {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "$RUNS/nvme"}}
    checkpoint = {"path": "$RUNS/a", "resume": "${RUNS}/b$"}
    settled = load_config(
        {**SMALLEST, "zero_optimization": offload, "shoal": {**SMALLEST["shoal"], "checkpoint": checkpoint}}
    )
    assert (settled.checkpoint.path, settled.checkpoint.resume) == ("/data/runs/a", "/data/runs/b$")
    assert settled.state_folder == "/data/runs/nvme"


@pytest.mark.parametrize("key", ["path", "resume"])
def test_a_path_with_a_variable_that_is_not_set_gets_a_sentence(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUNS", raising=False)
    with pytest.raises(UserError) as seen:
        load_config({**SMALLEST, "shoal": {**SMALLEST["shoal"], "checkpoint": {key: "${RUNS}/a"}}})
    expected = (
        f'`shoal.checkpoint.{key}` is "${{RUNS}}/a", and the environment has no RUNS; set it, or write the path out.'
    )
    assert str(seen.value) == expected


def test_workers_agree_on_what_changes_bits_and_on_nothing_else() -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 0.1, "betas": (0.9, 0.99)}}
    one = agreement(load_config({**SMALLEST, "optimizer": optimizer}))
    assert one["optimizer.params.betas"] == "[0.9, 0.99]"
    assert (one["zero_optimization.stage"], one["shoal.lanes"], one["scheduler.type"]) == ("0", "8", "null")
    paced = {
        "max_steps": 10,
        "torch_threads": 2,
        "fill_bytes_per_step": 5,
        "mirror_partners": 7,
        "checkpoint": {"keep": 9},
    }
    assert agreement(load_config({**SMALLEST, "optimizer": optimizer, "shoal": paced})) == one
    other = agreement(load_config({**SMALLEST, "optimizer": optimizer, "shoal": {"max_steps": 10, "seed": 1}}))
    assert {key for key in one if one[key] != other[key]} == {"shoal.seed"}


def test_the_reference_page_is_current() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == page(), (
        "run python -m docs.generate.configuration > docs/configuration.md"
    )


@pytest.mark.parametrize("section", ["", "shoal", "optimizer"])
def test_of_as_many_unknown_keys_as_a_file_may_have_only_the_first_are_looked_at(
    section: str, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = {f"key{number}": number for number in range(20_000)}
    given: dict[str, Any] = {**SMALLEST, "optimizer": {"type": "SGD"}}
    began = time.process_time()
    whole = {**given, section: {**given[section], **unknown}} if section else {**given, **unknown}
    if section != "shoal":
        load_config(whole)
        [line] = map(json.loads, capsys.readouterr().err.splitlines())
        assert (len(line["keys"]), line["more"]) == (20, 19_980)
    else:
        with pytest.raises(UserError) as refusal:
            load_config(whole)
        first, *_, last = str(refusal.value).splitlines()
        assert (first, last) == ("the config has 20000 faults:", "  - … and 19980 more")
    assert time.process_time() - began < 10
