"""`shoal estimate` from outside: a table or JSON of a right question, one sentence for a wrong one."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from shoal_controller.cli.estimate_config import refused_by_training
from shoal_controller.cli.main import app
from tiers import check
from typer.testing import CliRunner

pytestmark = check("starts commands")

GB = 10**9


def ran(*arguments: str) -> tuple[int, str, str]:
    """Exit status, output and errors of `shoal estimate`."""
    done = CliRunner().invoke(app, ["estimate", *arguments])
    return done.exit_code, done.stdout, done.stderr


def stages(*arguments: str) -> dict[int, dict[str, Any]]:
    """The JSON answer by stage."""
    status, output, errors = ran(*arguments, "--output", "json")
    assert (status, errors) == (0, "")
    return {one["stage"]: one for one in json.loads(output)["stages"]}


def test_without_a_stage_all_are_shown() -> None:
    found = stages("--params", "7e9", "--workers", "8")
    assert {stage: one["at_rest"]["device"] for stage, one in found.items()} == {
        0: 112 * GB, 1: 70 * GB, 2: 42 * GB, 3: 21 * GB,
    }  # fmt: skip
    assert [one["built"] for one in found.values()] == [True, True, True, True]


def test_the_table_has_a_row_for_each_stage_and_says_what_comes_on_top() -> None:
    status, output, errors = ran("--params", "7e9", "--workers", "8")
    assert (status, errors) == (0, "")
    heading, columns, *rows = output.splitlines()
    assert heading == "Bytes of a worker: 7,000,000,000 parameters in fp32, 8 workers, 8 lanes, 1 mirror"
    assert columns.split()[:3] == ["stage", "parameters", "gradients"]
    assert [row.split()[0] for row in rows[:4]] == ["0", "1", "2", "3"]
    assert rows[1].split() == ["1", "28.0", "GB", "28.0", "GB", "–", "14.0", "GB", "–", "67.1", "MB"]
    assert rows[-3:] == [
        "Activations, and what PyTorch needs itself, come on top.",
        "Largest unit: 218,750,000 parameters.",
        "A parameter above 8 MiB adds twice what it has above that in a step (--largest-parameter).",
    ]


def test_a_cell_divides_the_parameters_and_its_fused_sum_is_said() -> None:
    asked = ("--params", "8e9", "--workers", "8", "--tensor", "2", "--common", "1e6", "--stage", "1")
    (one,) = stages(*asked).values()
    sizes = {"tensor": 2, "context": 1, "expert": 1, "pipeline": 1}
    moved = {"partial_sum_bytes": 4_000_000, "contributed_bytes": 0, "handed_bytes": 2_000_000}
    assert one["cell"] == sizes | moved and one["built"]
    (whole,) = stages("--params", "4000500000", "--workers", "4", "--stage", "1").values()
    assert whole["cell"] is None and one["items"][0] == whole["items"][0]
    _, output, _ = ran(*asked)
    assert "4,000,500,000 parameters in fp32, 4 cells of 2 workers (tensor 2), 4 lanes" in output
    assert "but for 1,000,000 that are common (--common)." in output and "at most 4.0 MB of them" in output
    for wrong, sentence in (
        ({"--workers": "1"}, "--workers is 1; expected at least 2, the processes of a cell (--tensor 2)."),
        ({"--mirrors": "4"}, "--mirrors is 4; expected 0 to 3, the number of other cells: "),
        ({"--common": "9e9"}, "--common is 9000000000; expected at most 8000000000, the parameters of the model"),
        ({"--tensor": "0"}, "--tensor is 0; expected a whole number from 1 to 1024."),
    ):
        given = dict(zip(asked[::2], asked[1::2], strict=True)) | wrong
        status, _, errors = ran(*(word for pair in given.items() for word in pair))
        assert status == 2 and sentence in " ".join(errors.split())


def test_the_shape_of_a_config_is_taken_and_counts_are_those_of_whole_cells(tmp_path: Path) -> None:
    file = tmp_path / "shoal.json"
    file.write_text('{"tensor_parallel": {"autotp_size": 2}, "shoal": {"lanes": 4}}')
    status, output, _ = ran("--config", str(file), "--output", "json")
    assert status == 0 and [row["workers"] for row in json.loads(output)["counts"]] == [2, 4, 8]
    status, output, _ = ran("--config", str(file), "--params", "1e6", "--workers", "4", "--output", "json")
    assert json.loads(output)["stages"][0]["cell"]["tensor"] == 2
    elastic = {"enabled": True, "max_train_batch_size": 16, "micro_batch_sizes": [2], "min_gpus": 2, "max_gpus": 8}
    file.write_text(json.dumps({"elasticity": {**elastic, "version": "0.1"}, "shoal": {"cell": {"tensor": 2}}}))
    status, output, _ = ran("--config", str(file))
    assert status == 0 and "A job has from 2 to 8 workers" in output and "      6           2" in output


def totals(*arguments: str) -> list[list[str]]:
    """The lines of the table with and without mirrors, in cells."""
    status, output, errors = ran(*arguments)
    assert (status, errors) == (0, "")
    table = output.split("\n\n")[1].partition("Activations")[0]
    return [re.split(r" {2,}", line.strip()) for line in table.splitlines()]


@pytest.mark.parametrize(
    ("mirrors", "columns", "at_rest"),
    [
        ([], ["without mirrors", "1 mirror"], ["10.5 GB", "21.0 GB", "10.5 GB"]),
        (["--mirrors", "1"], ["without mirrors", "1 mirror"], ["10.5 GB", "21.0 GB", "10.5 GB"]),
        (["--mirrors", "2"], ["without mirrors", "2 mirrors"], ["10.5 GB", "31.5 GB", "21.0 GB"]),
        (["--mirrors", "0"], ["without mirrors", "1 mirror"], ["10.5 GB", "21.0 GB", "10.5 GB"]),
    ],
)
def test_the_price_of_a_copy_is_shown_whatever_is_asked(
    mirrors: list[str], columns: list[str], at_rest: list[str]
) -> None:
    heading, first, *_ = totals("--params", "7e9", "--workers", "8", "--stage", "3", *mirrors)
    assert heading == ["stage", *columns, "for copies"]
    assert first == ["3", "at rest", *at_rest]


def test_a_worker_alone_is_told_of_no_copy() -> None:
    assert totals("--params", "7e9", "--workers", "1", "--stage", "3")[:2] == [
        ["stage", "without mirrors"],
        ["3", "at rest", "84.0 GB"],
    ]
    [one] = stages("--params", "7e9", "--workers", "1", "--stage", "3").values()
    assert [each["mirrors"] for each in one["by_mirrors"]] == [0]


def test_what_is_on_the_host_and_in_files_is_told_by_mirrors_too() -> None:
    asked = ("--params", "7e9", "--workers", "8", "--stage", "1", "--offload", "file")
    assert [line[-4:] for line in totals(*asked)[3:]] == [
        ["on the host", "25.2 MB", "25.2 MB", "–"],
        ["in files", "7.0 GB", "14.0 GB", "7.0 GB"],
    ]


@pytest.mark.parametrize("mirrors", [[], ["--mirrors", "0"], ["--mirrors", "3"]])
def test_json_has_the_sums_without_mirrors_and_with_them(mirrors: list[str]) -> None:
    asked = ("--params", "7e9", "--workers", "8")
    counts = [0, int(mirrors[1]) or 1] if mirrors else [0, 1]
    for stage, one in stages(*asked, *mirrors).items():
        alone = [stages(*asked, "--mirrors", str(count))[stage] for count in counts]
        wanted = [
            {"mirrors": count, "at_rest": each["at_rest"], "at_most": each["at_most"]}
            for count, each in zip(counts, alone, strict=True)
        ]
        assert one["by_mirrors"] == wanted


@pytest.mark.parametrize("offload", ["none", "host", "file"])
def test_the_tables_fit_a_terminal_of_80_columns(offload: str) -> None:
    asked = ("--params", "999e12", "--workers", "1000", "--mirrors", "100", "--lanes", "8000", "--precision", "bf16")
    _, output, _ = ran(*asked, "--offload", offload, "--frozen", "1e12", "--spares", "1")
    _, *lines = output.splitlines()
    tables = lines[: next(at for at, line in enumerate(lines) if line.startswith("Activations"))]
    assert max(len(line.rstrip()) for line in tables) <= 80


def test_of_spares_it_says_what_one_holds_and_what_is_filled_after_a_loss() -> None:
    asked = ("--params", "1e9", "--workers", "4", "--lanes", "8")
    alone, beside = stages(*asked, "--mirrors", "0"), stages(*asked, "--spares", "2")
    for stage, one in beside.items():
        assert one["at_rest"] == alone[stage]["at_rest"], "first mirrors are with spares, and cost workers nothing"
    held = {stage: one["spare"]["at_rest"]["device"] for stage, one in beside.items()}
    assert held == {0: 20 * GB, 1: 16 * GB, 2: 8 * GB, 3: 6 * GB}
    assert {stage: one["spare"]["filled_bytes"] for stage, one in beside.items()} == {
        0: 0,
        1: 2 * GB,
        2: 2 * GB,
        3: 3 * GB,
    }
    assert stages(*asked, "--spares", "1", "--mirrors", "2")[1]["at_rest"] == stages(*asked)[1]["at_rest"]
    _, output, _ = ran(*asked, "--spares", "2")
    assert output.splitlines()[0].endswith("4 workers and 2 spares, 8 lanes, 1 mirror")
    assert "When a worker is lost, a spare trains in its place at once" in output
    assert ran("--params", "1e9", "--workers", "4", "--spares", "2")[1].splitlines()[0].endswith("6 lanes, 1 mirror")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--mirrors", "0"], "--spares is 2; expected 0 without mirrors (--mirrors 0), as they would hold nothing."),
        (
            ["--lanes", "5"],
            "--spares is 2 beside 4 workers, and at most 5 of them can train, a lane each; expected at most 1 spare, "
            "or more --lanes.",
        ),
        (
            ["--tensor", "2"],
            "--spares is 2; expected 0 where a cell has 2 processes (--tensor 2): there the workers that make no whole "
            "cell (--workers) are spares.",
        ),
        (["--spares", "-1"], "--spares is -1; expected a whole number from 0 to 10^15."),
    ],
)
def test_spares_that_cannot_be_get_one_sentence(flags: list[str], sentence: str) -> None:
    given = {"--params": "1e9", "--workers": "4", "--spares": "2"} | dict([flags])
    assert ran(*(part for pair in given.items() for part in pair)) == (2, "", f"shoal: {sentence}\n")


def test_a_parameter_that_is_larger_than_a_bucket_can_be_said() -> None:
    asked = ("--params", "7e9", "--workers", "8")
    small, large = stages(*asked), stages(*asked, "--largest-parameter", "131072000")
    more = [large[stage]["at_most"]["device"] - small[stage]["at_most"]["device"] for stage in range(4)]
    assert more == [0, 0, *[2 * (4 * 131_072_000 - (16 << 20))] * 2]
    _, output, _ = ran(*asked, "--largest-parameter", "131072000")
    assert output.splitlines()[-1] == "Largest unit: 218,750,000 parameters."


def test_what_is_not_supported_yet_has_an_asterisk(tmp_path: Path) -> None:
    file = config(tmp_path, {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
    _, output, _ = ran("--params", "7e9", "--workers", "8", "--config", file)
    *_, last = output.splitlines()
    assert last == "* Not supported yet: what its design needs."
    assert [row.split()[0] for row in output.splitlines()[2:3]] == ["3*"]


@pytest.mark.parametrize("state", [{"device": "cpu"}, {"device": "nvme", "nvme_path": "/disk"}])
def test_parameters_on_the_host_are_supported_with_their_state(state: dict[str, str], tmp_path: Path) -> None:
    there = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": state}
    _, output, _ = ran("--params", "7e9", "--workers", "8", "--config", config(tmp_path, {"zero_optimization": there}))
    assert [row.split()[0] for row in output.splitlines()[2:3]] == ["3"]


def test_state_in_files_is_supported_and_counted_by_place() -> None:
    file = stages("--params", "7e9", "--workers", "8", "--offload", "file")[1]
    assert file["built"] and file["at_rest"] == {"device": 56 * GB, "host": 24 << 20, "file": 14 * GB}


def config(folder: Path, document: Any) -> str:
    file = folder / "ds_config.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(file)


def test_a_config_decides_what_no_flag_does(tmp_path: Path) -> None:
    file = config(
        tmp_path,
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": True},
            "optimizer": {"type": "SGD", "params": {"momentum": 0.9}},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "shoal": {"mirrors": 3},
        },
    )
    [(stage, one)] = stages("--params", "1e9", "--workers", "8", "--config", file).items()
    assert (stage, one["at_rest"]["device"], one["at_rest"]["host"]) == (2, 2 * GB, 4 * GB)
    assert [item["bytes"] for item in one["items"] if item["name"] == "lane sums"] == [4 * GB // 8]
    flags = ["--precision", "fp32", "--stage", "1", "--offload", "none", "--mirrors", "0", "--lanes", "8"]
    [(stage, one)] = stages("--params", "1e9", "--workers", "8", "--config", file, *flags).items()
    assert (stage, one["at_rest"]["device"], one["at_rest"]["host"]) == (1, 8 * GB + GB // 2, 0)


@pytest.mark.parametrize("key", ["gradient_accumulation_steps", "micro_batches_per_lane"])
def test_several_micro_batches_a_lane_are_read_from_the_config(key: str, tmp_path: Path) -> None:
    document: dict[str, Any] = {"zero_optimization": {"stage": 2}, "shoal": {}}
    (document["shoal"] if key == "micro_batches_per_lane" else document)[key] = 4
    asked = ("--params", "1e9", "--workers", "8", "--config", config(tmp_path, document))
    several, one = stages(*asked)[2], stages(*asked, "--micro-batches", "1")[2]
    assert several["at_most"]["device"] - one["at_most"]["device"] == 4 * GB
    assert several["at_rest"] == one["at_rest"]
    _, output, _ = ran(*asked)
    assert output.splitlines()[0].endswith("8 workers, 8 lanes of 4 micro-batches, 1 mirror")


def test_a_config_is_read_as_training_reads_it(tmp_path: Path) -> None:
    file = config(tmp_path, "{\n  # of the small machine\n  zero_optimization: {stage: 2.0}, shoal: {lanes: 8.0}\n}")
    assert stages("--params", "1e9", "--workers", "8", "--config", file).keys() == {2}


def test_without_params_a_config_says_for_how_many_workers_its_lanes_are(tmp_path: Path) -> None:
    sizes = {"train_batch_size": 48, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    status, output, errors = ran("--config", config(tmp_path, sizes), "--workers", "4", "--output", "json")
    assert (status, errors) == (0, "")
    found = {
        one["workers"]: (one["lanes"], one["micro_batches"], one["uneven"]) for one in json.loads(output)["counts"]
    }
    assert found == {1: (6, 12, 0), 2: (3, 6, 0), 3: (2, 4, 0), 4: (2, 4, pytest.approx(1 / 3)), 6: (1, 2, 0)}


def test_the_counts_of_a_section_elasticity_are_those_that_its_batch_is_made_for(tmp_path: Path) -> None:
    section: dict[str, Any] = {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]}
    file = config(tmp_path, {"elasticity": {**section, "version": 0.1, "max_gpus": 3}})
    heading, _, *rows, bounds, _ = ran("--config", file)[1].splitlines()
    assert heading == "Batch 1680 = 280 lanes × 1 micro-batch × 6 samples"
    assert [row.split() for row in rows] == [
        ["1", "280", "280", "–"],
        ["2", "140", "140", "–"],
        ["3", "94", "94", "0.7%"],
    ]
    assert bounds == "A job has from 1 to 3 workers, unless it is given other bounds."
    _, _, row, _, made_for, _ = ran("--config", config(tmp_path, {"elasticity": section}), "--workers", "11")[
        1
    ].splitlines()
    assert (row.split(), made_for.partition("for ")[2]) == (
        ["11", "30", "30", "–"], "a job submitted with 11 workers (--workers).",
    )  # fmt: skip


def test_old_names_of_keys_are_read_as_training_reads_them(tmp_path: Path) -> None:
    old = {"bfloat16": {"enabled": True}, "zero_optimization": {"stage": 2, "cpu_offload": True}}
    today = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    asked = ("--params", "1e9", "--workers", "8", "--config")
    assert stages(*asked, config(tmp_path, old)) == stages(*asked, config(tmp_path, today))
    assert stages(*asked, config(tmp_path, {"zero_optimization": True})).keys() == {1}


def test_mirrors_of_a_config_are_limited_by_the_workers_as_in_a_job(tmp_path: Path) -> None:
    file = config(tmp_path, {"shoal": {"mirrors": 3, "lanes": 2}})
    assert stages("--params", "100", "--workers", "2", "--config", file)[1]["at_rest"]["device"] == 1600


WRONG = [
    (["--params", "0"], "--params is '0'; expected a whole number from 1 to 10^15, such as 7e9."),
    (["--params", "many"], "--params is 'many'; expected a whole number from 1 to 10^15, such as 7e9."),
    (["--params", "nan"], "--params is 'nan'; expected a whole number from 1 to 10^15, such as 7e9."),
    (["--params", "1.5"], "--params is '1.5'; expected a whole number from 1 to 10^15, such as 7e9."),
    (["--workers", "0"], "--workers is 0; expected a whole number from 1 to 10^15."),
    (
        ["--mirrors", "8"],
        "--mirrors is 8; expected 0 to 7, the number of other workers: a block's mirrors and its owner are different "
        "workers.",
    ),
    (["--stage", "4"], "--stage is 4; expected 0, 1, 2 or 3."),
    (["--precision", "int8"], "--precision is int8; expected fp32, bf16 or fp16."),
    (["--offload", "moon"], "--offload is moon; expected none, host or file."),
    (["--lanes", "0"], "--lanes is 0; expected a whole number from 1 to 65536."),
    (["--lanes", "99999999999"], "--lanes is 99999999999; expected a whole number from 1 to 65536."),
    (["--micro-batches", "0"], "--micro-batches is 0; expected a whole number from 1 to 10^15."),
    (["--state-bytes", "-1"], "--state-bytes is -1; expected a whole number from 0 to 10^15."),
    (["--unit", "none"], "--unit is 'none'; expected a whole number from 1 to 10^15, such as 7e9."),
]


@pytest.mark.parametrize(("arguments", "sentence"), WRONG)
def test_a_wrong_flag_gets_one_sentence(arguments: list[str], sentence: str) -> None:
    given = {"--params": "7e9", "--workers": "8"} | dict([arguments])
    assert ran(*(part for pair in given.items() for part in pair)) == (2, "", f"shoal: {sentence}\n")


WRONG_CONFIGS: list[tuple[Any, str]] = [
    (
        "{",
        "config FILE is neither JSON (Expecting property name enclosed in double quotes, line 1, column 2) nor Hjson "
        "(Bad key name (eof), line 1, column 2).",
    ),
    ("[1]", "config FILE is [1]; expected an object {…}."),
    ({"shoal": {"mirrors": "two"}}, '`shoal.mirrors` is "two"; expected a whole number of at least 0.'),
    ({"shoal": {"lanes": 10**11}}, "`shoal.lanes` is 100000000000; expected a whole number from 1 to 65536."),
    (
        {"train_batch_size": 10**11, "train_micro_batch_size_per_gpu": 1},
        "`train_batch_size` 100000000000 and `train_micro_batch_size_per_gpu` 1 make 100000000000 lanes; at most 65536 "
        "are allowed.",
    ),
    ({"zero_optimization": 3}, "`zero_optimization` is 3; expected an object {…}."),
    ({"zero_optimization": {"stage": 4}}, "`zero_optimization.stage` is 4; expected 0, 1, 2 or 3."),
    ({"bf16": {"enabled": 1}}, "`bf16.enabled` is 1; expected true or false."),
    (
        {"zero_optimization": {"offload_param": {"device": "nvme"}}},
        '`zero_optimization.offload_param.device` is "nvme"; expected none or cpu.',
    ),
    (
        {"optimizer": {"type": "Tiger"}},
        "how much state optimizer Tiger keeps is not known; say with --state-bytes how many bytes it has of one "
        "parameter.",
    ),
]


def test_half_a_question_gets_one_sentence(tmp_path: Path) -> None:
    needed = "shoal: shoal estimate needs --params and --workers; or --config alone, for the counts of workers.\n"
    assert ran("--params", "7e9") == ran("--workers", "8") == (2, "", needed)
    file = config(tmp_path, {"train_batch_size": 8})
    assert ran("--config", file)[2].startswith("shoal: the config does not say how many lanes there are; it needs ")
    wrong = config(tmp_path, {"elasticity": {"enabled": True, "micro_batch_sizes": [0]}})
    status, _, errors = ran("--config", wrong)
    assert (status, errors.count("  - `elasticity.")) == (2, 2)


@pytest.mark.parametrize(("document", "sentence"), WRONG_CONFIGS)
def test_a_wrong_config_gets_one_sentence_naming_the_key(document: Any, sentence: str, tmp_path: Path) -> None:
    file = config(tmp_path, document)
    status, output, errors = ran("--params", "7e9", "--workers", "8", "--config", file)
    assert (status, output, errors.replace(file, "FILE")) == (2, "", f"shoal: {sentence}\n")


REFUSED: list[tuple[Any, str]] = [
    (
        {"zero_optimization": {"stage": 2, "stge": 3}, "sparse_gradients": True},
        "the config has 2 faults:\n"
        "  - `zero_optimization.stge` is an unknown key (given: 3); did you mean `zero_optimization.stage`? Allowed in "
        "`zero_optimization` are offload_optimizer, offload_param, stage.\n"
        "  - `sparse_gradients` is not supported (given: true): a bucket's gradient travels with all of its elements.",
    ),
    (
        {"train_batch_size": 10, "shoal": {"lanes": 3}},
        "`train_batch_size` 10 does not divide into micro-batches: shoal.lanes 3 × shoal.micro_batches_per_lane 1 is "
        "3, and 10 / 3 is not whole.",
    ),
]


@pytest.mark.parametrize(("document", "sentence"), REFUSED)
def test_what_training_refuses_of_a_config_is_said_in_its_words_beside_the_answer(
    document: Any, sentence: str, tmp_path: Path
) -> None:
    file = config(tmp_path, document)
    status, output, errors = ran("--params", "7e9", "--workers", "8", "--config", file)
    assert (status, errors) == (0, f"shoal: training refuses config {file}: {sentence}\n")
    assert output.startswith("Bytes of a worker: ")


def test_a_config_that_can_be_read_once_only_is_checked_too(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=['{"gradient_cliping": 3}'])
    writer.start()
    status, _, errors = ran("--params", "7e9", "--workers", "8", "--config", str(pipe))
    writer.join()
    assert status == 0 and errors.startswith(f"shoal: training refuses config {pipe}: `gradient_cliping` is an unknown")


def test_a_config_that_a_script_completes_is_refused_for_nothing(tmp_path: Path) -> None:
    open_ended = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"), "auto")
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}}
    assert refused_by_training({}, tmp_path) == ""
    assert refused_by_training(open_ended | adam, tmp_path) == ""


def test_a_config_whose_check_cannot_run_is_not_called_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    monkeypatch.setattr("sys.executable", "/not/there/python")
    assert refused_by_training({}, file).startswith(
        f"whether training takes config {file} is not known: [Errno 2] No such"
    )


def test_a_config_that_is_not_there_gets_one_sentence(tmp_path: Path) -> None:
    status, _, errors = ran("--params", "7e9", "--workers", "8", "--config", str(tmp_path / "none.json"))
    assert (status, errors) == (
        2,
        f"shoal: config {tmp_path / 'none.json'} cannot be read: No such file or directory.\n",
    )


def test_an_unknown_optimizer_is_fine_where_its_state_is_given(tmp_path: Path) -> None:
    file = config(tmp_path, {"optimizer": {"type": "Tiger"}})
    found = stages("--params", "100", "--workers", "1", "--config", file, "--state-bytes", "4")
    assert found[0]["at_rest"]["device"] == 1200
