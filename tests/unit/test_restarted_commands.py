"""`shoal worker` as its command's parent: what it starts again, what it hands on, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from shoal_protos.messages import START_AGAIN
from tiers import check

pytestmark = check("starts commands")

PARENT = """
import signal, sys
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # ignored by what a shell has put into the background
    signal.signal(number, signal.SIG_DFL)
from shoal_controller.cli.worker import worker
sys.exit(worker("h:1", "j", sys.argv[3:], sys.argv[1], sys.argv[2]))
"""


@contextmanager
def running(
    script: str, *arguments: str, restarts: int = 3, processes: int = 1, **env: str
) -> Iterator[subprocess.Popen[str]]:
    """The command with that script as its own; whatever is left of it is ended."""
    counts = (str(restarts), str(processes))
    command = [sys.executable, "-c", PARENT, *counts, sys.executable, "-c", script, *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")} | env
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as one:
        try:
            yield one
        finally:
            one.kill()


def ended(
    script: str, *arguments: str, restarts: int = 3, processes: int = 1, **env: str
) -> tuple[int, list[str], str]:
    """Its exit status, the lines that its commands wrote, and what it says itself."""
    with running(script, *arguments, restarts=restarts, processes=processes, **env) as one:
        output, errors = one.communicate(timeout=100)
        return one.returncode, output.splitlines(), errors


WRITE = """
import os, signal, sys
def write(*words):  # a line at once, from a signal's handler too, beside other processes that write to the same pipe
    os.write(1, (" ".join(map(str, words)) + chr(10)).encode())
"""
TELLS = WRITE + "write(sys.argv[1:], os.environ['SHOAL_JOB'], os.environ['MINE'], os.getcwd()); sys.exit(%s)"


@pytest.mark.parametrize("restarts", [1, 3])
def test_a_command_that_is_to_begin_anew_is_started_again_as_it_was_so_often_and_no_more(restarts: int) -> None:
    status, lines, errors = ended(TELLS % START_AGAIN, "a", "b c", restarts=restarts, MINE="kept")
    assert status == START_AGAIN
    assert lines == [f"['a', 'b c'] j kept {Path.cwd()}"] * (restarts + 1)
    assert errors.count("the job begins anew: the command is started again") == restarts
    assert errors.splitlines()[-1].startswith(f"shoal: the command is to begin again, after {restarts} restart")


@pytest.mark.parametrize(("how", "status"), [("0", 0), ("7", 7), ("os.kill(os.getpid(), 9)", 137)])
def test_a_command_that_ends_otherwise_is_not_started_again_and_its_status_is_passed_on(how: str, status: int) -> None:
    assert ended(TELLS % how, MINE="") == (status, [f"[] j  {Path.cwd()}"], "")


def test_a_command_that_a_launcher_starts_again_is_left_to_that() -> None:
    status, lines, errors = ended(TELLS % START_AGAIN, MINE="", SHOAL_LAUNCHER="local")
    assert (status, len(lines), errors) == (START_AGAIN, 1, "")


WAITS = f"""{WRITE}
numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # one that came just before a wait by `pause` would be slept through
write(os.getpid())
while True:
    number = signal.sigwait(numbers)
    write(int(number))
    number in (10, 12) or sys.exit(75)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_signals_reach_the_command_and_one_that_was_told_to_end_is_not_started_again(number: signal.Signals) -> None:
    with running(WAITS) as one:
        assert one.stdout is not None
        assert int(one.stdout.readline()) != one.pid
        one.send_signal(signal.SIGUSR1)
        assert int(one.stdout.readline()) == signal.SIGUSR1
        one.send_signal(number)
        output, errors = one.communicate(timeout=100)
    assert (output, errors, one.returncode) == (f"{int(number)}\n", "", START_AGAIN)


def test_the_command_is_killed_with_its_parent() -> None:
    with running(WAITS) as one:
        assert one.stdout is not None
        assert one.stdout.readline()
        one.kill()
        assert one.stdout.read() == "", "a command that lives keeps its output open"


