"""Two controllers over a real etcd of three servers: whatever becomes of them, the job ends with the undisturbed bits.

`make check` runs one of each kind; `make outages` runs all (the variable SHOAL_OUTAGES).
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from etcd_cluster import Cluster as Etcd
from etcd_cluster import etcd_cluster
from integration.cluster import send_signal, state_of, until
from integration.controllers import ALL_OUTAGES, Controllers, outages
from integration.proxy import Proxy
from rule import holds

LONG: dict[str, Any] = {"max_steps": 30}
TWO_MIRRORS: dict[str, Any] = {**LONG, "mirrors": 2}
PACE = 0.03
PATIENT = {"stall_seconds": 600.0}
"""A job that waits for its store has not stalled."""
INSTANTS = ["prepare", "group", "promote"]
"""Of a world that is being built, at which a worker is frozen so that it is still under way."""


def one_or(everything: list[Any]) -> list[Any]:
    return everything if ALL_OUTAGES else everything[:1]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    with etcd_cluster(tmp_path / "etcd", 3) as cluster:
        yield cluster


@contextmanager
def routed(
    etcd: Etcd, cluster: Controllers, names: str, delay_seconds: float = 0.0
) -> Iterator[dict[str, list[Proxy]]]:
    """The controllers of these names reach etcd through proxies of their own. To be entered before they start."""
    with ExitStack() as ends:
        routes = {name: [Proxy(int(one.rpartition(":")[2]), delay_seconds) for one in etcd.addresses] for name in names}
        for proxies in routes.values():
            for proxy in proxies:
                ends.enter_context(proxy.running())
        cluster.routes = {name: [proxy.port for proxy in proxies] for name, proxies in routes.items()}
        yield routes


# ---- etcd


@outages
def test_each_server_of_etcd_is_killed_and_started_again_in_turn(etcd: Etcd) -> None:
    with Controllers(etcd, workers=4, options={**TWO_MIRRORS, "max_steps": 60}, pace=PACE) as cluster:
        cluster.wait_step(2)
        for number, node in enumerate(etcd.nodes, 1):
            node.kill()
            cluster.kill(f"w{number}")
            cluster.wait_world(3)
            cluster.add()
            cluster.wait_world(4)
            etcd.start(node)
        cluster.wait_undisturbed()


def test_the_leading_server_of_etcd_is_killed_in_a_resize(etcd: Etcd) -> None:
    faults = "w1@4:exchange:kill,w2@3:prepare:stop"
    with Controllers(etcd, workers=4, options=TWO_MIRRORS, faults=faults, pace=PACE) as cluster:
        until("w2 to be frozen", lambda: state_of(cluster.pids["w2"]) == "T")
        leader = etcd.leader()
        leader.kill()
        cluster.cont("w2")
        cluster.wait_world(3)
        etcd.start(leader)
        cluster.wait_undisturbed()


@holds("While its lease has lapsed a")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seconds", one_or([4, 30, 120]))
def test_etcd_is_gone_and_a_worker_dies_meanwhile(etcd: Etcd, seconds: int) -> None:
    with Controllers(etcd, workers=3, options=LONG, spec=PATIENT, pace=PACE) as cluster:
        cluster.wait_step(2)
        generation = cluster.job()["generation"]
        for node in etcd.nodes:
            node.kill()
        cluster.kill("w1")
        threading.Event().wait(seconds)  # for so long it is gone: there is no event to wait for
        job = cluster.job()
        assert job["generation"] == generation and "nothing is decided until it does" in job["reason"]
        assert all(one.runs for one in cluster.all)
        etcd.start()
        cluster.wait_world(2)
        cluster.wait_undisturbed()


def test_training_goes_on_while_etcd_is_gone(etcd: Etcd) -> None:
    with Controllers(etcd, workers=2, options={"max_steps": 100}, pace=PACE) as cluster:
        cluster.wait_step(2)
        for node in etcd.nodes:
            node.kill()
        until("the outage to be noticed", lambda: "nothing is decided" in cluster.job()["reason"])
        cluster.release()
        until("the scripts to end", lambda: all(cluster.result_file(worker).exists() for worker in ("w0", "w1")))
        etcd.start()
        cluster.wait_undisturbed()


# ---- the leader


@holds("Of any number of controllers one")
@pytest.mark.parametrize("instant", one_or(INSTANTS))
@pytest.mark.parametrize("manner", [signal.SIGKILL, signal.SIGSTOP])
def test_the_leader_dies_or_freezes_in_a_resize(etcd: Etcd, manner: signal.Signals, instant: str) -> None:
    """A frozen one goes on when another one has taken over: nothing that it writes or says is heard."""
    faults = f"w1@4:exchange:kill,w2@3:{instant}:stop"
    with Controllers(etcd, workers=4, options=TWO_MIRRORS, faults=faults, pace=PACE) as cluster:
        until("w2 to be frozen", lambda: state_of(cluster.pids["w2"]) == "T")
        leader = cluster.leader()
        send_signal(leader.pid, manner)
        cluster.wait_leader(but=leader)
        cluster.cont("w2")
        if manner == signal.SIGSTOP:
            send_signal(leader.pid, signal.SIGCONT)
            until("it to follow", lambda: leader.ask("/healthz").json()["term"] == 0)
        cluster.wait_world(3)
        cluster.wait_undisturbed()


@outages
@pytest.mark.parametrize("manner", [signal.SIGKILL, signal.SIGTERM])
def test_the_leader_ends_five_times_and_prints_how_soon_the_next_one_leads(etcd: Etcd, manner: signal.Signals) -> None:
    with Controllers(etcd, workers=2, options=LONG, pace=PACE) as cluster:
        cluster.wait_step(2)
        took = []
        for _ in range(5):
            leader, began = cluster.leader(), time.monotonic()
            send_signal(leader.pid, manner)
            cluster.wait_leader(but=leader)
            took.append(time.monotonic() - began)
            until("the last one to be gone", lambda one=leader: not one.runs)
            cluster.start_one(leader)
        print(f"{manner.name}: {', '.join(f'{one:.2f}' for one in sorted(took))} s")
        cluster.wait_undisturbed()


@holds("A leader that is cut off from")
def test_a_leader_that_is_cut_off_from_etcd_gives_way_and_hears_what_was_compacted_meanwhile(etcd: Etcd) -> None:
    cluster = Controllers(etcd, workers=3, options=LONG, pace=PACE)
    with routed(etcd, cluster, "ab") as routes, cluster:
        cluster.wait_step(2)
        leader = cluster.leader()
        for proxy in routes[leader.name]:
            proxy.hold()
        after = cluster.wait_leader(but=leader)
        until("it to give way", lambda: leader.ask("/v1/jobs/job").is_success and not leader.leads())
        cluster.kill("w1")
        until("the world without w1", lambda: after.ask("/v1/jobs/job").json()["workers"]["active"] == 2)
        etcd.compact()
        for proxy in routes[leader.name]:
            proxy.let_go()
        cluster.kill_one(after)
        assert cluster.wait_leader(but=after) is leader
        cluster.wait_undisturbed()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("rescales", one_or([2, 20]))
def test_the_controllers_are_restarted_one_after_the_other_while_the_job_is_scaled(etcd: Etcd, rescales: int) -> None:
    with Controllers(etcd, workers=3, options={"max_steps": 40 * rescales}, spec=PATIENT, pace=0.1) as cluster:
        cluster.wait_step(2)
        for number in range(rescales):
            size, one = 2 + number % 2, cluster.all[number % 2]
            cluster.scale(size)
            if size == 3:
                cluster.add()
            cluster.kill_one(one)
            cluster.start_one(one)
            cluster.wait_world(size)
        cluster.wait_undisturbed()


def test_all_goes_well_where_etcd_is_slow_to_reach(etcd: Etcd) -> None:
    cluster = Controllers(etcd, workers=3, options=LONG, pace=PACE)
    with routed(etcd, cluster, "ab", delay_seconds=0.1), cluster:  # each way
        cluster.wait_step(2)
        cluster.kill("w1")
        cluster.wait_world(2)
        cluster.kill_leader()
        cluster.add()
        cluster.wait_world(3)
        cluster.wait_undisturbed()
