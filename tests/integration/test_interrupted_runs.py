"""`shoal run` that is ended: by Ctrl-C once or twice, by a closed terminal, where the store takes nothing; no worker is
left to train without a controller.
"""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path

import psutil
from forked_command import SHOAL
from integration.cluster import until
from integration.local_processes import ended
from integration.run_command import LONG, SCRIPT, running
from ports import free_port
from rule import Edit, rule
from tiers import promise

NO_ROOM_BEYOND = 24 << 10
"""Bytes of a file, where there is to be no room: a store needs more, what a short run shows does not."""


def test_the_first_ctrl_c_ends_the_job_reports_and_says_that_there_is_nowhere_to_save(tmp_path: Path) -> None:
    with running(tmp_path, LONG, "--workers", "1", "--json", str(tmp_path / "report.json")) as command:
        command.wait_step(2)
        pids = [worker["pid"] for worker in command.workers()]
        command.send_signal(signal.SIGINT)
        code, output, errors = command.end()
    assert code == 130, errors
    assert "train cancelled at step" in output
    assert json.loads((tmp_path / "report.json").read_text())["steps"] >= 2
    until("its workers to be gone", lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert "nothing is saved now: job train has no checkpoint folder; set checkpoint.path" in errors
    assert "nothing was saved; to start again from step 0: shoal run" in output


@promise("the command")
def test_the_first_ctrl_c_saves_where_there_is_somewhere_to_and_the_same_command_goes_on(tmp_path: Path) -> None:
    options = {"max_steps": 4000, "pace": 0.05, "shoal": {"checkpoint": {"path": str(tmp_path / "saves")}}}
    with running(tmp_path, options, "--workers", "1") as command:
        command.wait_step(3)
        command.send_signal(signal.SIGINT)
        code, output, errors = command.end()
    assert code == 130, errors
    found = re.search(r"saved at step (\d+); to continue from there: shoal run --http ", output)
    assert found and int(found[1]) >= 3, output
    assert f"saved at step {found[1]}" in errors
    with running(tmp_path, options, "--workers", "1") as again:
        until("it to train again", lambda: again.job().get("phase") == "running")
        assert again.get("/jobs/train/report")["generations"][0]["from_step"] == int(found[1])


def test_the_second_ctrl_c_kills(tmp_path: Path) -> None:
    with running(tmp_path, LONG, "--workers", "1") as command:
        command.wait_step(2)
        pids = [worker["pid"] for worker in command.workers()]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        command.send_signal(signal.SIGINT)
        until("the first to be heard", lambda: "a second Ctrl-C kills" in command.errors.read_text())
        command.send_signal(signal.SIGINT)
        code, _, errors = command.end()
    assert code == 130, errors
    until("its workers to be gone", lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_ctrl_c_ends_the_workers_though_the_store_has_no_room_for_the_end_and_the_same_command_goes_on(
    tmp_path: Path,
) -> None:
    """They were left to train without a controller."""
    with running(tmp_path, LONG, "--workers", "2") as command:
        command.wait_step(2)
        pids = [worker["pid"] for worker in command.workers()]
        _, most = resource.prlimit(command.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(command.pid, resource.RLIMIT_FSIZE, (NO_ROOM_BEYOND, most))
        command.send_signal(signal.SIGINT)
        code, _, errors = command.end()
        assert [pid for pid in pids if psutil.pid_exists(pid)] == [], "gone as soon as the command is"
    assert code == 130, errors
    [sentence] = [line for line in errors.splitlines() if line.startswith("shoal: ")]
    assert sentence.startswith(
        "shoal: the workers of job train were killed, because its end could not be stored; once it can be, the same "
        "command continues the job from its last checkpoint, or from step 0: "
    )
    assert "store.db cannot be read or written: " in sentence and errors.splitlines()[-1] == sentence
    command.errors.unlink()
    with running(tmp_path, LONG, "--workers", "2") as again:
        until("it to go on", lambda: "job train continues at step" in again.errors.read_text())
        until("it to train again", lambda: again.job().get("phase") == "running")


@rule(
    "No end of `shoal run` leaves a worker: no controller would watch it",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.cli.serve",
        "                    if own:\n                        await here.end_the_rest()\n",
        "",
    ),
)
def test_a_run_that_cannot_go_on_ends_the_workers_that_it_took_over_and_says_so(tmp_path: Path) -> None:
    with running(tmp_path, LONG, "--workers", "1") as killed:
        killed.wait_step(2)
        [pid] = [worker["pid"] for worker in killed.workers()]
        os.kill(pid, signal.SIGSTOP)  # or it might end by itself, when its controller is gone
        killed.kill()
        code, _, errors = _ended(tmp_path, "--workers", "999")
        assert (code, ended(pid)) == (2, True), errors
    assert "job train of an earlier run ends unfinished with this command (" in errors
    assert "job train is scaled" not in errors, "it was refused"


def test_a_job_that_a_killed_run_left_is_named_saved_and_ended_with_the_next_run_of_its_folder(tmp_path: Path) -> None:
    options = {**LONG, "shoal": {"checkpoint": {"path": str(tmp_path / "saves")}}}
    with running(tmp_path, options, "--workers", "1", "--job", "left") as killed:
        until("step 2", lambda: killed.job("left").get("step", 0) >= 2)
        [pid] = [worker["pid"] for worker in killed.workers("left")]
        killed.kill()
        with running(tmp_path, {"max_steps": 2}, "--workers", "1") as beside:
            code, _, errors = beside.end()
        assert (code, ended(pid)) == (0, True), errors
    assert "job left of an earlier run is unfinished at step " in errors
    assert re.search(r"job left of an earlier run ends unfinished with this command \(saved at step \d+\)", errors)


def _ended(folder: Path, *flags: str) -> tuple[int, str, str]:
    with running(folder, LONG, *flags) as command:
        return command.end()


IN_A_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Becomes a command whose terminal is its standard input."""


def test_a_closed_terminal_ends_a_run_and_its_workers_as_ctrl_c_does(tmp_path: Path) -> None:
    """They were left to train without a controller."""
    (tmp_path / "train.py").write_text(SCRIPT)
    port = free_port()
    command = [SHOAL, "run", "--http", f"127.0.0.1:{port}", "--grpc", "127.0.0.1:0", "--workers", "1"]
    command += ["train.py", "--", str(tmp_path / "result"), json.dumps(LONG)]
    terminal, end = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL, *command], cwd=tmp_path, stdin=end, stdout=end, stderr=end,
        start_new_session=True,
    )  # fmt: skip
    os.close(end)
    shown = bytearray()

    def is_training() -> bool:
        while select.select([terminal], [], [], 0)[0]:
            shown.extend(os.read(terminal, 4096))
        return b"running" in shown

    try:
        until("it to train", is_training)
        [pid] = [json.loads(record.read_text())["pid"] for record in (tmp_path / ".shoal/jobs/train").glob("w*.json")]
        os.close(terminal)
        assert process.wait(timeout=100) == 130
        assert not psutil.pid_exists(pid), "gone as soon as the command is"
    finally:
        process.kill()
        process.wait()


def test_ctrl_c_while_workers_still_start_leaves_no_process_behind(tmp_path: Path) -> None:
    script = "import signal, sys\nprint('starting', flush=True)\nsignal.pause()"
    with running(tmp_path, LONG, "--workers", "2", script=script) as command:
        until("both to be started", lambda: len(command.workers()) == 2 and all(w["pid"] for w in command.workers()))
        pids = [worker["pid"] for worker in command.workers()]
        command.send_signal(signal.SIGINT)
        code, output, errors = command.end()
        assert [pid for pid in pids if psutil.pid_exists(pid)] == [], "gone as soon as the command is"
    assert code == 130, errors
    assert "train cancelled" in output
