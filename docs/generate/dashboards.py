"""Writes Grafana's dashboards into the chart: `python docs/generate/dashboards.py` (`make docs`).

*Training health* shows one job, *Controller* the control plane. Each panel is one entry here: what it shows, its unit,
and its queries by the name of their curve. Only the leader exposes jobs, and another one may lead a moment later: so
every query takes the greatest over the controllers, or the sum of what each of them has counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import BigValueTextMode, StackingMode, VizOrientation
from grafana_foundation_sdk.models.dashboard import (
    AnnotationQuery,
    DashboardCursorSync,
    DataSourceRef,
    DataTransformerConfig,
    VariableOption,
    VariableRefresh,
)
from grafana_foundation_sdk.models.dashboard import Panel as PanelModel
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

FOLDER = Path(__file__).resolve().parents[2] / "helm" / "shoal" / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")

JOB = 'namespace=~"$namespace", job_name="$job"'
DONE = JOB + ', outcome="done"'
ALL = 'namespace=~"$namespace"'
ACTIVE = JOB + ', state="active"'
NOT_DONE = ALL + ', outcome!="done"'
NOT_OVER = ALL + ', phase!~"succeeded|failed|cancelled"'
RATE = "$__rate_interval"
COLUMNS = 24

GPU, BY_GPU = "{{worker}} GPU {{gpu}}", "worker, gpu"

Kind = Literal["lines", "areas", "number", "bars", "table"]


@dataclass(frozen=True, slots=True)
class View:
    """One panel."""

    title: str
    about: str
    queries: Mapping[str, str]
    """PromQL by the legend of its curves."""
    unit: str = "short"
    kind: Kind = "lines"
    width: int = 8


def most(metric: str, by: str = "", where: str = JOB) -> str:
    """The leader's figure, whoever leads."""
    return f"max{f' by ({by}) ' if by else ''}({metric}{{{where}}})"


def growth(metric: str, by: str = "", where: str = JOB, over: str = RATE, function: str = "increase") -> str:
    """What was counted in a while, whichever controllers counted it."""
    return f"sum{f' by ({by}) ' if by else ''}({function}({metric}{{{where}}}[{over}]))"


def mean(histogram: str, by: str, where: str = JOB) -> str:
    """The mean of all that a job's histogram has seen."""
    return f"max by ({by}) ({histogram}_sum{{{where}}}) / max by ({by}) ({histogram}_count{{{where}}})"


def slowest_of_20(histogram: str, by: str) -> str:
    """Within which time 19 of 20 are done."""
    buckets = growth(f"{histogram}_bucket", f"{by}, le", ALL, function="rate")
    return f"histogram_quantile(0.95, {buckets})"


MEDIAN_STEP = f"quantile(0.5, shoal_worker_step_seconds{{{JOB}}})"
LAST_CHECKPOINT = most("shoal_checkpoint_last_timestamp_seconds")

