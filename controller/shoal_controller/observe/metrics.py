"""Everything that Prometheus can ask, read from the jobs when it asks: what they have counted, and where they are.

The names are frozen in a test. Every figure of a job has the label `job_name` (Prometheus overwrites `job`), of a
worker also `worker`; a test bounds how many series either has. A job counts for itself (`core/machine/figures.py`), so
its counters last as long as the job: none goes down when a controller is started again, and all are gone when the job
is forgotten. What a controller counts for itself (`own_figures.py`) begins anew with it. Made by `server.py`.
"""

from __future__ import annotations

import asyncio
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from shoal_protos.gpu import ALL_THROTTLES, Gpu
from shoal_protos.messages import PROTOCOL_VERSION
from shoal_protos.release import RELEASE
from shoal_protos.shape import ONE

from shoal_controller.core.machine.figures import COUNTERS, HISTOGRAMS, HistogramKind, Observed, series_key, series_of
from shoal_controller.core.machine.pending import PendingReason
from shoal_controller.core.machine.spec import JobView, Phase, State, WorkerView
from shoal_controller.core.overview.idle_lanes import idle_lane_ratio
from shoal_controller.observe.own_figures import OwnFigures

GONE = (State.LOST, State.LEFT)
MEMORY_KINDS = ("parameters", "gradients", "state", "state_files", "rss")
"""Whatever else a worker claims has no series."""

MOST_COORDINATES = 32
"""So many coordinates of a cell have a series of their own: the first ones."""

JobFigure = Callable[[JobView], float | None]
WorkerFigure = Callable[[WorkerView], float | None]
GpuFigure = Callable[[Gpu], float | None]

JOB_GAUGES: Mapping[str, tuple[str, JobFigure]] = {
    "shoal_job_step": ("Committed steps.", lambda view: view.step),
    "shoal_job_max_steps": ("Step at which the job ends.", lambda view: view.max_steps),
    "shoal_job_loss": ("Loss of the last step.", lambda view: view.loss),
    "shoal_job_generation": ("Number of the world.", lambda view: view.generation),
    "shoal_job_lanes": ("Lanes of the job.", lambda view: view.lanes),
    "shoal_job_idle_lane_ratio": (
        "Part of the workers' capacity that idles because lanes do not divide.",
        idle_lane_ratio,
    ),
    "shoal_job_workers_wanted": ("Workers that the job is to have.", lambda view: view.wanted),
    "shoal_job_workers_min": ("Workers below which no step runs.", lambda view: view.min_workers),
    "shoal_job_step_seconds_median": (
        "Median wall time of a step: over the workers, of what each says of its last steps.",
        lambda view: view.step_seconds_median,
    ),
    "shoal_job_inbox_events": (
        "Most events that stood in line for the job at a time, in the last minute.",
        lambda view: view.deepest_inbox,
    ),
    "shoal_job_workers_max": ("Most workers that the job can use.", lambda view: view.max_workers),
    "shoal_job_goodput_ratio": (
        "Part of the seconds of wanted workers, since the job was made, that trained.",
        lambda view: view.goodput_ratio,
    ),
    "shoal_job_stepping_ratio": (
        "Share of wall time since the first step that was spent in committed steps, by however few workers.",
        lambda view: view.stepping_ratio,
    ),
    "shoal_job_start_seconds": (
        "Time from the job's submission to its first committed step.",
        lambda view: view.figures.first_commit and view.figures.first_commit - view.figures.created,
    ),
    "shoal_job_last_step_timestamp_seconds": (
        "Unix time at which the last step was committed.",
        lambda view: view.last_commit,
    ),
    "shoal_blocks_unmirrored": ("Blocks with fewer copies than wanted.", lambda view: view.unmirrored_blocks),
    "shoal_checkpoint_last_step": ("Step of the last complete checkpoint.", lambda view: view.last_checkpoint_step),
    "shoal_checkpoint_last_timestamp_seconds": (
        "Unix time at which the last checkpoint was saved that this job was heard to save.",
        lambda view: view.figures.last_checkpoint,
    ),
    "shoal_checkpoint_interval_seconds": (
        "Time between the last two complete checkpoints.",
        lambda view: view.figures.checkpoint_interval,
    ),
}
UNIX_TIMES = ("shoal_job_last_step_timestamp_seconds", "shoal_checkpoint_last_timestamp_seconds")
"""What Prometheus compares with its own clock."""
WORKER_GAUGES: Mapping[str, tuple[str, WorkerFigure]] = {
    "shoal_worker_step_seconds": ("Wall time of the last step.", lambda worker: worker.step_seconds),
    "shoal_worker_lane_seconds": (
        "What a lane takes on a worker, without its waits for others.",
        lambda worker: worker.lane_seconds or None,
    ),
    "shoal_worker_last_heartbeat_seconds": (
        "Seconds since the last heartbeat.",
        lambda worker: worker.heartbeat_age_seconds,
    ),
    "shoal_worker_waits_for_seconds": (
        "Time that other workers have waited for this one.",
        lambda worker: worker.waited_for_seconds,
    ),
    "shoal_worker_state_file_bytes_per_second": (
        "Speed at which a worker's last update read and wrote optimizer state that lies in a file.",
        lambda worker: worker.state_file_bytes_per_second or None,
    ),
    "shoal_worker_lanes": ("Number of lanes that a worker trains.", lambda worker: len(worker.lanes)),
}
GPU_GAUGES: Mapping[str, tuple[str, GpuFigure]] = {
    "shoal_gpu_use_ratio": (
        "Share of the last moment in which a kernel ran on a worker's GPU.",
        lambda gpu: gpu.use_ratio,
    ),
    "shoal_gpu_memory_bytes": ("Memory of a worker's GPU in use, by all processes.", lambda gpu: gpu.memory_bytes),
    "shoal_gpu_memory_total_bytes": ("Memory of a worker's GPU.", lambda gpu: gpu.memory_total_bytes),
    "shoal_gpu_temperature_celsius": ("Temperature of a worker's GPU.", lambda gpu: gpu.celsius),
}


