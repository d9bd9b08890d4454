"""The chart as both helms render it, for the tests in this folder: which values, which helm, and what comes out.

`make check` takes two files of values and each kind of check once; `make charts` (the variable SHOAL_CHARTS) takes all.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from api_faults import served
from api_server import kubeconfig
from ports import free_port
from whole_api import WholeCluster

Json = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "shoal"
PROGRAMS = Path(sys.prefix) / "kubernetes"
HELMS = {name: PROGRAMS / name / "helm" for name in ("helm3", "helm4")}

WHOLE = bool(os.environ.get("SHOAL_CHARTS"))
ALL_VALUES = sorted((Path(__file__).parent / "values").glob("*.yaml"))
VALUES = ALL_VALUES if WHOLE else ALL_VALUES[:2]
"""Files of values that are tried."""
IMAGES = Path(__file__).parent / "images.yaml"
NEWEST = "helm4"
RELEASE, NAMESPACE = "shoal", "ml"
HELM_SECONDS = 100
NOWHERE = Path("/nonexistent")


def with_images(arguments: Sequence[str | Path]) -> Sequence[str | Path]:
    """The arguments of a helm's command, with images that values given later may replace."""
    takes_values = arguments[0] in ("lint", "template", "install", "upgrade")
    return [arguments[0], "--values", IMAGES, *arguments[1:]] if takes_values else arguments


@contextmanager
def empty_cluster() -> Iterator[Path]:
    """The kubeconfig of an API server without a release, which a thread serves. What the chart makes once it makes only
    where there is a cluster to ask.
    """
    begun, over = threading.Event(), threading.Event()
    url = ""

    async def serve() -> None:
        nonlocal url
        async with served(WholeCluster(), free_port()) as url:
            begun.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert begun.wait(HELM_SECONDS), "the API server of the charts' tests has not begun to serve"
    with tempfile.TemporaryDirectory(prefix="shoal-charts-") as folder:
        (file := Path(folder) / "kubeconfig").write_text(kubeconfig(url))
        yield file
    over.set()
    thread.join()


CLUSTERS: list[Path] = []
"""The kubeconfig of the one that is served, where one is: conftest.py."""


def helm(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """One helm's command; what is rendered is rendered for an empty cluster."""
    renders = arguments[0] in ("template", "install")
    return _run(name, [*arguments, *["--dry-run=server"][: int(renders)]], CLUSTERS[0] if renders else NOWHERE)


def helm_without_cluster(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The same with no cluster to ask, as Argo CD renders."""
    return _run(name, arguments, NOWHERE)


def _run(name: str, arguments: Sequence[str | Path], cluster: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "KUBECONFIG": str(cluster)}
    return subprocess.run(
        [HELMS[name], *with_images(arguments)], capture_output=True, text=True, timeout=HELM_SECONDS, env=environment
    )


@cache
def rendered(values: Path, name: str = NEWEST) -> tuple[Json, ...]:
    """All manifests of the chart with these values."""
    done = helm(name, "template", RELEASE, CHART, "--namespace", NAMESPACE, "--values", values)
    assert done.returncode == 0, done.stderr
    return tuple(document for document in yaml.safe_load_all(done.stdout) if document)


def of_kind(manifests: tuple[Json, ...], *kinds: str) -> Iterator[Json]:
    return (one for one in manifests if one["kind"] in kinds)


def pods(manifests: tuple[Json, ...]) -> Iterator[tuple[str, Json, Json]]:
    """Every pod or template of one: its name, metadata and spec."""
    for one in of_kind(manifests, "Deployment", "StatefulSet", "Job", "Pod", "CronJob"):
        spec = one["spec"]["jobTemplate"]["spec"] if one["kind"] == "CronJob" else one["spec"]
        template = one if one["kind"] == "Pod" else spec["template"]
        yield f"{one['kind']} {one['metadata']['name']}", template["metadata"], template["spec"]


def containers(manifests: tuple[Json, ...]) -> Iterator[tuple[str, Json]]:
    for name, _, spec in pods(manifests):
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            yield f"{name}, {container['name']}", container
