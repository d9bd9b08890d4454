"""The Compose file: what it names exists, its controller and workers are started as they can be, and nobody has rights
that it does not need. It is not started here.
"""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml
from charts.prometheus import MISSING, program
from charts.rendering import ROOT, Json
from shoal_controller.api.models import JobBody
from shoal_controller.cli.worker import worker
from shoal_controller.settings import Settings

FOLDER = ROOT / "deploy"
COMPOSE: Json = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, Json] = COMPOSE["services"]
PROMTOOL = program("promtool")


def test_every_part_of_shoal_is_there() -> None:
    assert set(SERVICES) == {"etcd", "controller", "job", "worker", "prometheus", "grafana"}


def test_files_volumes_and_networks_that_are_named_exist() -> None:
    for name, service in SERVICES.items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (FOLDER / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], (
                name,
                volume,
            )
        assert set(service["networks"]) <= set(COMPOSE["networks"]), name
        assert set(service.get("depends_on", [])) <= set(SERVICES), name
        if "build" in service:
            assert (FOLDER / service["build"]["context"] / service["build"]["dockerfile"]).exists(), name


def test_images_have_versions_and_containers_no_rights() -> None:
    for name, service in SERVICES.items():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), name
        if name != "job":
            assert service["cap_drop"] == ["ALL"] and service["read_only"] != ("secrets" in service), name
            assert service["security_opt"] == ["no-new-privileges:true"], name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name


def test_each_service_can_write_its_volumes_and_be_given_its_secrets() -> None:
    """Compose cannot copy a secret into what is read-only; a new volume belongs to the image's user."""
    for name, service in SERVICES.items():
        secrets = [COMPOSE["secrets"][secret] for secret in service.get("secrets", [])]
        assert not service.get("read_only") or all("file" in secret for secret in secrets), name
        kept = [volume for volume in service.get("volumes", []) if not volume.startswith(".")]
        assert "user" not in service or not kept, name


def test_the_controller_can_be_started_with_its_settings() -> None:
    given = {
        name.removeprefix("SHOAL_").lower(): value for name, value in SERVICES["controller"]["environment"].items()
    }
    assert set(given) <= set(Settings.model_fields)
    settings = Settings(**{**given, "token": "a token"})
    assert settings.allowed_launchers == {"none"}


def test_the_job_is_one_that_its_workers_can_join() -> None:
    job = JobBody.model_validate(yaml.safe_load((FOLDER / "job.yaml").read_text()))
    command = SERVICES["worker"]["command"]
    assert command[:2] == ["shoal", worker.__name__]
    assert command[command.index("--job") + 1] == job.job
    assert (job.launcher, job.workers.wanted) == ("none", SERVICES["worker"]["deploy"]["replicas"])


def test_no_secret_is_in_the_files() -> None:
    for file in FOLDER.rglob("*.yaml"):
        for value in re.findall(r"SHOAL_TOKEN: (.*)", file.read_text()):
            assert "${SHOAL_TOKEN:" in value, file


@pytest.mark.skipif(PROMTOOL is None, reason=MISSING)
def test_prometheus_can_read_its_configuration() -> None:
    assert PROMTOOL is not None
    command = [PROMTOOL, "check", "config", "--syntax-only", FOLDER / "prometheus.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