PROGRESS = [
    View("Phase", "Phase of the job.",
         {"{{phase}}": f"{most('shoal_job_phase', 'phase')} == 1"}, kind="number", width=3),
    View("Step", "Committed steps, and the step at which the job ends.",
         {"step": most("shoal_job_step"), "of": most("shoal_job_max_steps")}, kind="number", width=4),
    View("Progress", "Share of the job's steps that are committed.",
         {"done": f"{most('shoal_job_step')} / {most('shoal_job_max_steps')}"}, "percentunit", "number", 3),
    View("Time left", "Steps that are left, at the median step's time.",
         {"left": f"({most('shoal_job_max_steps')} - {most('shoal_job_step')}) * "
          f"{most('shoal_job_step_seconds_median')}"}, "s", "number", 3),
    View("Goodput", "Part of the seconds of wanted workers that trained.",
         {"goodput": most("shoal_job_goodput_ratio")}, "percentunit", "number", 3),
    View("Lost steps", "Committed steps that were lost by going back.",
         {"lost": most("shoal_job_lost_steps_total")}, kind="number", width=3),
    View("Last checkpoint", "Age of the last complete checkpoint.",
         {"age": f"time() - {LAST_CHECKPOINT}"}, "s", "number", 3),
    View("Workers", "Active workers.",
         {"active": f"{most('shoal_job_workers', where=ACTIVE)}"}, kind="number", width=2),
]  # fmt: skip
TRAINING = [
    View("Loss", "Loss of the last step.", {"loss": most("shoal_job_loss")}),
    View("Step time", "Wall time of the last step: the median worker and the slowest.",
         {"median": MEDIAN_STEP, "slowest": most("shoal_worker_step_seconds")}, "s"),
    View("Samples", "Samples in committed steps, per second.",
         {"samples": growth("shoal_job_samples_total", function="rate")}),
    View("World", "Workers by state, and how many are wanted. The lines across are changes of the world by reason.",
         {"{{state}}": f"{most('shoal_job_workers', 'state')} > 0", "wanted": most("shoal_job_workers_wanted"),
          "min": most("shoal_job_workers_min")}, width=16),
    View("Goodput", "Part of the seconds of wanted workers that trained; share of time in committed steps, by however "
         "few workers; and the part of the capacity that idles because lanes do not divide.",
         {"goodput": most("shoal_job_goodput_ratio"), "stepping": most("shoal_job_stepping_ratio"),
          "idle lanes": most("shoal_job_idle_lane_ratio")}, "percentunit"),
    View("Workers' time", "Workers by what their time is used for, of as many as are wanted.",
         {"{{use}}": growth("shoal_worker_seconds_total", "use", function="rate"),
          "wanted": growth("shoal_job_wanted_seconds_total", function="rate")}, kind="areas", width=24),
]  # fmt: skip
CHANGES = [
    View("Changes", "Changes of the world by reason.",
         {"{{reason}}": f"{growth('shoal_resizes_total', 'reason', DONE)} > 0"}, kind="areas"),
    View("Pauses", "Time for which training has stood still so far, by reason.",
         {"{{reason}}": most("shoal_resize_pause_seconds_sum", "reason")}, "s", "areas"),
    View("Phases of a change", "Mean time of each phase, over all changes of the job.",
         {"{{phase}}": mean("shoal_resize_seconds", "phase")}, "s", "bars"),
    View("Moved state", "Bytes of state that changes have moved, per second, by where they came from.",
         {"{{source}}": growth("shoal_repartition_bytes_total", "source", function="rate")}, "Bps"),
    View("Copies missing", "Blocks with fewer copies than wanted, and blocks whose copies differed.",
         {"missing": most("shoal_blocks_unmirrored"), "corrupt": most("shoal_corrupt_blocks_total")}),
    View("Lost work", "Committed steps lost by going back, lanes of cells trained again, blocks a mirror took over.",
         {"lost steps": most("shoal_job_lost_steps_total"), "void lanes": most("shoal_void_lanes_total"),
          "promoted": most("shoal_blocks_promoted_total")}),
]  # fmt: skip
WORKERS = [
    View("Cells", "Cells that train and that are wanted, and the members at each coordinate, where a cell has several.",
         {"{{state}}": most("shoal_job_cells", "state"),
          "coordinate {{coordinate}}": most("shoal_job_coordinate_members", "coordinate")}),
    View("Waiting within cells", "Share of its time that a worker waits in collectives of its cell.",
         {"{{worker}}": growth("shoal_worker_cell_wait_seconds_total", "worker", function="rate")}, "percentunit"),
    View("Time per lane", "What a lane takes on a worker, without its waits for others.",
         {"{{worker}}": most("shoal_worker_lane_seconds", "worker")}, "s"),
    View("Waited for", "Time that the others have been waiting for a worker.",
         {"{{worker}}": most("shoal_worker_waits_for_seconds", "worker")}, "s"),
    View("Memory", "Memory of the largest worker, by kind.",
         {"{{kind}}": most("shoal_worker_memory_bytes", "kind")}, "bytes"),
    View("State in files", "Speed at which updates read and write optimizer state that lies in files.",
         {"{{worker}}": most("shoal_worker_state_file_bytes_per_second", "worker")}, "Bps"),
    View("Heartbeats", "Seconds since a worker's last heartbeat.",
         {"{{worker}}": most("shoal_worker_last_heartbeat_seconds", "worker")}, "s"),
    View("Pods waiting", "Pods that have not started, by what they wait for.",
         {"{{reason}}": most("shoal_pods_waiting", "reason")}, kind="areas"),
    View("Preemptions", "Workers whose end was announced, by what announced it.",
         {"{{signal}}": growth("shoal_preemptions_total", "signal")}, kind="areas"),
    View("Skipped", "Micro-batches that the script has skipped.",
         {"micro-batches": most("shoal_skipped_micro_batches_total")}),
    View("Workers", "Lanes and step time of each worker.",
         {"lanes": most("shoal_worker_lanes", "worker"), "step": most("shoal_worker_step_seconds", "worker")},
         kind="table"),
]  # fmt: skip
GPUS = [
    View("Use", "Share of the time in which a kernel runs on each worker's GPU.",
         {GPU: most("shoal_gpu_use_ratio", BY_GPU)}, "percentunit", width=6),
    View("Memory of GPUs", "Share of each GPU's memory that is in use.",
         {GPU: f"{most('shoal_gpu_memory_bytes', BY_GPU)} / {most('shoal_gpu_memory_total_bytes', BY_GPU)}"},
         "percentunit", width=6),
    View("Temperature", "Temperature of each GPU.",
         {GPU: most("shoal_gpu_temperature_celsius", BY_GPU)}, "celsius", width=6),
    View("Throttled", "GPUs whose clocks are held down, by reason. A power cap is usual at full load.",
         {"{{reason}}": f"sum by (reason) ({most('shoal_gpu_throttled', 'worker, gpu, reason')}) > 0"},
         kind="areas", width=6),
]  # fmt: skip
CHECKPOINTS = [
    View("Age", "Age of the last complete checkpoint, and the time between the last two.",
         {"age": f"time() - {LAST_CHECKPOINT}", "interval": most("shoal_checkpoint_interval_seconds")}, "s"),
    View("Stall and writing", "Mean time of each phase of a save. Training waits for the copy only.",
         {"{{phase}}": mean("shoal_checkpoint_seconds", "phase")}, "s", "bars"),
    View("Written", "Bytes of checkpoints, per second.",
         {"written": growth("shoal_checkpoint_bytes_total", function="rate")}, "Bps"),
    View("Not saved", "Checkpoints that failed, or were skipped because another was being written.",
         {"failed": most("shoal_checkpoint_failures_total"), "skipped": most("shoal_checkpoints_skipped_total")}),
]  # fmt: skip

