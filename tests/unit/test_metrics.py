"""The figures: every name of INTERFACES.md, fed by effects and views, and nothing that is not known stops a job."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from shoal_controller import core as core_package
from shoal_controller import logs
from shoal_controller.core.spec import JobSpec, JobView, Phase, State, WorkerView
from shoal_controller.metrics import COUNTERS, HISTOGRAMS, Metrics
from small_machine import SmallMachine

FROZEN = Path(__file__).parent / "frozen" / "metrics.txt"


def view(**fields) -> JobView:
    machine = SmallMachine(shown=fields)
    return machine.view(machine.new_job(JobSpec("train", wanted=3, lanes=8), 0.0), 0.0)


def worker(name="w0", **fields) -> WorkerView:
    plain = {
        "host": "h", "pid": 1, "state": State.ACTIVE, "rank": 0, "lanes": (0,), "blocks": 1, "mirrored_blocks": 0,
        "step": 3, "step_seconds": 0.5, "memory_bytes": {"rss": 100, "state": 40}, "log": "",
        "heartbeat_age_seconds": 0.25,
    }  # fmt: skip
    return WorkerView(**{"worker": name, **plain, **fields})


def metrics_of(*views: JobView, leads: bool = True) -> Metrics:
    metrics = Metrics()
    metrics.show(lambda: views, lambda: leads)
    return metrics


def scraped(metrics: Metrics) -> dict[str, float]:
    """Every sample as `name{label=value,…}`."""
    samples = {}
    for family in text_string_to_metric_families(metrics.scrape().decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def test_the_figures_are_the_frozen_ones_with_their_labels_and_kinds() -> None:
    metrics = metrics_of(view(workers=(worker(),), loss=1.0, last_checkpoint_step=1))
    for name, family in metrics._counters.items():
        labels = {label: "x" for label in family._labelnames if label != "job"}
        metrics.count("train", name, 1, labels)
    for name, family in metrics._histograms.items():
        labels = {label: "x" for label in family._labelnames if label != "job"}
        metrics.observe("train", name, 1, labels)
    metrics.timed("get", 0.1)
    lines = []
    for family in text_string_to_metric_families(metrics.scrape().decode()):
        plain = next(sample for sample in family.samples if not sample.name.endswith("_bucket"))
        name = family.name + "_total" if family.type == "counter" else family.name
        lines.append(f"{name} {family.type} {{{', '.join(sorted(plain.labels))}}}")
    assert "\n".join(sorted(lines)) + "\n" == FROZEN.read_text()


def test_the_core_counts_and_observes_only_what_is_known_here() -> None:
    core = Path(core_package.__file__).parent
    named = {name for file in core.rglob("*.py") for name in re.findall(r'"(shoal_\w+)"', file.read_text())}
    assert named
    assert named <= {*COUNTERS, *HISTOGRAMS}


def test_what_effects_count_and_observe_is_shown_by_job() -> None:
    metrics = metrics_of()
    metrics.count("train", "shoal_resizes_total", 1, {"reason": "kill", "outcome": "done"})
    metrics.count("train", "shoal_resizes_total", 2, {"reason": "kill", "outcome": "done"})
    metrics.observe("train", "shoal_resize_seconds", 0.25, {"phase": "plan"})
    metrics.timed("transact", 0.002)
    samples = scraped(metrics)
    assert samples["shoal_resizes_total{job=train,outcome=done,reason=kill}"] == 3
    assert samples["shoal_resize_seconds_sum{job=train,phase=plan}"] == 0.25
    assert samples["shoal_resize_seconds_bucket{job=train,le=0.3,phase=plan}"] == 1
    assert samples["shoal_resize_seconds_bucket{job=train,le=0.2,phase=plan}"] == 0
    assert samples["shoal_store_requests_seconds_count{request=transact}"] == 1


def test_gauges_are_read_from_the_jobs_when_asked() -> None:
    views = [view(step=7, loss=2.5, samples=56, goodput_ratio=0.9, unmirrored_blocks=2, generation=4)]
    metrics = Metrics()
    metrics.show(lambda: views, lambda: True)
    samples = scraped(metrics)
    assert samples["shoal_job_step{job=train}"] == 7
    assert samples["shoal_job_loss{job=train}"] == 2.5
    assert samples["shoal_job_samples_total{job=train}"] == 56
    assert samples["shoal_job_goodput_ratio{job=train}"] == 0.9
    assert samples["shoal_blocks_unmirrored{job=train}"] == 2
    assert samples["shoal_job_generation{job=train}"] == 4
    assert samples["shoal_job_lanes{job=train}"] == 8
    assert samples["shoal_leader"] == 1
    views[0] = view(step=8)
    assert scraped(metrics)["shoal_job_step{job=train}"] == 8


def test_what_is_not_known_yet_is_left_out_not_zero() -> None:
    samples = scraped(metrics_of(view(loss=None, last_checkpoint_step=None)))
    assert "shoal_job_loss{job=train}" not in samples
    assert "shoal_checkpoint_last_step{job=train}" not in samples


def test_workers_are_counted_by_state_and_those_gone_show_no_figures() -> None:
    workers = (
        worker("w0"),
        worker("w1", state=State.LOST),
        worker("w2", state=State.READY, heartbeat_age_seconds=None),
    )
    samples = scraped(metrics_of(view(workers=workers)))
    counts = {state: samples[f"shoal_job_workers{{job=train,state={state}}}"] for state in State}
    assert counts == {state: float(state in ("active", "lost", "ready")) for state in State}
    assert samples["shoal_worker_memory_bytes{job=train,kind=rss,worker=w0}"] == 100
    assert samples["shoal_worker_step_seconds{job=train,worker=w0}"] == 0.5
    assert samples["shoal_worker_last_heartbeat_seconds{job=train,worker=w0}"] == 0.25
    assert not [name for name in samples if "worker=w1" in name]
    assert "shoal_worker_last_heartbeat_seconds{job=train,worker=w2}" not in samples


def test_a_controller_that_has_stopped_does_not_lead() -> None:
    assert scraped(metrics_of(leads=False))["shoal_leader"] == 0


def test_a_figure_that_is_not_known_is_logged_and_stops_nothing(capsys) -> None:
    logs.configure("error")
    metrics = metrics_of(view(phase=Phase.RUNNING))
    metrics.count("train", "shoal_nonsense_total", 1, {})
    metrics.count("train", "shoal_resizes_total", 1, {"reason": "kill"})
    metrics.count("train", "shoal_job_lost_steps_total", -1, {})
    metrics.observe("train", "shoal_nonsense_seconds", 1, {})
    assert capsys.readouterr().err.count("a figure cannot be") == 4


def test_two_controllers_in_one_process_do_not_share_figures() -> None:
    one, other = metrics_of(), metrics_of()
    one.count("train", "shoal_blocks_promoted_total", 5, {})
    assert not [name for name in scraped(other) if "promoted" in name and "job=train" in name]
