"""`shoal doctor`: what it finds and advises, without torch or extras too; nothing hangs, nothing is left behind.

Where no package is taken away it is forked from a warm process, but once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked_command import SHOAL, Forked, shoal
from integration.cluster import until
from shoal_controller.cli.endings import INTERRUPTED
from shoal_protos.finding import Finding, Verdict, as_line, from_line
from tiers import check

pytestmark = [pytest.mark.usefixtures("commands"), check("starts commands")]
BLOCKING = """
import sys
from importlib.machinery import PathFinder
BLOCKED = {names!r}
found = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, path=None, target=None: None if name.split(".")[0] in BLOCKED else found(name, path, target))
"""
"""A Python in which some packages are not installed."""
BREAKING = """
import sys, os, signal
from importlib.machinery import PathFinder
found = PathFinder.find_spec
def find_spec(cls, name, path=None, target=None):
    if name == "torch" and "shoal.doctor" in sys.orig_argv:
        {does}
    return found(name, path, target)
PathFinder.find_spec = classmethod(find_spec)
"""
"""A Python in which importing torch does something else."""


def doctor(folder: Path, *flags: str, site: str = "", fresh: bool = False) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit status, and the findings by their names."""
    done = raw(folder, "--output", "json", *flags, site=site, fresh=fresh)
    assert done.stderr == ""
    return done.returncode, {one["check"]: one for one in json.loads(done.stdout)["checks"]}


def raw(folder: Path, *flags: str, site: str = "", fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """`fresh`, or with a `site`: by a Python of its own."""
    given = {key: value for key, value in os.environ.items() if not key.startswith("SHOAL_")}
    if site:
        (folder / "site").mkdir(exist_ok=True)
        (folder / "site/sitecustomize.py").write_text(site)
        given["PYTHONPATH"] = str(folder / "site")
    flags = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", *flags)
    if not (site or fresh):
        return shoal("doctor", *flags, env=given, folder=folder, seconds=90)
    return subprocess.run([SHOAL, "doctor", *flags], capture_output=True, text=True, timeout=100, env=given, cwd=folder)


def test_a_machine_that_trains_is_well_and_stays_as_it_was(tmp_path: Path) -> None:
    config = tmp_path / "shoal.json"
    checkpoint = tmp_path / "deep/down"
    settings = {"lanes": 4, "max_steps": 1, "checkpoint": {"path": str(checkpoint)}}
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "shoal": settings}))
    status, found = doctor(tmp_path, "--config", str(config), fresh=True)
    assert status == 0, found
    assert list(found) == [
        "python", "packages", "clock", "shared memory", "open files", "ports", "store", "token", "controller", "torch",
        "devices", "cells", "backend", "config", "checkpoints",
    ]  # fmt: skip
    assert all(one["found"] and one["expected"] for one in found.values())
    assert all(one["todo"] for one in found.values() if one["status"] != "ok")
    assert "two processes added up over" in found["backend"]["found"]
    assert f"{checkpoint} can be written and read" in found["checkpoints"]["found"]
    assert found["config"]["found"] == f"{config}: 4 lanes"
    assert list(tmp_path.iterdir()) == [config]


def test_without_torch_or_extras_it_says_what_is_missing(tmp_path: Path) -> None:
    names = ["torch", "fastapi", "uvicorn", "yaml", "safetensors", "fsspec"]
    status, found = doctor(tmp_path, site=BLOCKING.format(names=names))
    assert status == 1
    assert found["packages"]["found"] == "no fastapi, uvicorn, yaml; no fsspec, safetensors, torch"
    assert found["packages"]["todo"] == "install shoal[controller] and shoal[worker]"
    for name in ("torch", "devices", "backend"):
        assert (found[name]["status"], found[name]["todo"]) == ("failed", "install shoal[worker]")
    assert found["ports"]["status"] == found["store"]["status"] == "ok"


def test_a_machine_that_only_asks_needs_no_extra(tmp_path: Path) -> None:
    status, found = doctor(tmp_path, "--for", "client", site=BLOCKING.format(names=["torch", "fastapi", "yaml"]))
    assert (status, list(found)) == (0, ["python", "packages", "clock", "token", "controller"])
    status, found = doctor(tmp_path, "--for", "client", "--url", "http://127.0.0.1:1")
    assert status == 1 and "no controller answers at http://127.0.0.1:1" in found["controller"]["found"]


WAITING = """
import sys
from shoal_controller.cli import doctor
from shoal_controller.cli.main import app

doctor.CHECK_SECONDS = 5.0
sys.argv = ["shoal", "doctor", "--for", "worker"]
app()
"""
HANGS_AND_CRASHES = BREAKING.format(
    does="signal.pause() if sys.argv[-2].startswith('torch') else os.kill(os.getpid(), signal.SIGILL)"
)
"""Whoever imports torch first hangs; once that check is given up, others crash."""