FLEET = [
    View("Leads", "Controllers that lead; expected 1.",
         {"leaders": f"sum(shoal_leader{{{ALL}}})"}, kind="number", width=4),
    View("Changes of the leader", "In the last hour: how often another term began.",
         {"changes": f"changes((max(shoal_term{{{ALL}}} > 0))[1h:5s])"}, kind="number", width=4),
    View("Sessions", "Workers' connections that are open.",
         {"open": f"sum(shoal_sessions{{{ALL}}})"}, kind="number", width=4),
    View("Jobs", "Jobs that are not over.",
         {"jobs": f"sum({most('shoal_job_phase', 'namespace, job_name', NOT_OVER)})"}, kind="number", width=4),
    View("Version", "Version of each controller.",
         {"{{version}}": f"count by (version) (shoal_build_info{{{ALL}}})"}, kind="number", width=8),
]  # fmt: skip
JOBS = [
    View("Jobs by phase", "Phases of all jobs.",
         {"{{phase}}": f"sum by (phase) ({most('shoal_job_phase', 'namespace, job_name, phase', ALL)}) > 0"},
         kind="areas"),
    View("Workers", "Workers of all jobs, by state.",
         {"{{state}}": f"sum by (state) ({most('shoal_job_workers', 'namespace, job_name, state', ALL)}) > 0"},
         kind="areas"),
    View("Changes of worlds", "Changes of the world of all jobs, by outcome.",
         {"{{outcome}}": growth("shoal_resizes_total", "outcome", ALL)}, kind="areas"),
    View("Oldest heartbeat", "Seconds since the last heartbeat of the most silent worker of each job.",
         {"{{job_name}}": most("shoal_worker_last_heartbeat_seconds", "job_name", ALL)}, "s"),
    View("Deepest inbox", "Most events that stood in line for a job at a time, in the last minute.",
         {"{{job_name}}": most("shoal_job_inbox_events", "job_name", ALL)}),
    View("Event loop", "How late a controller's event loop was at most in the last minute: so long all that it serves "
         "had to wait.", {"{{instance}}": most("shoal_event_loop_lag_seconds", "instance", ALL)}, "s"),
]  # fmt: skip
LEADER_AND_STORE = [
    View("Leader", "Which controller leads.", {"{{instance}}": most("shoal_leader", "instance", ALL)}),
    View("Store, slowest of 20", "Time within which 19 of 20 requests to the store are answered, by kind.",
         {"{{request}}": slowest_of_20("shoal_store_request_duration_seconds", "request")}, "s"),
    View("Store, mean", "Mean time of a request to the store, by kind.",
         {"{{request}}": growth("shoal_store_request_duration_seconds_sum", "request", ALL, function="rate") + " / "
          + growth("shoal_store_request_duration_seconds_count", "request", ALL, function="rate")}, "s"),
    View("Store, requests", "Requests to the store per second, by kind.",
         {"{{request}}": growth("shoal_store_request_duration_seconds_count", "request", ALL, function="rate")},
         "reqps"),
    View("Store, errors", "Requests to the store that failed, by kind.",
         {"{{request}}": growth("shoal_store_errors_total", "request", ALL)}, kind="areas"),
]  # fmt: skip
SESSIONS = [
    View("Sessions by state", "Workers' connections.",
         {"{{state}}": f"sum by (state) (shoal_sessions{{{ALL}}})"}, kind="areas"),
    View("Sessions refused", "Workers' connections that were refused, by why.",
         {"{{reason}}": growth("shoal_sessions_refused_total", "reason", ALL)}, kind="areas"),
    View("Pods waiting", "Pods of all jobs that have not started, by what they wait for.",
         {"{{reason}}": f"sum by (reason) ({most('shoal_pods_waiting', 'namespace, job_name, reason', ALL)})"},
         kind="areas"),
]  # fmt: skip
LAUNCHER = [
    View("Launcher, calls", "Calls of launchers per second.",
         {"{{launcher}} {{call}}": growth("shoal_launcher_calls_total", "launcher, call", ALL, function="rate")},
         "cps"),
    View("Launcher, errors", "Calls of launchers that failed, or took too long.",
         {"{{launcher}} {{call}} {{outcome}}": growth("shoal_launcher_calls_total", "launcher, call, outcome",
                                                      NOT_DONE)}, kind="areas"),
    View("Cluster, requests", "Requests to the API server of a Kubernetes cluster, per second.",
         {"{{verb}}": growth("shoal_cluster_requests_total", "verb", ALL, function="rate")}, "reqps"),
    View("Cluster, errors", "Requests to a cluster that were not done, by outcome, and those that were tried again.",
         {"{{outcome}}": growth("shoal_cluster_requests_total", "outcome", NOT_DONE),
          "tried again": growth("shoal_cluster_retries_total", where=ALL)}),
]  # fmt: skip
REST = [
    View("REST, requests", "Requests per second, by route.",
         {"{{method}} {{route}}": growth("shoal_rest_requests_total", "method, route", ALL, function="rate")}, "reqps"),
    View("REST, slowest of 20", "Time within which 19 of 20 answers begin, by route.",
         {"{{method}} {{route}}": slowest_of_20("shoal_rest_request_duration_seconds", "method, route")}, "s"),
    View("REST, statuses", "Requests by status; `none`: the client had gone before an answer.",
         {"{{code}}": growth("shoal_rest_requests_total", "code", ALL)}, kind="areas"),
]  # fmt: skip