@dataclass(frozen=True, slots=True)
class Sources:
    """Where figures are read."""

    jobs: Callable[[], Sequence[JobView]] = tuple
    term: Callable[[], int] = int
    """The term in which this controller leads; 0: it does not."""
    sessions: Callable[[], Mapping[str, int]] = dict
    """Streams of workers by state."""
    refusals: Callable[[], Mapping[str, int]] = dict
    """How many streams were refused, by why."""
    loop_lag: Callable[[], float] = float
    """Seconds by which the event loop was late at most, in the last minute."""
    clock_correction: Callable[[], float] = float
    """Seconds by which the machine's clock is ahead of the one that jobs go by."""


class Metrics:
    """One controller's figures. `own`: what it counts for itself."""

    def __init__(self) -> None:
        self._sources = Sources()
        self.own = OwnFigures()

    def show(self, sources: Sources) -> None:
        """Say where the figures are read when Prometheus asks. Once."""
        self._sources = sources

    async def scrape(self) -> bytes:
        """Everything, in the text format. It is read at once, and written beside the event loop: of a thousand workers
        it is a megabyte, for which no heartbeat waits.
        """
        sources = self._sources
        families = chain(_families(sources.jobs(), sources.clock_correction()), list(_controller(sources)))
        return await asyncio.to_thread(generate_latest, _Read(self.own.registry, families))


@dataclass(frozen=True, slots=True)
class _Read(Collector):
    """What one scrape shows: what the controller has counted, and what was read."""

    counted: Collector
    families: Iterator[Metric]
    """Made one after the other, of views that nobody changes."""

    def collect(self) -> Iterator[Metric]:
        yield from self.counted.collect()
        yield from self.families


def _families(jobs: Sequence[JobView], clock_correction: float) -> Iterator[Metric]:
    yield from _counted(jobs)
    for name, (text, job_figure) in JOB_GAUGES.items():
        found = [((view.job,), job_figure(view)) for view in jobs]
        if name in UNIX_TIMES:
            found = [(who, None if time is None else time + clock_correction) for who, time in found]
        yield _gauge(name, text, ("job_name",), found)
    for name, (text, worker_figure) in WORKER_GAUGES.items():
        figures = ((who, worker_figure(worker)) for who, worker in _present(jobs))
        yield _gauge(name, text, ("job_name", "worker"), figures)
    yield _gauge(
        "shoal_worker_memory_bytes", "Memory used by a worker.", ("job_name", "worker", "kind"),
        (
            ((*who, kind), worker.memory_bytes.get(kind))
            for who, worker in _present(jobs)
            for kind in MEMORY_KINDS
        ),
    )  # fmt: skip
    yield from _gpus(jobs)
    counts = (
        ((view.job, state), sum(worker.state is state for worker in view.workers)) for view in jobs for state in State
    )
    yield _gauge("shoal_job_workers", "Workers of a job by state.", ("job_name", "state"), counts)
    in_cells = [view for view in jobs if view.cell != ONE]
    cells = (
        ((view.job, state), number)
        for view in in_cells
        for state, number in (("full", view.full_cells), ("wanted", view.wanted_cells))
    )
    yield _gauge("shoal_job_cells", "Cells of a job that train, and that its wanted workers make.",
                 ("job_name", "state"), cells)  # fmt: skip
    members = (((view.job, str(place)), number) for view in in_cells for place, number in _at_coordinates(view))
    yield _gauge(
        "shoal_job_coordinate_members", "Members of the world at a coordinate of its cells.",
        ("job_name", "coordinate"), members,
    )  # fmt: skip
    waited = CounterMetricFamily(
        "shoal_worker_cell_wait_seconds_total", "Time that a worker has waited in collectives of its cells.",
        labels=("job_name", "worker"),
    )  # fmt: skip
    for who, worker in _present(in_cells):
        waited.add_metric(who, worker.cell_wait_seconds)
    yield waited
    reports = (((view.job, name), value) for view in jobs for name, value in view.reports.items())
    yield _gauge(
        "shoal_job_report", "Number that the script has reported last, by its name.", ("job_name", "name"), reports
    )
    phases = (((view.job, phase), view.phase is phase) for view in jobs for phase in Phase)
    yield _gauge("shoal_job_phase", "Whether the job is in this phase.", ("job_name", "phase"), phases)
    pending = (((view.job, reason), view.pending.get(reason, 0)) for view in jobs for reason in PendingReason)
    yield _gauge("shoal_pods_waiting", "Workers that wait to start, by reason.", ("job_name", "reason"), pending)