OF_EACH = f"""{WRITE}
write(*(os.environ.get(name) for name in ("SHOAL_WORKER_ID", "CUDA_VISIBLE_DEVICES", "SHOAL_HOST")))
"""


def test_each_of_several_processes_has_its_id_and_device_and_the_first_failure_is_the_status(tmp_path: Path) -> None:
    os.mkfifo(gate := tmp_path / "gate")
    script = OF_EACH + "worker = os.environ['SHOAL_WORKER_ID']; worker == 'w6' and open(sys.argv[1]).read()\n"
    script += "sys.exit({'w4': 0, 'w5': 7, 'w6': 75}[worker])"
    with running(
        script, str(gate), processes=3, SHOAL_WORKER_ID="w4,w5,w6", SHOAL_LAUNCHER="kubernetes",
        SHOAL_HOST="10.0.0.9", CUDA_VISIBLE_DEVICES="2,5",
    ) as one:  # fmt: skip
        assert one.stderr is not None
        first, second = one.stderr.readline(), one.stderr.readline()
        gate.write_text("")  # the last one may end
        output, errors = one.communicate(timeout=100)
    assert sorted(output.splitlines()) == ["w4 2 10.0.0.9", "w5 5 10.0.0.9", "w6 2 10.0.0.9"]
    assert one.returncode == 7
    assert "has ended with status" in first and "has ended with status" in second
    assert "has ended with status" not in errors, "the last one leaves none"


def test_a_process_that_dies_or_begins_anew_leaves_the_others_alone_and_signals_reach_all() -> None:
    with running(WAITS, processes=3, restarts=1) as one:
        assert one.stdout is not None and one.stderr is not None
        first, second, third = (int(one.stdout.readline()) for _ in range(3))
        os.kill(first, signal.SIGKILL)
        assert "has ended with status 137; 2 of 3 go on" in one.stderr.readline()
        os.kill(second, signal.SIGTERM)  # it ends with 75, as one whose job begins anew
        assert int(one.stdout.readline()) == signal.SIGTERM
        assert "begins anew: the command of process" in one.stderr.readline()
        again = int(one.stdout.readline())
        assert again not in (first, second, third)
        one.send_signal(signal.SIGTERM)
        output, _ = one.communicate(timeout=100)
    assert ("".join(output.split()), one.returncode) == (str(int(signal.SIGTERM)) * 2, 137)


SHOAL = "from shoal_controller.cli.console import main; main()"


@pytest.mark.parametrize(
    ("text", "restarts", "why"),
    [
        ("echo hello\n", 0, "Exec format error"),
        ("echo hello\n", 1, "Exec format error"),
        ("#!/bin/sh\nrm $0\nexit 75\n", 1, "No such file or directory"),
    ],
)
def test_a_program_that_cannot_be_run_is_named_in_a_sentence(
    tmp_path: Path, text: str, restarts: int, why: str
) -> None:
    program = tmp_path / "program"
    program.write_text(text)
    program.chmod(0o755)
    given = ["worker", "--restarts", str(restarts), "--controller", "h:1", "--job", "j", "--", str(program)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    one = subprocess.run([sys.executable, "-c", SHOAL, *given], env=environment, capture_output=True, text=True)
    assert f"shoal: {program} cannot be run as a worker: {why}; expected a program" in one.stderr
    assert (one.returncode, "Traceback" in one.stderr) == (2, False)


def test_a_launcher_that_names_another_number_of_workers_than_there_are_processes_is_refused() -> None:
    given = ["worker", "--processes", "2", "--controller", "h:1", "--job", "j", "--", sys.executable]
    environment = os.environ | {"SHOAL_WORKER_ID": "w7"}
    one = subprocess.run([sys.executable, "-c", SHOAL, *given], env=environment, capture_output=True, text=True)
    assert 'SHOAL_WORKER_ID is "w7"; expected 2 values, separated by commas, for --processes 2' in one.stderr
    assert one.returncode == 2
