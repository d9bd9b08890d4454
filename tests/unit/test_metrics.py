"""The figures: their names and labels, all of them there from a job's start and gone with it."""

import asyncio
import re
import threading
from collections import Counter
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
from asynchronous import asynchronous
from machine_driver import training
from prometheus_client.parser import text_string_to_metric_families
from shoal_controller import core as core_package
from shoal_controller.core.machine.figures import COUNTERS, HISTOGRAMS, MOST_BUCKETS, Figures, Observed, series_of
from shoal_controller.core.machine.job import new_job
from shoal_controller.core.machine.pending import PendingReason
from shoal_controller.core.machine.spec import JobSpec, JobView, Phase, State, WorkerView
from shoal_controller.observe import metrics as metrics_module
from shoal_controller.observe.metrics import MEMORY_KINDS, Metrics, Sources
from shoal_protos.gpu import Gpu, Throttle
from shoal_protos.shape import Shape
from small_machine import SmallMachine

FROZEN = Path(__file__).parent / "frozen" / "metrics.txt"


def view(**fields) -> JobView:
    machine = SmallMachine(shown=fields)
    return machine.view(new_job(JobSpec("train", wanted=3, lanes=8), 0.0), 0.0)


def worker(name="w0", **fields) -> WorkerView:
    plain = {
        "host": "h", "pid": 1, "state": State.ACTIVE, "rank": 0, "lanes": (0,), "blocks": 1, "mirrored_blocks": 0,
        "step": 3, "step_seconds": 0.5, "memory_bytes": {"rss": 100, "state": 40}, "log": "",
        "heartbeat_age_seconds": 0.25, "state_file_bytes_per_second": 10**9,
    }  # fmt: skip
    return WorkerView(**{"worker": name, **plain, **fields})


def metrics_of(*views: JobView, leads: bool = True) -> Metrics:
    metrics = Metrics()
    metrics.show(Sources(lambda: views, lambda: int(leads), lambda: {"open": 2}, lambda: {"token": 1}))
    return metrics