Rows = Mapping[str, Sequence[View]]
TRAINING_HEALTH: Rows = {
    "Progress": PROGRESS,
    "Training": TRAINING,
    "Changes of the world": CHANGES,
    "Workers": WORKERS,
    "GPUs": GPUS,
    "Checkpoints": CHECKPOINTS,
}
CONTROLLER: Rows = {
    "Now": FLEET,
    "Jobs": JOBS,
    "Leader and store": LEADER_AND_STORE,
    "Sessions": SESSIONS,
    "Launcher": LAUNCHER,
    "REST": REST,
}
RESIZES = f"{growth('shoal_resizes_total', 'reason', DONE, '1m')} > 0"


def panel(view: View) -> Builder[PanelModel]:
    """A panel as Grafana takes it."""
    builders = {
        "lines": timeseries.Panel, "areas": timeseries.Panel, "number": stat.Panel, "bars": bargauge.Panel,
        "table": table.Panel,
    }  # fmt: skip
    built = builders[view.kind]()
    built = built.title(view.title).description(view.about).datasource(SOURCE).unit(view.unit).span(view.width)
    built = built.height(4 if view.kind == "number" else 8)
    if isinstance(built, timeseries.Panel):
        built = built.legend(common.VizLegendOptions().show_legend(True)).line_width(1)
    if view.kind == "areas":
        built = built.fill_opacity(40).stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    if isinstance(built, stat.Panel):
        named = any(legend.startswith("{{") for legend in view.queries)
        last = common.ReduceDataOptions().calcs(["lastNotNull"])
        built = built.reduce_options(last).text_mode(BigValueTextMode.NAME if named else BigValueTextMode.AUTO)
    if isinstance(built, table.Panel):
        built = built.with_transformation(DataTransformerConfig(id_val="merge", options={}))
    if isinstance(built, bargauge.Panel):
        built = built.orientation(VizOrientation.HORIZONTAL)
    for number, (legend, query) in enumerate(view.queries.items()):
        asked = (
            prometheus.Dataquery().expr(query).legend_format(legend).ref_id(chr(ord("A") + number)).datasource(SOURCE)
        )
        asked = asked.format(PromQueryFormat.TABLE if view.kind == "table" else PromQueryFormat.TIME_SERIES)
        built = built.with_target(asked.instant() if view.kind in ("number", "bars", "table") else asked.range())
    return built


