"""What cannot work gets one sentence that says what differs, and the job it was meant for is unharmed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from integration import scripts
from integration.cluster import TRAIN, Cluster, alone
from rule import Edit, rule
from shoal.exchange.world import PEER_FORM
from shoal.session import dialogue
from shoal.training import start
from shoal_protos.messages import PROTOCOL_VERSION, WRONG_USE
from shoal_protos.release import RELEASE
from shoal_protos.text import of_shoal
from tiers import promise

LONG: dict[str, Any] = {"max_steps": 30}
PACE = 0.03

STRANGERS: list[tuple[dict[str, Any], str]] = [
    ({"double": True}, "buffer norm.running_mean is torch.float64 (256,), the job's is torch.float32 (256,)"),
    ({"buffers": False}, "buffer norm.num_batches_tracked is not set, the job's is torch.int64 ()"),
    ({"optimizer": {"name": "Adam"}}, "optimizer is Adam, the job's is AdamW"),
    ({"scheduler": "StepLR"}, "scheduler is StepLR, the job's is CosineAnnealingLR"),
    ({"gradient_clipping": 0.5}, "gradient_clipping is 0.5, the job's is 1.0"),
    ({"lanes": 4}, "shoal.lanes is 4, the job's is 8"),
    ({"shoal": {"seed": 12}}, "shoal.seed is 12, the job's is 11"),
    ({"samples": 90}, "dataset.samples is 90, the job's is 100"),
]


def last_words(log: str) -> str:
    """The sentence that ended a script: its last line, instead of a traceback."""
    line = log.strip().splitlines()[-1]
    assert line.startswith("shoal: ") and "Traceback" not in log, log
    return line


def refused(cluster: Cluster, worker: str) -> str:
    """The sentence with which a worker ended."""
    assert cluster.wait_exit(worker) == WRONG_USE
    return last_words(cluster.log(worker))


@promise("a worker that differs")
def test_a_worker_that_differs_is_told_the_first_difference_and_the_job_is_unharmed() -> None:
    with Cluster(workers=2, options=LONG, pace=PACE) as cluster:
        cluster.wait_step(2)
        for options, words in STRANGERS:
            (worker,) = cluster.add(**options)
            sentence = refused(cluster, worker)
            assert words in sentence
            assert worker in sentence
        report = cluster.wait_undisturbed()
    assert [world["generation"] for world in report["generations"]] == [1]


def of_another_release(differs: str, **options: Any) -> None:
    """The usual script, of a release with another number."""
    if differs == "protocol":
        dialogue.PROTOCOL_VERSION += 1
    else:
        start.PEER_FORM += 1
    scripts.train(**options)


@pytest.mark.parametrize(
    ("differs", "words"),
    [
        ("protocol", f"and speaks protocol {PROTOCOL_VERSION + 1}; this controller is of {of_shoal(RELEASE)}"),
        ("form", f"and exchanges state with others in form {PEER_FORM + 1}; worker w0 on"),
    ],
)
def test_a_worker_of_another_release_ends_with_a_sentence_that_the_job_says_too(differs: str, words: str) -> None:
    with Cluster(workers=1, options=LONG, pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.script = "integration.test_bad_input:of_another_release"
        cluster.add(differs=differs)
        sentence = refused(cluster, "w1")
        assert sentence.count(f"of {of_shoal(RELEASE)}") == 2 and words in sentence
        (message,) = cluster.messages("refused")
        assert re.sub(r" \(scripts\.py:\d+\)$", "", sentence) == f"shoal: {message}"
        cluster.script = TRAIN
        report = cluster.wait_undisturbed()
    assert [world["generation"] for world in report["generations"]] == [1]


@rule(
    "A living member keeps its id, and a second process with that id is refused; no process has two ids",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.admission",
        "    return turn.take_id() if gone and (process is None or process.connection is None) else None\n",
        "    return hello.worker\n",
    ),
)
def test_a_second_process_with_the_id_of_a_living_worker_is_refused() -> None:
    with Cluster(workers=2, options=LONG, pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.pids["w1 (the first)"] = cluster.pids["w1"]
        cluster.start("w1")
        assert "worker w1 is in job job already" in refused(cluster, "w1")
        report = cluster.wait_undisturbed()
    assert [world["generation"] for world in report["generations"]] == [1]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"samples": 15}, "the dataset has 15 samples, one step takes 16"),
        ({"optimizer": {"name": "SparseAdam"}}, "SparseAdam"),
        ({"shoal": {"mirrorrs": 1}}, "mirrorrs"),
    ],
    ids=["samples", "SparseAdam", "unknown key"],
)
def test_what_no_job_can_do_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(AssertionError, match="the undisturbed run failed") as failure:
        alone({**LONG, **options})
    assert sentence in last_words(str(failure.value))


def test_more_workers_than_lanes_are_refused() -> None:
    with Cluster(workers=0, options={**LONG, "lanes": 2}, spec={"workers": {"wanted": 3}}) as cluster:
        cluster.add()
        assert "asks for 3 workers, but its config has 2 lanes" in refused(cluster, "w0")


@promise("an export")
def test_a_model_that_cannot_be_exported_at_the_end_fails_the_job_at_once_though_other_workers_are_done(
    tmp_path: Path,
) -> None:
    with Cluster(workers=2, options={"max_steps": 5, "export": str(tmp_path)}) as cluster:
        cluster.wait_phase("failed")
        job, report = cluster.job(), cluster.report()
    assert "cannot export the model to" in job["reason"] and "Choose a place that can be written" in job["reason"]
    assert job["step"] == 5 and [world["generation"] for world in report["generations"]] == [1]


def twice(result: str) -> None:
    """A script that gives its model to two engines."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"train_batch_size": 2, "shoal": {"lanes": 2, "max_steps": 3}}
    for _ in range(2):
        shoal.initialize(model=model, config=config, dataset=list(range(8)), optimizer=optimizer)


def test_what_a_script_is_refused_after_its_engine_was_made_is_what_the_job_says_of_it() -> None:
    with Cluster(workers=1, script="integration.test_bad_input:twice") as cluster:
        second = "this is the second shoal.initialize of this script"
        assert second in refused(cluster, "w0")
        cluster.wait_phase("failed")
        assert (
            f"in every worker before its first step, so it would fail again; worker w0: {second}"
            in cluster.job()["reason"]
        )