def _gpus(jobs: Sequence[JobView]) -> Iterator[Metric]:
    """Of the GPU that each worker computes on, by its number on its host: what it tells."""
    gpus = [((*who, str(one.gpu.index)), one.gpu) for who, one in _present(jobs) if one.gpu is not None]
    for name, (text, figure) in GPU_GAUGES.items():
        yield _gauge(name, text, ("job_name", "worker", "gpu"), ((who, figure(gpu)) for who, gpu in gpus))
    throttled = (
        ((*who, reason), reason in gpu.throttled.names)
        for who, gpu in gpus
        if gpu.throttled is not None
        for reason in ALL_THROTTLES.names
    )
    yield _gauge("shoal_gpu_throttled", "Whether the clocks of a worker's GPU are held down, by reason.",
                 ("job_name", "worker", "gpu", "reason"), throttled)  # fmt: skip


def _at_coordinates(view: JobView) -> Iterator[tuple[int, int]]:
    members = Counter(worker.coordinate for worker in view.workers if worker.rank is not None)
    return ((coordinate, members[coordinate]) for coordinate in view.cell.coordinates[:MOST_COORDINATES])


def _controller(sources: Sources) -> Iterator[Metric]:
    """What is read of this controller, whether it leads or not."""
    sessions = (((state,), number) for state, number in sources.sessions().items())
    yield _gauge("shoal_sessions", "Workers' connections by state.", ("state",), sessions)
    refused = CounterMetricFamily(
        "shoal_sessions_refused_total", "Workers' connections that were refused, by why.", labels=("reason",)
    )
    for reason, number in sources.refusals().items():
        refused.add_metric((reason,), number)
    yield refused
    term = sources.term()
    yield _gauge("shoal_leader", "Whether this controller is the leader.", (), [((), term > 0)])
    yield _gauge("shoal_term", "Term in which this controller leads; 0: it does not.", (), [((), term)])
    yield _gauge(
        "shoal_event_loop_lag_seconds", "How late the event loop was at most, in the last minute.", (),
        [((), sources.loop_lag())],
    )  # fmt: skip
    built = (RELEASE, platform.python_version(), str(PROTOCOL_VERSION))
    yield _gauge(
        "shoal_build_info", "Always 1; the labels are the versions of Shoal, of Python and of the sessions' protocol.",
        ("version", "python", "protocol"), [(built, 1)],
    )  # fmt: skip


def _counted(jobs: Sequence[JobView]) -> Iterator[Metric]:
    """Counters and histograms: all series of every job, from its start on."""
    for name, counter in COUNTERS.items():
        family = CounterMetricFamily(name, counter.text, labels=("job_name", *counter.labels))
        for view in jobs:
            for values, key in _series(name):
                family.add_metric((view.job, *values), view.figures.counters.get(key, 0.0))
        yield family
    samples = CounterMetricFamily("shoal_job_samples_total", "Samples in committed steps.", labels=("job_name",))
    for view in jobs:
        if view.samples is not None:
            samples.add_metric((view.job,), view.samples)
    yield samples
    for name, histogram in HISTOGRAMS.items():
        observed = HistogramMetricFamily(name, histogram.text, labels=("job_name", *histogram.labels))
        for view in jobs:
            for values, key in _series(name):
                series = view.figures.series(name, key)
                if series is not None or not values:  # with labels there are too many that nothing ever falls into
                    observed.add_metric((view.job, *values), *_buckets(histogram, series))
        yield observed


@cache
def _series(metric: str) -> tuple[tuple[tuple[str, ...], str], ...]:
    """Of each series of a counted figure: the values of its labels, and its key."""
    kind = COUNTERS[metric] if metric in COUNTERS else HISTOGRAMS[metric]
    return tuple((tuple(labels.values()), series_key(metric, labels)) for labels in series_of(kind.labels))


def _buckets(kind: HistogramKind, series: Observed | None) -> tuple[list[tuple[str, float]], float]:
    """A series as Prometheus takes it: cumulative counts by upper bound, and the sum."""
    counts = series.buckets if series is not None else (0,) * (len(kind.bounds) + 1)
    ends = (*(str(bound) for bound in kind.bounds), "+Inf")
    return list(zip(ends, accumulate(counts), strict=True)), series.total if series is not None else 0.0


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