def scraped(metrics: Metrics) -> dict[str, float]:
    """Every sample as `name{label=value,…}`."""
    samples = {}
    for family in text_string_to_metric_families(asyncio.run(metrics.scrape()).decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def all_observed() -> Figures:
    figures = Figures(first_commit=4.0).checkpointed(5.0).checkpointed(7.0)
    for name, kind in HISTOGRAMS.items():
        for labels in series_of(kind.labels):
            figures = figures.observed(name, 0.25, labels)
    return figures


def test_the_figures_are_the_frozen_ones_with_their_labels_and_kinds() -> None:
    known = view(
        workers=(worker(gpu=GPU, lane_seconds=0.5),), loss=1.0, last_checkpoint_step=1, max_steps=5, max_workers=4,
        samples=1, last_commit=1.0, figures=all_observed(), step_seconds_median=0.5, reports={"accuracy": 0.5},
        cell=Shape(tensor=2), world=training().view.world,
    )  # fmt: skip
    metrics = metrics_of(known)
    metrics.own.timed("get", 0.1, True)
    metrics.own.requested("GET", "/v1/jobs", "200", 0.1)
    metrics.own.launches("local")
    lines = []
    for family in text_string_to_metric_families(asyncio.run(metrics.scrape()).decode()):
        plain = next(sample for sample in family.samples if not sample.name.endswith("_bucket"))
        name = family.name + "_total" if family.type == "counter" else family.name
        lines.append(f"{name} {family.type} {{{', '.join(sorted(plain.labels))}}}")
    assert "\n".join(sorted(lines)) + "\n" == FROZEN.read_text()


def test_the_core_counts_and_observes_only_what_is_known_here() -> None:
    core = Path(core_package.__file__).parent
    named = {name for file in core.rglob("*.py") for name in re.findall(r'"(shoal_\w+)"', file.read_text())}
    assert named
    assert named <= {*COUNTERS, *HISTOGRAMS}


def test_every_counter_of_a_job_exists_as_zero_from_its_start() -> None:
    samples = scraped(metrics_of(view(samples=0)))
    for name, kind in COUNTERS.items():
        for labels in series_of(kind.labels):
            pairs = sorted({"job_name": "train", **labels}.items())
            assert samples[f"{name}{{{','.join(f'{label}={value}' for label, value in pairs)}}}"] == 0
    assert samples["shoal_job_samples_total{job_name=train}"] == 0
    assert samples["shoal_step_seconds_count{job_name=train}"] == 0


def test_what_a_job_has_counted_is_shown_by_job() -> None:
    figures = Figures()
    for _ in range(3):
        figures = figures.counted("shoal_resizes_total", 1, {"reason": "kill", "outcome": "done"})
    figures = figures.observed("shoal_resize_seconds", 0.25, {"phase": "plan"})
    figures = figures.observed("shoal_resize_seconds", 700.0, {"phase": "plan"}, times=2)
    figures = replace(figures, histograms={**figures.histograms, "shoal_step_seconds": Observed((1,) * 19, 3.0)})
    metrics = metrics_of(view(figures=figures))
    metrics.own.timed("transact", 0.002, False)
    samples = scraped(metrics)
    assert samples["shoal_resizes_total{job_name=train,outcome=done,reason=kill}"] == 3
    assert samples["shoal_resize_seconds_sum{job_name=train,phase=plan}"] == 1400.25
    assert samples["shoal_resize_seconds_count{job_name=train,phase=plan}"] == 3
    assert samples["shoal_resize_seconds_bucket{job_name=train,le=0.3,phase=plan}"] == 1
    assert samples["shoal_resize_seconds_bucket{job_name=train,le=0.03,phase=plan}"] == 0
    assert samples["shoal_resize_seconds_bucket{job_name=train,le=30.0,phase=plan}"] == 1
    assert samples["shoal_resize_seconds_bucket{job_name=train,le=+Inf,phase=plan}"] == 3
    assert samples["shoal_step_seconds_count{job_name=train}"] == 0, "a version with other buckets has counted that"
    assert samples["shoal_store_request_duration_seconds_count{request=transact}"] == 1


LARGEST_WORLD = 1000
MOST_SERIES_OF_A_JOB, MOST_SERIES_OF_A_WORKER = 300, 20
GPU = Gpu("NVIDIA H100 80GB HBM3", 3, 0.75, 60_000, 80_000, 71.0, Throttle.HEAT | Throttle.SLOWDOWN)


def largest_job() -> JobView:
    """Everything that a job can count was counted, in a world of a thousand that claim all sorts of things."""
    memory = {**dict.fromkeys(MEMORY_KINDS, 1), **{f"claim-{number}": number for number in range(60)}}
    workers = tuple(
        worker(
            f"w{number}",
            state=state,
            memory_bytes=memory,
            heartbeat_age_seconds=1.0,
            waited_for_seconds=2.0,
            gpu=GPU,
            lane_seconds=0.5,
        )
        for number, state in zip(range(LARGEST_WORLD), cycle(State), strict=False)
    )
    return view(
        workers=workers, loss=1.0, last_checkpoint_step=1, max_steps=5, max_workers=LARGEST_WORLD, samples=1,
        last_commit=1.0, figures=all_observed(), step_seconds_median=0.5, pending=dict.fromkeys(PendingReason, 3),
        cell=Shape(tensor=64),
    )  # fmt: skip


def test_a_job_has_at_most_300_series_and_a_worker_12_and_8_of_its_gpu() -> None:
    named = [name for name in scraped(metrics_of(largest_job())) if "job_name=train" in name]
    workers = Counter(found[1] for name in named if (found := re.search(r"worker=(w\d+)", name)))
    assert len(workers) == sum(one.state not in (State.LOST, State.LEFT) for one in largest_job().workers)
    assert max(workers.values()) <= MOST_SERIES_OF_A_WORKER
    of_the_job = [name for name in named if "worker=" not in name]
    assert 200 < len(of_the_job) <= MOST_SERIES_OF_A_JOB


def test_no_histogram_has_more_than_6_buckets() -> None:
    metrics = metrics_of(largest_job())
    metrics.own.timed("get", 0.1, False)
    metrics.own.requested("GET", "/v1/jobs", "200", 0.1)
    buckets = Counter(re.sub(r"le=[^,}]*", "", name) for name in scraped(metrics) if "_bucket{" in name)
    assert len(buckets) > len(HISTOGRAMS)
    assert set(buckets.values()) == {MOST_BUCKETS}


def test_what_a_controller_counts_for_itself_is_by_kind_and_outcome() -> None:
    metrics = Metrics()
    metrics.own.timed("get", 0.1, False)
    metrics.own.timed("get", 0.7, True)
    metrics.own.requested("GET", "/v1/jobs/{job}", "404", 0.001)
    metrics.own.launches("local")("spawn", "failed")
    metrics.own.asked("create", "throttled", True)
    samples = scraped(metrics)
    assert samples["shoal_store_errors_total{request=get}"] == 1
    assert samples["shoal_store_request_duration_seconds_bucket{le=0.5,request=get}"] == 1
    assert samples["shoal_rest_requests_total{code=404,method=GET,route=/v1/jobs/{job}}"] == 1
    assert samples["shoal_rest_request_duration_seconds_count{method=GET,route=/v1/jobs/{job}}"] == 1
    assert samples["shoal_launcher_calls_total{call=spawn,launcher=local,outcome=failed}"] == 1
    assert samples["shoal_launcher_calls_total{call=kill,launcher=local,outcome=late}"] == 0
    assert samples["shoal_cluster_requests_total{outcome=throttled,verb=create}"] == 1
    assert samples["shoal_cluster_retries_total{verb=create}"] == 1
    assert samples["shoal_cluster_requests_total{outcome=conflict,verb=patch}"] == 0


def test_the_series_of_a_job_that_is_forgotten_go() -> None:
    views = [largest_job()]
    metrics = Metrics()
    metrics.show(Sources(lambda: views))
    assert "job_name=train" in str(scraped(metrics))
    views.clear()
    assert "job_name=train" not in str(scraped(metrics))


@asynchronous
async def test_jobs_are_read_in_the_event_loop_and_written_as_text_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, int] = {}

    def read() -> list[JobView]:
        threads["read"] = threading.get_ident()
        return []

    def write(*_: object) -> bytes:
        threads["write"] = threading.get_ident()
        return b""

    monkeypatch.setattr(metrics_module, "generate_latest", write)
    metrics = Metrics()
    metrics.show(Sources(read))
    await metrics.scrape()
    assert threads["read"] == threading.get_ident() != threads["write"]


