"""DeepSpeed's `elasticity`: the batches that it gives, how they become lanes, and what a job takes of them.

tests/elastic_batches.jsonl.gz holds questions to DeepSpeed 0.19.7's `compute_elastic_config` with what it answered, or
the class of its error.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rule import Edit, rule
from shoal.config import agreement, load_config
from shoal.config.load import Beside
from shoal.deepspeed import elasticity
from shoal_protos.elastic_batch import ElasticBatch, as_lanes, elastic_batch, uneven
from shoal_protos.elastic_section import Elasticity
from shoal_protos.errors import UserError

FILE = Path(__file__).resolve().parents[1] / "elastic_batches.jsonl.gz"
RECORDED = [json.loads(line) for line in gzip.decompress(FILE.read_bytes()).splitlines()]
NUMPYS = "UFuncTypeError"
"""What DeepSpeed ends with where there are no micro-batches."""


def answer(case: dict[str, Any]) -> Any:
    return elasticity.compute_elastic_config(case["ds_config"], "0.19.7", case["world_size"], case["return_microbatch"])


def test_every_recorded_question_gets_deepspeeds_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: Counter[str] = Counter()
    for case in RECORDED:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        if case["env_WORLD_SIZE"] is not None:
            monkeypatch.setenv("WORLD_SIZE", case["env_WORLD_SIZE"])
        if "error" in case:
            with pytest.raises(UserError) as refusal:
                answer(case)
            classes = [kind.__name__ for kind in type(refusal.value).__mro__]
            assert case["error"] in (*classes, NUMPYS), (case["name"], classes)
            outcomes["refused"] += 1
            continue
        result = case["result"]
        wanted = (result["final_batch_size"], result["valid_gpus"], result.get("micro_batch_size"))
        assert answer(case) == wanted[: result["n_returned"]], case["name"]
        outcomes["answered"] += 1
    assert outcomes == {"answered": 127, "refused": 42}


def batches() -> list[tuple[Elasticity, ElasticBatch]]:
    """Of the recorded sections those that a job can have."""
    sections = [Elasticity.model_validate(case["ds_config"]["elasticity"]) for case in RECORDED if "result" in case]
    found = [(one, elastic_batch(one, 1)) for one in sections if one.model_parallel_size == 1]
    return [(one, batch) for one, batch in found if batch.counts]


@pytest.mark.parametrize("shards_gradients", [False, True])
def test_the_lanes_of_a_batch_are_even_for_every_number_of_workers_that_divides_it(shards_gradients: bool) -> None:
    for section, found in batches():
        lanes = as_lanes(found, section.micro_batch_sizes, shards_gradients)
        assert lanes.lanes * lanes.micro_batch * lanes.micro_batches_per_lane == found.batch
        assert lanes.micro_batch in section.micro_batch_sizes and lanes.lanes >= max(found.counts)
        each = as_lanes(found, section.micro_batch_sizes, shards_gradients=False)
        worst = max(uneven(each.lanes, count) for count in found.counts)
        assert all(lanes.uneven(count) <= max(1 / 16, worst) for count in found.counts)
        assert lanes.lanes <= each.lanes and lanes.micro_batch == each.micro_batch


SECTION: dict[str, Any] = {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]}


def loaded(shoal: dict[str, Any] | None = None, stage: int = 0, **section: Any) -> Any:
    config = {"elasticity": {**SECTION, **section}, "zero_optimization": {"stage": stage}}
    return load_config(config, Beside({"max_steps": 3, **(shoal or {})}))


@pytest.mark.parametrize(
    ("section", "stage", "sizes"),
    [
        ({"version": 0.1}, 0, (1680, 2, 840, 1)),
        ({"version": "0.1", "max_gpus": 16}, 1, (1680, 6, 280, 1)),
        ({"version": 0.1, "max_gpus": 4}, 3, (1680, 6, 20, 14)),
        ({"max_train_batch_size": 64.0, "micro_batch_sizes": [2.0], "max_gpus": 4}, 2, (48, 2, 12, 2)),
    ],
)
def test_a_job_trains_by_the_batch_of_its_section(section: Any, stage: int, sizes: tuple[int, ...]) -> None:
    found = loaded(stage=stage, **section)
    assert (found.train_batch_size, found.micro_batch_size, found.lanes, found.micro_batches_per_lane) == sizes


@rule("A batch that `elasticity` makes for a number of workers is made for that at the submission, on which all agree",
      "Data, evaluations and the doors", broken_by=[
          Edit("shoal.config.training", "        **elastic,\n", ""),
          Edit("shoal.config.training", "        return int(given)", "        return 1"),
      ])  # fmt: skip
def test_version_0_2_makes_the_batch_for_the_workers_at_submission_and_all_must_agree_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SHOAL_WANTED_WORKERS", "SHOAL_CONTROLLER"):
        monkeypatch.delenv(name, raising=False)
    alone = loaded()
    assert (alone.elastic_workers, agreement(alone)["elasticity workers"]) == (1, "1")
    assert "elasticity workers" not in agreement(loaded(version=0.1))
    monkeypatch.setenv("SHOAL_CONTROLLER", "host:7071")
    with pytest.raises(UserError, match=r"SHOAL_WANTED_WORKERS is not set; set it to the job's `workers\.wanted`"):
        loaded()
    monkeypatch.setenv("SHOAL_WANTED_WORKERS", "11")
    eleven = loaded()
    assert (eleven.train_batch_size, eleven.lanes, agreement(eleven)["elasticity workers"]) == (1980, 330, "11")
    monkeypatch.setenv("SHOAL_WANTED_WORKERS", "many")
    with pytest.raises(UserError, match="SHOAL_WANTED_WORKERS is many; set it"):
        loaded()


@pytest.mark.parametrize("version", [0.1, 0.2])
def test_a_job_that_was_submitted_with_too_many_workers_for_its_section_is_refused(
    version: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_WANTED_WORKERS", "17")
    with pytest.raises(UserError, match=r"submitted with 17 workers, and `elasticity\.min_gpus` is 1, .*max_gpus` 16;"):
        loaded(version=version, max_gpus=16)
    between = loaded(version=version, min_gpus=2, max_gpus=17)
    assert between.lanes >= 17 and (between.min_workers, between.max_workers) == (2, 17)


@pytest.mark.parametrize("version", [0.1, 0.2])
def test_a_batch_is_made_for_cells_where_a_cell_has_several_processes(
    version: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They train different samples; bounds are of processes as everywhere."""
    monkeypatch.setenv("SHOAL_WANTED_WORKERS", "11")
    single = loaded(version=version, max_gpus=16, num_gpus_per_node=2)
    monkeypatch.setenv("SHOAL_WANTED_WORKERS", "22")
    sizes = {"max_gpus": 32, "num_gpus_per_node": 4, "model_parallel_size": 2}
    pairs = loaded({"cell": {"tensor": 2}}, version=version, **sizes)
    assert (pairs.lanes, pairs.train_batch_size) == (single.lanes, single.train_batch_size)
    assert (pairs.min_workers, pairs.max_workers) == (2, 32)


def test_lanes_that_a_script_gives_must_be_those_of_its_section() -> None:
    assert loaded({"lanes": 840}, version=0.1) == loaded(version=0.1)
    with pytest.raises(UserError, match=r"`shoal\.lanes` is 8, and `elasticity` makes it 840; leave it out"):
        loaded({"lanes": 8}, version=0.1)


def test_batch_keys_beside_the_section_are_left_alone_where_it_says_so() -> None:
    ignoring = {**SECTION, "version": 0.1, "ignore_non_elastic_batch_info": True}
    beside = {"train_batch_size": 7, "gradient_accumulation_steps": 3, "elasticity": ignoring}
    assert load_config(beside, Beside({"max_steps": 3})) == loaded(version=0.1)


def test_what_the_batch_has_become_is_a_line_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    loaded(version=0.1, max_gpus=4)
    [line] = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (line["event"], line["train_batch_size"], line["even_workers"]) == ("elastic_batch", 1680, [1, 2, 3, 4])