def of_values(name: str, label: str, query: str) -> dashboard.QueryVariable:
    variable = dashboard.QueryVariable(name).label(label).datasource(SOURCE).query(query)
    return variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)


def board(title: str, uid: str, rows: Rows) -> dashboard.Dashboard:
    """A dashboard with its variables; one of a job has the variable `job` and its changes as annotations."""
    of_a_job = rows is TRAINING_HEALTH
    made = dashboard.Dashboard(f"Shoal / {title}").uid(uid).tags(["shoal"]).timezone("browser").readonly()
    made = made.time("now-1h", "now").refresh("15s").tooltip(DashboardCursorSync.CROSSHAIR)
    made = made.with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    namespaces = of_values("namespace", "Namespace", "label_values(shoal_leader, namespace)")
    everything = VariableOption(selected=True, text="All", value="$__all")
    made = made.with_variable(namespaces.include_all(True).all_value(".*").multi(True).current(everything))
    if of_a_job:
        made = made.with_variable(of_values("job", "Job", f"label_values(shoal_job_step{{{ALL}}}, job_name)"))
        made = made.annotation(Resizes())
    for name, views in rows.items():
        made = made.with_row(dashboard.Row(name))
        for view in views:
            made = made.with_panel(panel(view))
    return made


class Resizes(Builder[AnnotationQuery]):
    """Each change of the world, by its reason."""

    def build(self) -> AnnotationQuery:
        return WithTitle(name="Changes of the world", datasource=SOURCE, enable=True, icon_color="orange", expr=RESIZES)


class WithTitle(AnnotationQuery):
    """What Grafana reads of a query's annotations and the SDK has no field for."""

    def to_json(self) -> dict[str, object]:
        return {**super().to_json(), "titleFormat": "{{reason}}", "step": "15s", "useValueForTime": False}


def written() -> dict[Path, str]:
    """The files, by their place."""
    boards = {
        "training-health": board("Training health", "shoal-training-health", TRAINING_HEALTH),
        "controller": board("Controller", "shoal-controller", CONTROLLER),
    }
    return {
        FOLDER / f"{name}.json": json.dumps(made.build(), cls=JSONEncoder, indent=2, ensure_ascii=False) + "\n"
        for name, made in boards.items()
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in written().items():
        file.write_text(text)
