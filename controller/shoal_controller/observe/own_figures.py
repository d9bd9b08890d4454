"""The figures of the controller itself: requests to it, its store and a cluster, launcher calls, and event-loop lag.

The counts begin anew with the process, as Prometheus expects of counters. Each counting module gets one method and
knows nothing of Prometheus; `metrics.py` shows the registry. `LoopLag`, which `server.py` runs, measures how late a
timer of a quarter of a second comes: what delays the loop delays every heartbeat and every answer.
"""

from __future__ import annotations

import asyncio
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from shoal_controller.launchers.counted import CALLS, OUTCOMES, Counted
from shoal_controller.launchers.kubernetes.request_outcomes import ALL_VERBS
from shoal_controller.launchers.kubernetes.request_outcomes import OUTCOMES as CLUSTER_OUTCOMES
from shoal_controller.observe.recent import RecentMost

STORE_SECONDS = (0.003, 0.01, 0.05, 0.5, 5)
"""Upper bounds of buckets. A quantile over half a second is an alert, so that is one of them."""
REST_SECONDS = (0.005, 0.03, 0.2, 1, 10)

disable_created_metrics()  # type: ignore[no-untyped-call]  # no series beside those that are named


class OwnFigures:
    """Counters of requests and calls. Made by `Metrics`."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._store = Histogram(
            "shoal_store_request_duration_seconds", "Duration of requests to the store.", ("request",),
            registry=registry, buckets=STORE_SECONDS,
        )  # fmt: skip
        self._store_errors = Counter(
            "shoal_store_errors_total", "Requests to the store that failed.", ("request",), registry=registry
        )
        self._requests = Counter(
            "shoal_rest_requests_total", "Requests to REST, by route and status.", ("method", "route", "code"),
            registry=registry,
        )  # fmt: skip
        self._request_seconds = Histogram(
            "shoal_rest_request_duration_seconds", "Time until the answer of a request to REST began.",
            ("method", "route"), registry=registry, buckets=REST_SECONDS,
        )  # fmt: skip
        self._calls = Counter(
            "shoal_launcher_calls_total", "Calls of launchers, by outcome.", ("launcher", "call", "outcome"),
            registry=registry,
        )  # fmt: skip
        self._cluster = Counter(
            "shoal_cluster_requests_total", "Requests to the API server of a Kubernetes cluster, by outcome.",
            ("verb", "outcome"), registry=registry,
        )  # fmt: skip
        self._cluster_retries = Counter(
            "shoal_cluster_retries_total", "Requests to a cluster that were tried again.", ("verb",), registry=registry
        )
        for verb in ALL_VERBS:
            self._cluster_retries.labels(verb)
            for outcome in CLUSTER_OUTCOMES:
                self._cluster.labels(verb, outcome)

    def timed(self, request: str, seconds: float, failed: bool) -> None:
        """How long the store took."""
        self._store.labels(request).observe(seconds)
        self._store_errors.labels(request).inc(int(failed))

    def requested(self, method: str, route: str, code: str, seconds: float) -> None:
        """A request to REST was answered."""
        self._requests.labels(method, route, code).inc()
        self._request_seconds.labels(method, route).observe(seconds)

    def launches(self, launcher: str) -> Counted:
        """Who counts the calls of this launcher; from now on each exists, as 0."""
        for call, outcome in product(CALLS, OUTCOMES):
            self._calls.labels(launcher, call, outcome)
        return lambda call, outcome: self._calls.labels(launcher, call, outcome).inc()

    def asked(self, verb: str, outcome: str, again: bool) -> None:
        """A cluster was asked, and may be asked again."""
        self._cluster.labels(verb, outcome).inc()
        self._cluster_retries.labels(verb).inc(int(again))


LOOK_SECONDS = 0.25


class LoopLag:
    """How late the event loop is. `run` as a task."""

    def __init__(self) -> None:
        self.recent = RecentMost()

    async def run(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LOOK_SECONDS
            await asyncio.sleep(LOOK_SECONDS)
            self.recent.see(max(0.0, loop.time() - due))