def test_what_hangs_or_crashes_is_a_line_and_the_next_check_is_made(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANGS_AND_CRASHES)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", WAITING], capture_output=True, text=True, timeout=100, env=env, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.count("it has not ended for 5 s") == 1, done.stdout
    assert done.stdout.count("it ended with signal 4") == 2, done.stdout
    assert "3 failed: torch, devices, backend" in done.stdout


def test_one_that_is_terminated_while_it_looks_leaves_no_process_behind(tmp_path: Path) -> None:
    pipe = tmp_path / "config"
    os.mkfifo(pipe)
    arguments = ("doctor", "--for", "client", "--config", str(pipe))
    command = Forked(arguments, tmp_path / "output", tmp_path / "errors", tmp_path)
    try:
        until("a process to look at the pipe", lambda: _looking_at(pipe))
        command.send_signal(signal.SIGTERM)
        assert command.wait() == INTERRUPTED
        assert not _looking_at(pipe)
    finally:
        for pid in _looking_at(pipe):
            os.kill(pid, signal.SIGKILL)


def _looking_at(config: Path) -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            arguments = (place / "cmdline").read_bytes()
            if b"\0shoal.doctor\0" in arguments and str(config).encode() in arguments:
                found.append(int(place.name))
    return found


def test_taken_ports_stores_that_cannot_be_used_and_open_tokens_are_named(tmp_path: Path) -> None:
    (tmp_path / ".shoal").mkdir()
    (tmp_path / ".shoal/token").write_text("secret")
    (tmp_path / ".shoal/token").chmod(0o644)
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as door:
        taken = f"127.0.0.1:{door.getsockname()[1]}"
        flags = ("--for", "controller", "--http", taken, "--store", f"embedded:{tmp_path / 'file'}")
        status, found = doctor(tmp_path, *flags)
    assert status == 1
    assert found["ports"]["found"] == f"not free: {taken} (address already in use)"
    assert found["store"]["found"] == f"{tmp_path / 'file'} is no folder"
    assert (found["token"]["status"], found["token"]["todo"]) == ("failed", "chmod 600 .shoal/token")
    (tmp_path / ".shoal/token").unlink()
    os.mkfifo(tmp_path / ".shoal/token")
    assert doctor(tmp_path, "--for", "controller")[1]["token"]["found"] == ".shoal/token is not a regular file"
    assert doctor(tmp_path, "--for", "controller", "--store", "etdc://h")[1]["store"]["status"] == "failed"


def test_every_fault_of_a_config_and_a_place_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    config = tmp_path / "shoal.json"
    config.write_text(json.dumps({"train_batch_sizes": 2, "shoal": {"lane": 3, "checkpoint": {"path": "/proc/none"}}}))
    status, found = doctor(tmp_path, "--for", "client", "--config", str(config))
    assert status == 1
    assert "`train_batch_sizes` is an unknown key" in found["config"]["found"]
    assert "did you mean `shoal.lanes`" in found["config"]["found"]
    assert found["checkpoints"]["found"].startswith("cannot keep checkpoints in /proc/none")
    optimizer, scheduler = {"type": "AdmaW"}, {"type": "WarmupLR", "params": {"warmup_steps": 3}}
    settings = {"train_batch_size": 2, "shoal": {"lanes": 2, "max_steps": 1}, "optimizer": optimizer}
    config.write_text(json.dumps({**settings, "scheduler": scheduler}))
    status, found = doctor(tmp_path, "--for", "client", "--config", str(config))
    assert status == 1 and '`optimizer.type` is "AdmaW"' in found["config"]["found"]
    assert "did you mean `scheduler.params.warmup_num_steps`" in found["config"]["found"]
    shown = yaml.safe_load(raw(tmp_path, "--for", "client", "--output", "yaml").stdout)
    assert shown["checks"][0]["check"] == "python"


def test_a_finding_survives_its_line() -> None:
    finding = Finding("a", Verdict.WARNING, "ä\n", "b", "c")
    assert from_line(as_line(finding)) == finding
    for line in ("", "3", "{}", '{"check": "a", "verdict": "odd", "found": ""}'):
        with pytest.raises((ValueError, TypeError, KeyError)):
            from_line(line)


def completed(words: str, **env: str) -> list[str]:
    given: dict[str, Any] = {key: value for key, value in os.environ.items() if not key.startswith("SHOAL_")} | env
    given |= {"_SHOAL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    return subprocess.run([SHOAL], capture_output=True, text=True, timeout=100, env=given, check=True).stdout.split()


def test_a_shell_completes_commands_flags_and_values() -> None:
    assert completed("shoal desc") == ["describe"]
    assert completed("shoal jobs --ou") == ["--output"]
    assert completed("shoal jobs --output j") == ["json"]
    assert completed("shoal describe tr", SHOAL_URL="http://127.0.0.1:1") == []
    env = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    shown = subprocess.run(
        [SHOAL, "--show-completion", "bash"], capture_output=True, text=True, timeout=100, env=env, check=True
    )
    assert "complete -o default -F _shoal_completion shoal" in shown.stdout
