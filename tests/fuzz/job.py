"""The job that trains while its controller is fuzzed, and what must be so afterwards: nothing has happened to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import httpx
from fuzz.rest import Outcome, fuzz_rest
from fuzz.sessions import Ends, Target, fuzz_sessions, genuine
from integration.cluster import Cluster

WORKERS = 3
LANES = 4
PACE = 0.5
"""Seconds of a micro-batch, of which a step has two after each other: a step takes a second while it is fuzzed."""
FULL: dict[str, Any] = {"workers": {"wanted": WORKERS, "max": WORKERS}}
"""Whoever says a genuine hello may wait to become a member, and must not become one."""
SECRET = "the operators' own"


class Guarded(Cluster):
    """A cluster whose controller asks for a token, and starts nothing for whoever sends it a job."""

    token = SECRET
    settings: ClassVar[Mapping[str, str]] = {"SHOAL_LAUNCHERS": "none"}


@contextmanager
def unharmed(seconds: int) -> Iterator[Guarded]:
    """A job that trains, for so long if it must: at the end it must have, in its first world, to the undisturbed bits,
    without a word of harm in its history or an error in the controller's log.
    """
    with Guarded(workers=WORKERS, options={"max_steps": seconds, "lanes": LANES}, spec=FULL, pace=PACE) as cluster:
        cluster.wait_step(2)
        yield cluster
        cluster.wait_step(cluster.job()["step"] + 2)
        report = cluster.wait_undisturbed()
        assert [world["generation"] for world in report["generations"]] == [1], "its world has changed"
        members = {f"w{number}" for number in range(WORKERS)}
        touched = [
            event["message"] for event in cluster.events() if event["worker"] in members and event["kind"] in BAD
        ]
        assert touched == []
        log = (cluster.folder / "controller-1.log").read_text()
        defects = [line[:2000] for line in log.splitlines() if '"level": "error"' in line or "Traceback" in line]
        assert defects == [], "the controller's log has errors"


BAD = ("lost", "suspected", "failed", "claim_refused", "draining", "left", "disconnected")
"""Kinds of events that must not concern a worker of the job."""


def rest(cluster: Guarded, cases: int, begin: int) -> Outcome:
    """So many requests to its controller."""
    return fuzz_rest(cluster.url, SECRET, cases, begin, cluster.job_name)


def sessions(cluster: Guarded, begin: int, numbers: range) -> Ends:
    """These sessions with its controller."""
    members = [f"w{number}" for number in range(WORKERS)]
    asked = httpx.post(
        f"{cluster.url}/v1/jobs/{cluster.job_name}/token",
        headers={"Authorization": f"Bearer {SECRET}"},
        trust_env=False,
    )
    token = str(asked.raise_for_status().json()["token"])
    hello = genuine(cluster.options, cluster.folder)
    return fuzz_sessions(Target(cluster.grpc_port, token, SECRET, hello, members), begin, numbers)
