"""docs/first_job.md, typed: its files are written as the page shows them, its commands given to a shell in its order.

kubectl, shoal, the controller, the bucket (moto) and the pods' processes are real. Stood in are: the API server and
kubelets (`whole_api.py`, `kubelet.py`), what the chart brings (the definition, the secret with the token), `docker`, by
which the image's file is where the Dockerfile copies it, and `port-forward`, whose address is the controller's own.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import boto3
import pytest
import yaml
from api_server import SECRETS
from charts.rendering import PROGRAMS, ROOT
from cluster_choice import NAMESPACE
from custom_resources import definition
from integration.cluster import ended, fork, until
from integration.job_of_pods import LOOPBACK, ForkedPod, JobOfPods
from object_store import object_store
from pod_cluster import PodCluster, pod_cluster
from whole_api import WholeCluster

PAGE = ROOT / "docs" / "first_job.md"
FORWARDED = "127.0.0.1:7070"
STOOD_IN = ("docker ", "kubectl --namespace ml port-forward ")
COMMAND_SECONDS = 120


class FirstJob(JobOfPods):
    """The controller; its job comes from the page."""

    def _submit(self) -> None:
        self.job_name = "demo"


class Newcomer:
    """Has a folder with the page's files, and a shell that keeps what it exports."""

    def __init__(self, folder: Path, job: FirstJob, kubeconfig: Path) -> None:
        self._folder, self._job = folder, job
        (folder / "bin").mkdir()
        (folder / "bin" / "kubectl").symlink_to(PROGRAMS / "helm4" / "kubectl")
        path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = {"PATH": path, "KUBECONFIG": str(kubeconfig), "HOME": str(folder)}
        self._kept: list[str] = []

    def types(self, command: str) -> str:
        """What it prints; nothing of a command that is stood in."""
        if command.startswith(STOOD_IN):
            return ""
        here = re.sub(r"--namespace ml\b", f"--namespace {NAMESPACE}", command)
        here = here.replace(f"http://{FORWARDED}", self._job.url)
        if re.match(r"(export )?[A-Z_]+=", here):
            self._kept.append(here)
        lines = [*self._kept, *([here] if here not in self._kept else [])]
        done = subprocess.run(
            ["bash", "-ec", "\n".join(lines)], cwd=self._folder, env=self._environment, text=True,
            capture_output=True, timeout=COMMAND_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def commands(section: str) -> list[str]:
    """Those of a section of the page, in their order."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [line for block in blocks("bash", text) for line in block.splitlines()]


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The folder that stands in for the image's file system, with what the page's Dockerfile copies."""
    (script,), (dockerfile,) = blocks("python", PAGE.read_text()), blocks("dockerfile", PAGE.read_text())
    (tmp_path / "train.py").write_text(script)
    ((source, target),) = re.findall(r"^COPY (\S+) (\S+)$", dockerfile, flags=re.MULTILINE)
    built = tmp_path / "image" / target.lstrip("/")
    built.parent.mkdir(parents=True)
    built.write_bytes((tmp_path / source).read_bytes())
    return tmp_path / "image"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the bucket is that the page's script saves to."""
    with object_store(monkeypatch):
        boto3.client("s3").create_bucket(Bucket="checkpoints")
        yield os.environ["AWS_ENDPOINT_URL"]


def installed(pods: PodCluster, token: str) -> None:
    """What the chart brings, as far as the page asks for it."""
    secret = {"metadata": {"name": "shoal-token"}, "data": {"token": base64.b64encode(token.encode()).decode()}}
    cluster = pods.cluster
    assert isinstance(cluster, WholeCluster)
    pods.do(lambda: (cluster.put(SECRETS, secret), cluster.install(definition())))


def alone(image: Path, folder: Path) -> str:
    """The fingerprint of the page's script without a cluster."""
    (folder / "go").touch()
    script = (image / "app" / "train.py").read_text().replace("s3://checkpoints/demo", str(folder / "saves"))
    (folder / "alone.py").write_text(script)
    pid = fork(
        "integration.first_job:run", {"script": str(folder / "alone.py"), "go": str(folder / "go")}, {}, folder / "log"
    )
    until("the script alone to end", lambda: pid in ended())
    return fingerprint((folder / "log").read_text())


def fingerprint(printed: str) -> str:
    (found,) = set(re.findall(r"fingerprint ([0-9a-f]{64})", printed))
    return str(found)


@pytest.mark.timeout(600)
def test_the_page_of_the_first_job_can_be_typed_from_the_script_to_the_end(
    tmp_path: Path, image: Path, bucket: str
) -> None:
    def start(command: Sequence[str], env: Mapping[str, str], name: str) -> ForkedPod:
        program, script = command
        assert program == "python"
        given = {"script": f"{image}{script}", "go": str(tmp_path / "go")}
        return ForkedPod(fork("integration.first_job:run", given, env, tmp_path / f"{name}.log"))

    (tmp_path / "alone").mkdir()
    right = alone(image, tmp_path / "alone")
    manifest, _ = blocks("yaml", PAGE.read_text())
    (tmp_path / "job.yaml").write_text(manifest.replace("https://s3.example.org", bucket))
    with (
        pod_cluster(tmp_path, start, "n0", "n1", "n2", "n3", kind=WholeCluster) as pods,
        FirstJob(LOOPBACK, pods, spec={"launcher": "kubernetes"}) as job,
    ):
        installed(pods, job.token)
        user = Newcomer(tmp_path, job, pods.kubeconfig)
        for command in (*commands("The image"), *commands("The job")):
            shown = user.types(command)
        assert shown.count("demo-w") == 2, "the page's last command shows the pods"
        job.wait_step(20)
        log, _, _, followed, described = [user.types(command) for command in commands("Logs and page")]
        assert '"step": 16' in log and '"step": 16' in followed and "running" in described
        for command in commands("Scale"):
            user.types(command)
        assert job.job()["workers"]["active"] == 3
        node, taint, gone, shown, untaint = commands("Lose a node")
        user.types(node)
        user.types(taint)
        user.types(gone)
        until("the change in LAST RESIZE", lambda: re.search(r"drain|join", user.types(shown)))
        assert any("its node n" in one["message"] for one in job.events() if one["kind"] == "draining")
        job.wait_world(3)
        assert job.node_of("w3") == "n3", "the spare node has room"
        user.types(untaint)
        (tmp_path / "go").touch()
        done, delete = commands("The end")
        user.types(done)
        until(
            "rank 0 to have printed", lambda: "fingerprint" in user.types("shoal logs demo --url http://" + FORWARDED)
        )
        assert fingerprint(user.types("shoal logs demo --url http://" + FORWARDED)) == right
        assert job.report()["fingerprint"] == right
        user.types(delete)
        until("its pods to go", lambda: not pods.do(pods.cluster.pods))
    saved = boto3.client("s3").list_objects_v2(Bucket="checkpoints")["Contents"]
    assert any("manifest" in one["Key"] for one in saved), "checkpoints stay"


def test_every_command_of_the_page_is_typed_or_said_to_be_stood_in() -> None:
    sections = ("The image", "The job", "Logs and page", "Scale", "Lose a node", "The end")
    found = [line for block in blocks("bash", PAGE.read_text()) for line in block.splitlines()]
    assert [command for section in sections for command in commands(section)] == found
    assert {shlex.split(command)[0] for command in found if command.startswith(STOOD_IN)} == {"docker", "kubectl"}
    for manifest in blocks("yaml", PAGE.read_text()):
        assert yaml.safe_load(manifest)
    assert json.dumps(yaml.safe_load(blocks("yaml", PAGE.read_text())[0])), "what kubectl sends"
