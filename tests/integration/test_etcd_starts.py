"""How a controller's process starts with an etcd that it cannot use: it ends with status 2 and one sentence that names
the endpoint, or waits where waiting can help.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from etcd_cluster import PASSWORD, Cluster, etcd_cluster
from etcd_status import server_of_version
from integration.cluster import ended, fork, send_signal, until
from ports import free_port
from shoal_protos.messages import WRONG_USE

READ_ONLY = "reader"


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Cluster]:
    """With users: `shoal` has all rights below /shoal, `reader` may only read there."""
    with etcd_cluster(tmp_path / "etcd") as cluster:
        cluster.ask_for_users("/shoal/")
        cluster.ctl("user", "add", f"{READ_ONLY}:{PASSWORD}")
        cluster.ctl("role", "add", READ_ONLY)
        cluster.ctl("role", "grant-permission", "--prefix=true", READ_ONLY, "read", "/shoal/")
        cluster.ctl("user", "grant-role", READ_ONLY, READ_ONLY)
        yield cluster


@contextmanager
def controller(folder: Path, store: str, password: str = "") -> Iterator[tuple[int, int, Path]]:
    """A process of `shoal controller`: its pid, its REST port, and what it writes."""
    http = free_port()
    arguments = {"http": f"127.0.0.1:{http}", "grpc": f"127.0.0.1:{free_port()}", "store": store, "data": str(folder)}
    env: Mapping[str, str] = {"SHOAL_ETCD_PASSWORD": password} if password else {}
    log = folder / f"{http}.log"
    log.touch()
    pid = fork("integration.scripts:controller", arguments, env, log)
    try:
        yield pid, http, log
    finally:
        send_signal(pid, 9)
        until("the controller to be gone", lambda: pid in ended())


def refusal(folder: Path, store: str, password: str = "") -> str:
    """The one sentence with which it ends."""
    with controller(folder, store, password) as (pid, _, log):
        until("the controller to end", lambda: pid in ended())
        assert ended()[pid] == WRONG_USE, log.read_text()
    [sentence] = log.read_text().splitlines()
    assert sentence.startswith("shoal: store etcd://"), sentence
    return sentence.removeprefix("shoal: ")


def test_what_no_waiting_mends_ends_a_controller_with_status_2_and_a_sentence_that_names_the_endpoint(
    etcd: Cluster, tmp_path: Path
) -> None:
    place = etcd.addresses[0]
    assert refusal(tmp_path, f"etcd://{place}/a//b").startswith(f"store etcd://{place}/a//b: '/a//b' is not a valid ")
    assert refusal(tmp_path, f"etcd://shoal@{place}/shoal", "wrong") == (
        f"store etcd://{place}/shoal: etcd at {place} answers: etcdserver: authentication failed, invalid user ID or "
        "password (to the login of user shoal)"
    )
    for user, prefix in (("shoal", "/other"), (READ_ONLY, "/shoal")):
        assert refusal(tmp_path, f"etcd://{user}@{place}{prefix}", PASSWORD) == (
            f"store etcd://{place}{prefix}: etcd at {place} answers: etcdserver: permission denied; the user needs a "
            f"role that may read and write all keys with the prefix {prefix}/"
        )
    with server_of_version("3.3.27") as old:
        sentence = refusal(tmp_path, f"etcd://{old}/shoal")
    assert sentence == f"store etcd://{old}/shoal: etcd at {old} has version '3.3.27'; expected 3.4 or newer"


def test_a_store_that_cannot_be_reached_is_said_once_and_waited_for_and_nobody_is_sent_there(tmp_path: Path) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    with controller(tmp_path, f"etcd://{nobody}/shoal") as (pid, port, log):

        def times_told() -> int:
            return log.read_text().count("cannot be used yet, waiting for it")

        until("it to be said", times_told)
        url = f"http://127.0.0.1:{port}"
        for _ in range(3):  # it has tried again meanwhile
            ready = httpx.get(f"{url}/readyz", trust_env=False, verify=False, timeout=60)
            assert ready.status_code == 503 and ready.headers["retry-after"]
            assert httpx.get(f"{url}/healthz", trust_env=False, verify=False, timeout=60).status_code == 200
        assert pid not in ended() and times_told() == 1