def test_gauges_are_read_from_the_jobs_when_asked() -> None:
    views = [view(step=7, loss=2.5, samples=56, goodput_ratio=0.9, unmirrored_blocks=2, generation=4)]
    metrics = Metrics()
    metrics.show(Sources(lambda: views, lambda: 7, lambda: {"open": 2, "ending": 0}, lambda: {"token": 1}, lambda: 0.3))
    samples = scraped(metrics)
    assert samples["shoal_job_step{job_name=train}"] == 7
    assert samples["shoal_job_loss{job_name=train}"] == 2.5
    assert samples["shoal_job_samples_total{job_name=train}"] == 56
    assert samples["shoal_job_goodput_ratio{job_name=train}"] == 0.9
    assert samples["shoal_blocks_unmirrored{job_name=train}"] == 2
    assert samples["shoal_job_generation{job_name=train}"] == 4
    assert samples["shoal_job_lanes{job_name=train}"] == 8
    assert samples["shoal_leader"] == 1
    assert samples["shoal_term"] == 7
    assert samples["shoal_sessions{state=open}"] == 2
    assert samples["shoal_sessions_refused_total{reason=token}"] == 1
    assert samples["shoal_event_loop_lag_seconds"] == 0.3
    phases = {phase: samples[f"shoal_job_phase{{job_name=train,phase={phase}}}"] for phase in Phase}
    assert phases == {phase: float(phase is views[0].phase) for phase in Phase}
    views[0] = view(step=8)
    assert scraped(metrics)["shoal_job_step{job_name=train}"] == 8


