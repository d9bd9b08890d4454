"""Both images, really built and started: the demo's job trains in two containers of the worker's image.

    python -m tests.images.run                                   make images
    python -m tests.images.run --volume ~/wheels                a folder that the machine's pip looks into

Needs root on Debian or Ubuntu, several gigabytes in `--folder`, and some minutes. buildah builds in a chroot, so
neither a daemon nor a registry of images is needed: Debian with its own Python, made by debootstrap, stands in for
`python:…-slim`. Exit status 1 where a build or a start fails, the job does not succeed, or its bits are not those of
the same script alone.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from integration.cluster import until
from ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SUITE = "bookworm"
"""Of the images that the recipes name."""
PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
STEPS = 12
START_SECONDS, JOB_SECONDS = 120, 300


class Builder:
    """buildah with a storage of its own."""

    def __init__(self, folder: Path, volumes: Sequence[str]) -> None:
        self._base = [
            "buildah", "--storage-driver", "vfs", "--root", str(folder / "storage"), "--runroot", str(folder / "run")
        ]  # fmt: skip
        self._volumes = [part for one in volumes for part in ("--volume", f"{one}:{one}:ro")]

    def __call__(self, *arguments: str) -> str:
        done = subprocess.run([*self._base, *arguments], stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.strip()

    def build(self, name: str) -> None:
        self(
            "build", "--isolation", "chroot", "--network", "host", "--pull-never", "--build-arg", "PYTHON=local",
            *self._volumes, "--file", f"deploy/{name}.Dockerfile", "--tag", f"shoal-{name}:local", str(ROOT),
        )  # fmt: skip

    @contextmanager
    def started(
        self, image: str, entry: Sequence[str], *command: str, **environment: str
    ) -> Iterator[subprocess.Popen[str]]:
        """A container's main process, as the image's entry point would start it; it is terminated at the end.

        `buildah run` takes no entry point, so it is given here. tini is no process 1 in a chroot, hence its `-s`.
        """
        container = self("from", "--pull-never", image)
        settings = [part for name, value in environment.items() for part in ("--env", f"{name}={value}")]
        run = ["run", "--isolation", "chroot", "--network", "host", *settings, container, "--", *entry, *command]
        process = subprocess.Popen([*self._base, *run], stdout=subprocess.PIPE, text=True)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self("rm", container)


def install_tools() -> None:
    if not all(map(shutil.which, ("buildah", "debootstrap"))):
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "buildah", "debootstrap"]
        subprocess.run(install, check=True, stdout=subprocess.DEVNULL)


def make_base(builder: Builder, folder: Path) -> None:
    """The image `python:local`, with the machine's settings of pip, which may name indexes of its own."""
    system = folder / "debian"
    bootstrap = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(system)]
    subprocess.run(bootstrap, check=True, stdout=subprocess.DEVNULL)
    (system / "usr/bin/python").symlink_to("python3")
    shutil.copy(AUTHORITIES, system / AUTHORITIES.relative_to("/"))
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found = [line.split("=", 1) for line in listed.stdout.splitlines()]
    settings = {name.rpartition(".")[2]: value.strip("'") for name, value in reversed(found)}  # the environment's hold
    settings.pop("constraint", None)
    lines = [f"{name} = {value}" for name, value in settings.items()]
    (system / "etc/pip.conf").write_text("\n".join(["[global]", *lines, ""]))
    container = builder("from", "scratch")
    builder("add", container, str(system), "/")
    builder("config", "--env", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container)
    builder("commit", "--rm", container, "docker.io/library/python:local")
    shutil.rmtree(system)


def train(builder: Builder) -> tuple[str, str]:
    """The fingerprints of the demo's job with two workers, and of the same script alone."""
    http, grpc, token = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}", secrets.token_urlsafe(32)
    rest = httpx.Client(base_url=f"http://{http}", headers={"Authorization": f"Bearer {token}"})
    script = ("python", "-m", "shoal.demo.byte_gpt", "--steps", str(STEPS), "--json")
    controller, worker = ("tini", "-s", "--"), ("tini", "-s", "-g", "--")

    def is_ready() -> bool:
        try:
            return rest.get("/readyz").is_success
        except httpx.TransportError:
            return False

    def phase() -> str:
        return str(rest.get("/v1/jobs/demo").raise_for_status().json()["phase"])

    with ExitStack() as all_of_them:
        settings = {"SHOAL_HTTP": http, "SHOAL_GRPC": grpc, "SHOAL_TOKEN": token, "SHOAL_LAUNCHERS": "none"}
        start = all_of_them.enter_context
        start(builder.started("shoal-controller:local", controller, "shoal", "controller", **settings))
        until("the controller is ready", is_ready, START_SECONDS)
        job = {"job": "demo", "launcher": "none", "workers": {"wanted": 2, "min": 2}}
        rest.post("/v1/jobs", json=job).raise_for_status()
        joins = ("shoal", "worker", "--controller", grpc, "--job", "demo", "--")
        limits = {"SHOAL_TOKEN": token, "OMP_NUM_THREADS": "1"}
        image = "shoal-worker:local"
        workers = [start(builder.started(image, worker, *joins, *script, **limits)) for _ in range(2)]
        until("the job is over", lambda: phase() in ("succeeded", "failed"), JOB_SECONDS)
        if phase() == "failed":
            raise RuntimeError(rest.get("/v1/jobs/demo").json()["reason"])
        together = fingerprint(*workers)
        with builder.started(image, worker, *script, OMP_NUM_THREADS="1") as process:
            return together, fingerprint(process)


def fingerprint(*processes: subprocess.Popen[str]) -> str:
    """The fingerprint that the script of rank 0, and no other, prints at its end."""
    (line,) = (line for one in processes for line in one.communicate(timeout=JOB_SECONDS)[0].splitlines())
    return str(json.loads(line)["fingerprint"])


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--folder", type=Path, default=ROOT / ".venv/images", help="removed at the end")
    arguments.add_argument("--volume", action="append", default=[], help="folder that builds may read")
    given = arguments.parse_args()
    if os.geteuid() or not shutil.which("apt-get"):
        print("make images needs root on Debian or Ubuntu", file=sys.stderr)
        return 2
    install_tools()
    given.folder.mkdir(parents=True)
    try:
        builder = Builder(given.folder, given.volume)
        for name, step in {
            "base": lambda: make_base(builder, given.folder),
            "controller": lambda: builder.build("controller"),
            "worker": lambda: builder.build("worker"),
        }.items():
            begun = time.monotonic()
            step()
            print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
        together, alone = train(builder)
    finally:
        shutil.rmtree(given.folder)
    print(f"two containers {together}\nalone          {alone}")
    return 0 if together == alone else 1


if __name__ == "__main__":
    sys.exit(main())
