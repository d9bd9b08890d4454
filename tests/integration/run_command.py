"""`shoal run` as a process, for tests that end it, look at what it shows, or ask its controller."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from forked_command import Forked
from integration.cluster import until

TESTS = Path(__file__).resolve().parents[1]
OPTIONS: dict[str, Any] = {"max_steps": 12}
LONG: dict[str, Any] = {"max_steps": 100_000, "pace": 0.05}

SCRIPT = f"""
import json, sys
sys.path.insert(0, {str(TESTS)!r})
from integration.scripts import train
train(result=sys.argv[1], **json.loads(sys.argv[2]))
"""


class Command(Forked):
    """A running `shoal` command."""

    def __init__(self, *arguments: str, folder: Path) -> None:
        self.folder = folder
        output = folder / f"stdout-{len(list(folder.glob('stdout-*')))}"
        super().__init__(arguments, output, folder / "stderr", folder)
        self.first_line = self.wait_first_line()

    @property
    def rest(self) -> str:
        addresses = dict(part.split("=") for part in self.first_line.split())
        return f"http://{addresses['http']}/v1"

    def get(self, path: str) -> Any:
        token = self.folder / ".shoal/token"
        headers = {"authorization": f"Bearer {token.read_text().strip()}"} if token.exists() else {}
        return httpx.get(f"{self.rest}{path}", trust_env=False, verify=False, headers=headers, timeout=60).json()

    def job(self, name: str = "train") -> dict[str, Any]:
        return dict(self.get(f"/jobs/{name}"))

    def workers(self, name: str = "train") -> list[dict[str, Any]]:
        return list(self.get(f"/jobs/{name}/workers").get("workers", []))

    def wait_step(self, step: int) -> None:
        until(f"step {step}", lambda: self.job().get("step", 0) >= step)

    def end(self) -> tuple[int, str, str]:
        """Exit status, standard output after the first line, standard error."""
        code = self.wait()
        return code, self.output.read_text().partition("\n")[2], self.errors.read_text()


@contextmanager
def started(*arguments: str, folder: Path) -> Iterator[Command]:
    """The command, and none of its workers afterwards."""
    command = Command(*arguments, folder=folder)
    try:
        yield command
    finally:
        command.kill()
        for process in psutil.process_iter(["cmdline"]):
            if str(folder / "train.py") in (process.info["cmdline"] or []):
                process.kill()


def running(folder: Path, options: dict[str, Any], *flags: str, grpc: int = 0, script: str = SCRIPT) -> Any:
    """`shoal run train.py` on free ports, its store in the folder."""
    (folder / "train.py").write_text(script)
    ports = ["--http", "127.0.0.1:0", "--grpc", f"127.0.0.1:{grpc}"]
    command = [str(folder / "train.py"), "--", str(folder / "result"), json.dumps(options)]
    return started("run", *ports, *flags, *command, folder=folder)