def test_what_is_not_known_yet_is_left_out_not_zero() -> None:
    samples = scraped(metrics_of(view(loss=None, last_checkpoint_step=None)))
    assert "shoal_job_loss{job_name=train}" not in samples
    assert "shoal_checkpoint_last_step{job_name=train}" not in samples


def test_workers_are_counted_by_state_and_those_gone_show_no_figures() -> None:
    workers = (
        worker("w0"),
        worker("w1", state=State.LOST),
        worker("w2", state=State.READY, heartbeat_age_seconds=None),
    )
    samples = scraped(metrics_of(view(workers=workers)))
    counts = {state: samples[f"shoal_job_workers{{job_name=train,state={state}}}"] for state in State}
    assert counts == {state: float(state in ("active", "lost", "ready")) for state in State}
    assert samples["shoal_worker_memory_bytes{job_name=train,kind=rss,worker=w0}"] == 100
    assert samples["shoal_worker_step_seconds{job_name=train,worker=w0}"] == 0.5
    assert samples["shoal_worker_last_heartbeat_seconds{job_name=train,worker=w0}"] == 0.25
    assert not [name for name in samples if "worker=w1" in name]
    assert "shoal_worker_last_heartbeat_seconds{job_name=train,worker=w2}" not in samples


def test_a_controller_that_has_stopped_does_not_lead() -> None:
    assert scraped(metrics_of(leads=False))["shoal_leader"] == 0


def test_what_prometheus_compares_with_its_clock_follows_the_machines_own_when_that_is_set() -> None:
    views, metrics = [view(last_commit=100.0, figures=Figures(last_checkpoint=90.0)), view()], Metrics()
    metrics.show(Sources(lambda: views, clock_correction=lambda: 3600.0))
    samples = scraped(metrics)
    assert samples["shoal_job_last_step_timestamp_seconds{job_name=train}"] == 3700.0
    assert samples["shoal_checkpoint_last_timestamp_seconds{job_name=train}"] == 3690.0


def test_a_gpu_has_what_it_tells_and_no_series_of_what_it_does_not() -> None:
    silent = Gpu("NVIDIA H100 80GB HBM3", 0, memory_bytes=5, why="GPU 0 does not tell its use (Not Supported)")
    found = scraped(metrics_of(view(workers=(worker("w0", gpu=GPU), worker("w1", gpu=silent), worker("w2")))))
    gpus = {name: value for name, value in found.items() if name.startswith("shoal_gpu")}
    of_w0, of_w1 = "gpu=3,job_name=train,", "gpu=0,job_name=train,"
    reasons = {"power_cap": 0, "heat": 1, "power_brake": 0, "slowdown": 1}
    assert gpus == {
        f"shoal_gpu_use_ratio{{{of_w0}worker=w0}}": 0.75,
        f"shoal_gpu_memory_bytes{{{of_w0}worker=w0}}": 60_000,
        f"shoal_gpu_memory_total_bytes{{{of_w0}worker=w0}}": 80_000,
        f"shoal_gpu_temperature_celsius{{{of_w0}worker=w0}}": 71,
        **{f"shoal_gpu_throttled{{{of_w0}reason={one},worker=w0}}": held for one, held in reasons.items()},
        f"shoal_gpu_memory_bytes{{{of_w1}worker=w1}}": 5,
    }
