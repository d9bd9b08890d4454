"""The chart's etcd and its controller as real processes: three members and a controller with the arguments, variables
and certificates that the chart renders. Only hosts, ports and folders are this machine's.
"""

from __future__ import annotations

import base64
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from charts.rendering import Json, of_kind, rendered
from etcd_cluster import etcd_program
from ports import free_port

VALUES = "tls: {source: generated, workers: true}\n"
READY_SECONDS = 100
END_SECONDS = 100
COMMAND_SECONDS = 100
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


@pytest.fixture
def manifests(tmp_path: Path) -> tuple[Json, ...]:
    """The chart with certificates of its own; its secrets lie in folders of their names."""
    values = tmp_path / "values.yaml"
    values.write_text(VALUES)
    made = rendered(values)
    for secret in of_kind(made, "Secret"):
        folder = tmp_path / secret["metadata"]["name"]
        folder.mkdir()
        for name, content in secret["data"].items():
            (folder / name).write_bytes(base64.b64decode(content))
    return made


def container_of(manifests: tuple[Json, ...], kind: str) -> tuple[Json, dict[str, str]]:
    """The pod's container, and the secret that lies at each place of it."""
    (one,) = of_kind(manifests, kind)
    spec = one["spec"]["template"]["spec"]
    secrets = {volume["name"]: volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume}
    (container,) = spec["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    return container, {place: secrets[name] for place, name in mounts.items() if name in secrets}


@contextmanager
def process(command: list[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs for as long as the context lasts, and ends when it is told to."""
    with log.open("wb") as file, subprocess.Popen(command, env=environment, stdout=file, stderr=file) as started:
        try:
            yield started
        finally:
            started.send_signal(signal.SIGTERM)
            started.wait(END_SECONDS)


def members(manifests: tuple[Json, ...], folder: Path) -> tuple[dict[str, str], list[list[str]]]:
    """Where each member's address is on this machine, and each member's command."""
    container, secrets = container_of(manifests, "StatefulSet")
    ports = {f"shoal-etcd-{number}": {kind: free_port() for kind in ("2379", "2380", "2381")} for number in range(3)}
    places = {
        f"{name}.shoal-etcd.ml.svc:{port}": f"localhost:{here}"
        for name, own in ports.items()
        for port, here in own.items()
    }
    commands = []
    for name, own in ports.items():
        given = [argument.replace("$(POD_NAME)", name) for argument in container["args"]]
        here = places | {f"0.0.0.0:{port}": f"127.0.0.1:{mine}" for port, mine in own.items()}
        here |= {f"={place}/": f"={folder / secret}/" for place, secret in secrets.items()}
        commands.append([etcd_program(), *replaced(given, here | {"/data/": f"{folder / name}/"})])
    return places, commands


def replaced(words: list[str], by: Mapping[str, str]) -> list[str]:
    for old, new in by.items():
        words = [word.replace(old, new) for word in words]
    return words


def controller(
    manifests: tuple[Json, ...], folder: Path, places: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Its command and environment; it starts no pods here."""
    container, secrets = container_of(manifests, "Deployment")
    here = dict(places) | {f"{place}/": f"{folder / secret}/" for place, secret in secrets.items()}
    given = {one["name"]: replaced([one["value"]], here)[0] for one in container["env"] if "value" in one}
    own = {
        "SHOAL_HTTP": f"127.0.0.1:{free_port()}",
        "SHOAL_GRPC": f"127.0.0.1:{free_port()}",
        "SHOAL_LAUNCHERS": "none",
    }
    own |= {"SHOAL_TOKEN": (folder / "shoal-token" / "token").read_text(), "SHOAL_DATA": str(folder / "data")}
    return container["args"], {"PATH": PATH, "HOME": str(folder), "POD_IP": "127.0.0.1", **given, **own}


def test_a_controller_whose_etcd_is_not_there_lives_is_not_ready_says_why_once_and_ends_when_it_is_told(
    manifests: tuple[Json, ...], tmp_path: Path
) -> None:
    places, _ = members(manifests, tmp_path)
    command, environment = controller(manifests, tmp_path, places)
    container, _ = container_of(manifests, "Deployment")
    alive, ready = (container[kind]["httpGet"]["path"] for kind in ("livenessProbe", "readinessProbe"))
    authority = ssl.create_default_context(cafile=tmp_path / "shoal-tls" / "ca.crt")
    url, log = f"https://localhost:{environment['SHOAL_HTTP'].rpartition(':')[2]}", tmp_path / "controller.log"
    with (
        process(command, environment, log) as started,
        httpx.Client(verify=authority, trust_env=False, timeout=60) as client,
    ):
        wait_for(lambda: client.get(f"{url}{alive}").is_success, "the probe of its life", tmp_path)
        wait_for(lambda: "waiting for it" in log.read_text(), "the sentence", tmp_path)
        answer = client.get(f"{url}{ready}")
        assert answer.status_code == 503 and client.get(f"{url}{alive}").is_success
    assert started.returncode == 0
    (sentence,) = [line for line in log.read_text().splitlines() if "waiting for it" in line]
    assert next(iter(places.values())) in sentence


def wait_for(done: Callable[[], bool], goal: str, folder: Path) -> None:
    deadline, pause = time.monotonic() + READY_SECONDS, threading.Event()
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            if done():
                return
        pause.wait(0.2)
    logs = "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in sorted(folder.glob("*.log")))
    raise AssertionError(f"{goal}: not after {READY_SECONDS} s\n{logs}")


def wait_ready(url: str, authority: ssl.SSLContext, folder: Path) -> None:
    with httpx.Client(verify=authority, trust_env=False, timeout=2) as client:
        wait_for(lambda: client.get(f"{url}/readyz?store").is_success, "a controller that is ready", folder)


@pytest.mark.timeout(240)
def test_members_and_controllers_trust_each_other_with_the_charts_certificates(
    manifests: tuple[Json, ...], tmp_path: Path
) -> None:
    places, commands = members(manifests, tmp_path)
    command, environment = controller(manifests, tmp_path, places)
    authority = ssl.create_default_context(cafile=tmp_path / "shoal-tls" / "ca.crt")
    port = int(environment["SHOAL_HTTP"].rpartition(":")[2])
    with ExitStack() as ends:
        for number, member in enumerate(commands):
            ends.enter_context(process(member, {"PATH": PATH}, tmp_path / f"etcd-{number}.log"))
        ends.enter_context(process(command, environment, tmp_path / "controller.log"))
        wait_ready(f"https://localhost:{port}", authority, tmp_path)
        _has_the_name_of_a_pod(authority, port)
        _shows_its_jobs_as_the_notes_say(environment, port)


def _has_the_name_of_a_pod(authority: ssl.SSLContext, port: int) -> None:
    """By which controllers reach each other."""
    with socket.create_connection(("127.0.0.1", port), timeout=100) as plain:
        authority.wrap_socket(plain, server_hostname="127-0-0-1.shoal-workers.ml.svc").close()


def _shows_its_jobs_as_the_notes_say(environment: Mapping[str, str], port: int) -> None:
    command = ["shoal", "jobs", "--url", f"https://localhost:{port}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    assert done.returncode == 0, done.stderr
