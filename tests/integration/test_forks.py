"""Workers fork: data loaders do. Neither the children nor whoever watches the worker may be harmed by it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from integration.cluster import Cluster, ended, fork, until
from integration.forking import train_and_evaluate
from integration.small_controller import SmallController
from matrices import shortened
from rule import Edit, holds, rule
from shoal_protos.messages import Heartbeat

WORKER = Path(__file__).resolve().parents[2] / "worker"
FIRST_IMPORTS = sorted(
    ".".join(file.relative_to(WORKER).with_suffix("").parts)
    for file in WORKER.rglob("*.py")
    if re.search(r"^(import|from) grpc", file.read_text(), re.MULTILINE)
)


@rule(
    "gRPC's fork handlers are disabled in a worker before gRPC is imported: they crash children that are forked "
    "beside a busy stream",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_protos.channel",
        'GRPC_VARIABLES = {"GRPC_ENABLE_FORK_SUPPORT": "0"',
        'GRPC_VARIABLES = {"GRPC_ENABLE_FORK_SUPPORT": "1"',
    ),
)
@pytest.mark.parametrize("module", FIRST_IMPORTS)
def test_grpcs_fork_handlers_are_off_whichever_module_is_imported_first(module: str) -> None:
    looks = f"""
import builtins, os
real = builtins.__import__
def look(name, *rest, **more):
    if name == "grpc":
        print(os.environ.get("GRPC_ENABLE_FORK_SUPPORT"), flush=True)
        os._exit(0)
    return real(name, *rest, **more)
builtins.__import__ = look
import {module}
"""
    bare = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    seen = subprocess.run([sys.executable, "-c", looks], env=bare, capture_output=True, text=True, timeout=100)
    assert seen.stdout.strip() == "0", seen.stderr


@holds("gRPC's fork handlers are disabled")
@pytest.mark.parametrize("forks", shortened([100, 500], 100))
def test_no_child_of_many_that_are_forked_beside_a_talking_session_dies(tmp_path: Path, forks: int) -> None:
    result = tmp_path / "ends"
    with SmallController() as controller:
        controller.heartbeat_seconds = 0.01
        arguments = {"controller": controller.address, "count": forks, "result": str(result)}
        pid = fork("integration.forking:fork_beside_a_session", arguments, {}, tmp_path / "log")
        controller.receives(Heartbeat)
        until("the forks to be done", lambda: pid in ended(), patience=100)
    assert json.loads(result.read_text()) == {"0": forks}, (tmp_path / "log").read_text()


@holds("gRPC's fork handlers are disabled")
def test_a_data_loader_with_workers_in_the_loop_harms_no_worker_and_no_bit() -> None:
    script = f"{train_and_evaluate.__module__}:{train_and_evaluate.__name__}"
    with Cluster(workers=2, options={"max_steps": 12}, script=script) as cluster:
        cluster.wait_undisturbed()
        assert cluster.reasons() == ["start"]
        assert [cluster.wait_exit(worker) for worker in ("w0", "w1")] == [0, 0]
        assert cluster.result("w0")["seen"] == 8 * 12


@holds("A forked child closes Shoal's")
def test_a_killed_worker_whose_children_live_on_is_known_to_be_dead_at_once() -> None:
    with Cluster(workers=2, options={"max_steps": 30}, spec={"workers": {"wanted": 3}}, pace=0.03) as cluster:
        cluster.add(children=2)
        cluster.wait_step(3)
        children = psutil.Process(cluster.pids["w2"]).children()
        assert [established(child) for child in children] == [[], []]
        assert established(psutil.Process(cluster.pids["w2"]))
        cluster.kill("w2")
        cluster.wait_world(2)
        assert all(child.is_running() for child in children)
        assert "refuses connections" in cluster.messages("lost")[0] or "has seen it end" in cluster.messages("lost")[0]
        cluster.wait_undisturbed()


def established(process: psutil.Process) -> list[int]:
    """The far ends' ports of a process's connections."""
    connections = process.net_connections(kind="tcp")
    return [one.raddr.port for one in connections if one.status == psutil.CONN_ESTABLISHED]


@rule(
    "A forked child closes Shoal's sockets and no others, and the parent keeps all of them: a killed worker "
    "whose children live on is detected at once",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit("shoal.process.forks", "os.register_at_fork(after_in_child=_let_go)\n", ""),
        Edit("shoal.group.rendezvous", "        let_go_in_children(self._sockets)\n", ""),
        Edit("shoal.group.gloo", "    let_go_in_children(_is_of_a_pair)\n", ""),
        Edit("shoal.session.thread", "        with self._connections:\n", "        if self._connections:\n"),
        Edit("shoal.process.forks", "frozenset(_sockets().values()) - self._before\n", "None\n"),
        Edit("shoal.process.forks", "    socket.setdefaulttimeout(None)  #", "    # "),
    ],
)
def test_children_let_go_of_shoals_sockets_alone_and_the_parent_keeps_all(tmp_path: Path) -> None:
    result = tmp_path / "told"
    pid = fork("integration.forking:fork_beside_own_sockets", {"result": str(result)}, {}, tmp_path / "log")
    until("the forks to be done", lambda: pid in ended())
    assert result.exists(), (tmp_path / "log").read_text()
    assert json.loads(result.read_text()) == {
        "while_opening": [],
        "settled": ["server", "earlier", "later"],
        "left": ["opened"],
        "blocking": True,
        "answers": ["goes on", True],
    }
