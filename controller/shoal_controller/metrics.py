"""Everything that Prometheus can ask: counters and histograms fed by effects, gauges read from the jobs when asked.

The names are fixed by INTERFACES.md and frozen in a test. Every figure of a job has the label `job`, of a worker also
`worker`. Made by `server.py`; the shell knows it as its `Meter`, the store as the listener for its requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal_controller.core.spec import JobView, State, WorkerView

COUNTERS = {
    "shoal_job_lost_steps_total": ("Committed steps gone back.", ()),
    "shoal_resizes_total": ("Changes of the world.", ("reason", "outcome")),
    "shoal_repartition_bytes_total": ("Bytes of state that moved.", ("source",)),
    "shoal_blocks_promoted_total": ("Blocks taken over without moving a byte.", ()),
    "shoal_checkpoint_bytes_total": ("Bytes of checkpoints written.", ()),
    "shoal_checkpoint_failures_total": ("Checkpoints that could not be written.", ()),
    "shoal_checkpoints_skipped_total": ("Scheduled checkpoints left out: the one before was being written.", ()),
}
HISTOGRAMS = {
    "shoal_resize_seconds": ("From the cause of a change to the first step done.", ("phase",)),
    "shoal_checkpoint_seconds": ("Duration of a save: copy is what training waited for.", ("phase",)),
}
STORE_REQUESTS = "shoal_store_requests_seconds"

RESIZE_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1, 2, 3, 5, 10, 30, 60, 120, 300, 600)
CHECKPOINT_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
STORE_BUCKETS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
BUCKETS = {"shoal_resize_seconds": RESIZE_BUCKETS, "shoal_checkpoint_seconds": CHECKPOINT_BUCKETS}

GONE = (State.LOST, State.LEFT)

log = structlog.get_logger("shoal.metrics")

disable_created_metrics()  # type: ignore[no-untyped-call]  # no series beside those that are named

JobFigure = Callable[[JobView], float | None]
WorkerFigure = Callable[[WorkerView], float | None]

JOB_GAUGES: Mapping[str, tuple[str, JobFigure]] = {
    "shoal_job_step": ("Committed steps.", lambda view: view.step),
    "shoal_job_loss": ("Loss of the last step.", lambda view: view.loss),
    "shoal_job_generation": ("Number of the world.", lambda view: view.generation),
    "shoal_job_lanes": ("Lanes of the job.", lambda view: view.lanes),
    "shoal_job_goodput_ratio": (
        "Seconds in committed steps per second since the first one.",
        lambda view: view.goodput_ratio,
    ),
    "shoal_blocks_unmirrored": ("Blocks with fewer copies than wanted.", lambda view: view.unmirrored_blocks),
    "shoal_checkpoint_last_step": ("Step of the last complete checkpoint.", lambda view: view.last_checkpoint_step),
}
WORKER_GAUGES: Mapping[str, tuple[str, WorkerFigure]] = {
    "shoal_worker_step_seconds": ("Wall time of the last step.", lambda worker: worker.step_seconds),
    "shoal_worker_last_heartbeat_seconds": (
        "Seconds since the last heartbeat.",
        lambda worker: worker.heartbeat_age_seconds,
    ),
}


class Metrics:
    """One controller's figures."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counters = {
            name: Counter(name, text, ("job", *labels), registry=self._registry)
            for name, (text, labels) in COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(name, text, ("job", *labels), registry=self._registry, buckets=BUCKETS[name])
            for name, (text, labels) in HISTOGRAMS.items()
        }
        self._store = Histogram(
            STORE_REQUESTS, "Duration of requests to the store.", ("request",), registry=self._registry,
            buckets=STORE_BUCKETS,
        )  # fmt: skip

    def show(self, jobs: Callable[[], Sequence[JobView]], leads: Callable[[], bool]) -> None:
        """Say where the gauges are read when Prometheus asks. Once."""
        self._registry.register(_Views(jobs, leads))

    def scrape(self) -> bytes:
        """Everything, in the text format."""
        return generate_latest(self._registry)

    # ---- what the shell and the store tell

    def count(self, job: str, metric: str, value: float, labels: Mapping[str, str]) -> None:
        """Add to a counter. A figure that is not known here is a defect, and no reason to stop a job."""
        try:
            self._counters[metric].labels(job=job, **labels).inc(value)
        except (KeyError, ValueError) as error:
            log.error("a figure cannot be counted", metric=metric, value=value, labels=dict(labels), error=str(error))

    def observe(self, job: str, metric: str, value: float, labels: Mapping[str, str]) -> None:
        """One observation of a histogram."""
        try:
            self._histograms[metric].labels(job=job, **labels).observe(value)
        except (KeyError, ValueError) as error:
            log.error("a figure cannot be observed", metric=metric, value=value, labels=dict(labels), error=str(error))

    def timed(self, request: str, seconds: float) -> None:
        """How long the store took."""
        self._store.labels(request).observe(seconds)


class _Views(Collector):
    """The gauges, made anew from the jobs' views with every scrape."""

    def __init__(self, jobs: Callable[[], Sequence[JobView]], leads: Callable[[], bool]) -> None:
        self._jobs = jobs
        self._leads = leads

    def describe(self) -> Iterable[Metric]:
        return _families((), leads=False)

    def collect(self) -> Iterable[Metric]:
        return _families(self._jobs(), self._leads())


def _families(jobs: Sequence[JobView], leads: bool) -> Iterator[Metric]:
    for name, (text, job_figure) in JOB_GAUGES.items():
        yield _gauge(name, text, ("job",), (((view.job,), job_figure(view)) for view in jobs))
    for name, (text, worker_figure) in WORKER_GAUGES.items():
        figures = ((who, worker_figure(worker)) for who, worker in _present(jobs))
        yield _gauge(name, text, ("job", "worker"), figures)
    yield _gauge(
        "shoal_worker_memory_bytes", "Memory of a worker.", ("job", "worker", "kind"),
        (((*who, kind), size) for who, worker in _present(jobs) for kind, size in worker.memory_bytes.items()),
    )  # fmt: skip
    counts = (
        ((view.job, state), sum(worker.state is state for worker in view.workers)) for view in jobs for state in State
    )
    yield _gauge("shoal_job_workers", "Workers of a job.", ("job", "state"), counts)
    samples = CounterMetricFamily("shoal_job_samples_total", "Samples in committed steps.", labels=("job",))
    for view in jobs:
        samples.add_metric((view.job,), view.samples)
    yield samples
    leader = GaugeMetricFamily("shoal_leader", "Whether this controller decides.")
    leader.add_metric((), leads)
    yield leader


def _gauge(
    name: str, text: str, labels: Sequence[str], figures: Iterable[tuple[Sequence[str], float | None]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, figure in figures:
        if figure is not None:
            family.add_metric(values, figure)
    return family


def _present(jobs: Sequence[JobView]) -> Iterator[tuple[tuple[str, str], WorkerView]]:
    """The workers that are not gone."""
    return (((view.job, one.worker), one) for view in jobs for one in view.workers if one.state not in GONE)
