"""`shoal run` and `shoal controller` as a user meets them: real processes, kill -9, a store that is held. How a run is
interrupted: test_interrupted_runs.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest
from forked_command import SHOAL, Forked, shoal
from integration.cluster import Cluster, undisturbed, until
from integration.run_command import LONG, OPTIONS, SCRIPT, running, started
from ports import free_port
from shoal_controller.access.worker_tokens import WorkerTokens
from tiers import promise

PRINTING = f"print('hello from the script', flush=True)\n{SCRIPT}\nprint('and good-bye', flush=True)\n"


PACED = {**OPTIONS, "pace": 0.05}
"""So that its progress can be seen."""


class Ran(NamedTuple):
    """What a run has left and said."""

    folder: Path
    first_line: str
    code: int
    output: str
    errors: str


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run of two workers to its end: each of them is a fresh Python, which takes seconds."""
    folder = tmp_path_factory.mktemp("ran")
    flags = ("--workers", "2", "--json", str(folder / "report.json"), "--log-dir", str(folder / "logs"))
    with running(folder, PACED, *flags, script=PRINTING) as command:
        code, output, errors = command.end()
    command.errors.unlink()
    return Ran(folder, command.first_line, code, output, errors)


@promise("the command")
def test_run_trains_a_script_to_its_end_and_reports(ran: Ran) -> None:
    folder, first_line, code, output, errors = ran
    assert code == 0, errors
    assert first_line.startswith("http=127.0.0.1:")
    assert " grpc=127.0.0.1:" in first_line
    assert f"page: http://{first_line.split()[0].removeprefix('http=')}" in errors
    report = json.loads((folder / "report.json").read_text())
    assert report["fingerprint"] == undisturbed(OPTIONS)
    assert (report["job"], report["steps"]) == ("train", 12)
    assert [world["reason"] for world in report["generations"]] == ["start"], errors
    assert f"fingerprint {report['fingerprint']}" in output
    assert "train running: step " in errors


@promise("the command")
def test_run_again_replaces_a_finished_job_and_shows_what_rank_0_prints_unless_it_is_to_be_quiet(ran: Ran) -> None:
    assert "hello from the script" in ran.errors
    [log] = (ran.folder / "logs").glob("*/w0.log")
    assert "and good-bye" in log.read_text()
    report = ran.folder / "again.json"
    with running(ran.folder, PACED, "--workers", "1", "--json", str(report), "--quiet", script=PRINTING) as command:
        code, _, errors = command.end()
    assert code == 0, errors
    assert json.loads(report.read_text())["fingerprint"] == undisturbed(OPTIONS)
    assert "hello from the script" not in errors
    assert (ran.folder / ".shoal/jobs/train/w0.log").exists()


def test_a_picture_is_drawn_of_what_a_controller_has_kept_of_its_job() -> None:
    with Cluster(workers=1, options={"max_steps": 30}, pace=0.05) as cluster:
        until("two lines of the curve", lambda: len(_curve(cluster)) > 2)
        drawn = shoal("plot", cluster.job_name, "--data", str(cluster.folder / "store"), folder=cluster.folder)
        assert (drawn.returncode, drawn.stderr) == (0, "")
        assert (cluster.folder / f"{cluster.job_name}.png").read_bytes()[:4] == b"\x89PNG"
        cluster.wait_undisturbed()


def test_what_if_takes_its_figures_from_a_job_that_trains() -> None:
    with Cluster(workers=2, options={"max_steps": 400}, pace=0.02) as cluster:
        until("lanes that are timed", lambda: all(one.get("lane_seconds") for one in cluster.workers().values()))
        cluster.wait_step(10)
        flags = ("--measured", cluster.job_name, "--url", cluster.url, "--for", "1h", "--output", "json")
        tried = shoal("what-if", "p3", *flags, folder=cluster.folder)
        assert (tried.returncode, tried.stderr) == (0, "")
        found = json.loads(tried.stdout)
        assert any(f"job {cluster.job_name}" in sentence for sentence in found["assumed"]), found["assumed"]
        (job,) = found["jobs"]
        assert (job["lanes"], job["wanted_seconds"]) == (cluster.job()["lanes"], pytest.approx(2 * 3600, rel=0.01))
        assert job["steps"] > 1000


def _curve(cluster: Cluster) -> list[str]:
    files = list(cluster.folder.glob(f"store/curves/{cluster.job_name}/*.csv"))
    return files[0].read_text().splitlines() if files else []


@promise("the controller is lost")
def test_run_again_after_kill_9_goes_on_with_the_same_workers(tmp_path: Path) -> None:
    go = tmp_path / "go"
    options, grpc = {"max_steps": 20, "pace": 0.05, "until": str(go)}, free_port()
    with running(tmp_path, options, "--workers", "2", grpc=grpc) as first:
        first.wait_step(3)
        pids = {worker["pid"] for worker in first.workers()}
        first.kill()
        with running(tmp_path, options, "--json", str(tmp_path / "report.json"), grpc=grpc) as second:
            until("its workers to be back", lambda: second.job()["workers"]["active"] == 2)
            assert {worker["pid"] for worker in second.workers()} == pids
            go.touch()
            code, _, errors = second.end()
    assert code == 0, errors
    assert "job train continues at step " in errors
    assert json.loads((tmp_path / "report.json").read_text())["fingerprint"] == undisturbed(options)


def test_a_spare_of_a_run_trains_in_the_recovery_and_a_later_run_changes_how_many_there_may_be(tmp_path: Path) -> None:
    go = tmp_path / "go"
    options, grpc = {"max_steps": 60, "lanes": 4, "pace": 0.05, "until": str(go)}, free_port()
    with running(tmp_path, options, "--workers", "1", "--spares", "1", grpc=grpc) as first:
        until("copies", lambda: any(worker["mirrored_blocks"] for worker in first.workers()))
        before = first.job()["generation"]
        trainer, spare = sorted(first.workers(), key=lambda worker: not worker["lanes"])
        assert spare["mirrored_blocks"] == trainer["blocks"] > 0 == spare["blocks"] and not spare["lanes"]
        os.kill(trainer["pid"], signal.SIGKILL)
        until("the spare's world", lambda: first.job()["generation"] > before and first.job()["phase"] == "running")
        assert [worker["pid"] for worker in first.workers() if worker["lanes"]] == [spare["pid"]]
        first.kill()
        flags = ("--spares", "0", "--max-workers", "3", "--json", str(tmp_path / "report.json"))
        with running(tmp_path, options, *flags, grpc=grpc) as second:
            until("its size", lambda: second.job()["workers"]["spares"] == 0)
            assert second.job()["workers"]["max"] == 3
            go.touch()
            code, _, errors = second.end()
    assert code == 0, errors
    assert "job train is to have 0 spares, in place of 1\n" in errors
    assert "job train may have from 1 to 3 workers\n" in errors
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["fingerprint"] == undisturbed(options)


def test_run_makes_itself_a_token_and_its_workers_get_one_that_commands_nothing(tmp_path: Path) -> None:
    script = "import os, signal\nprint(os.environ['SHOAL_TOKEN'], flush=True)\nsignal.pause()"
    with running(tmp_path, LONG, "--workers", "1", script=script) as command:
        log = tmp_path / ".shoal/jobs/train/w0.log"
        shown = until("its worker's token", lambda: log.exists() and log.read_text().strip())
        own = (tmp_path / ".shoal/token").read_text().strip()
        assert stat.S_IMODE((tmp_path / ".shoal/token").stat().st_mode) == 0o600
        assert re.fullmatch(r"join:train:[0-9a-f]{16}:[0-9a-f]{64}", shown)
        assert WorkerTokens(own).read(shown) is not None
        answers = [
            httpx.delete(f"{command.rest}/jobs/train", trust_env=False, verify=False, headers=headers).status_code
            for headers in ({}, {"authorization": f"Bearer {shown}"}, {"authorization": f"Bearer {own}"})
        ]
        assert answers == [401, 401, 202]
        assert command.end()[0] == 1


@promise("a script that fails")
def test_a_failing_script_is_exit_1_with_its_last_words(tmp_path: Path) -> None:
    with running(tmp_path, OPTIONS, "--workers", "1", script="import sys; sys.exit('there is no data')") as command:
        code, output, _ = command.end()
    assert code == 1
    assert "there is no data" in output


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("print('hello')", "ended without calling shoal.initialize"),
        ("import sys; print('shoal: there is no such dataset', file=sys.stderr); sys.exit(2)", "no such dataset"),
        ("raise ValueError('no such column: price')", "ValueError: no such column: price"),
    ],
)
def test_a_script_that_never_trains_is_exit_1_with_the_reason(script: str, sentence: str, tmp_path: Path) -> None:
    with running(tmp_path, OPTIONS, "--workers", "1", script=script) as command:
        code, output, errors = command.end()
    assert code == 1 and sentence in output, output
    assert all(len(line.splitlines()) == 1 and "Traceback" not in line for line in errors.splitlines()), errors
    assert len(list(tmp_path.rglob("w*.log"))) == 1, "it was started once"
    assert ("\nValueError: no such column: price\n" in errors) == script.startswith("raise"), "shown at once"


def test_a_module_of_a_package_and_a_program_of_ones_own_are_run_as_a_script_is(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "options.py").write_text(f"options = {OPTIONS!r}\n")
    script = SCRIPT.replace("json.loads(sys.argv[2])", "options")
    (package / "train.py").write_text(f"from .options import options\n{script}")
    ports = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--workers", "1"]
    for program in (["-m", "package.train"], ["--", "env", sys.executable, "-m", "package.train"]):
        with started("run", *ports, *program, str(tmp_path / "result"), folder=tmp_path) as command:
            code, output, errors = command.end()
        assert code == 0, errors
        assert undisturbed(OPTIONS) in output


def test_runs_of_one_folder_live_beside_each_other_and_are_found_but_share_no_checkpoints(tmp_path: Path) -> None:
    saving = {"shoal": {"checkpoint": {"path": str(tmp_path / "saved"), "every_steps": 1000}}}
    own = ["run", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--workers", "1"]
    for name in ("first", "second", "third"):
        (tmp_path / f"{name}.py").write_text(SCRIPT)

    def arguments(name: str, options: dict[str, object]) -> list[str]:
        return [f"{name}.py", str(tmp_path / name), json.dumps(options)]

    with started(*own, *arguments("first", {**LONG, **saving}), folder=tmp_path) as first:
        until("the first to train", lambda: first.job("first").get("step", 0) > 0)
        second = shoal(*own, *arguments("second", OPTIONS), folder=tmp_path)
        assert second.returncode == 0 and undisturbed(OPTIONS) in second.stdout, second.stderr
        assert (tmp_path / ".shoal/beside/second/jobs/second/w0.log").exists()
        same = shoal(*own, *arguments("third", {**LONG, **saving}), folder=tmp_path)
        assert same.returncode == 2, same.stderr
        assert "job third saves its checkpoints to " in same.stderr and "so does job first (pid" in same.stderr
        attached = shoal("run", "--attach", "--workers", "1", *arguments("third", OPTIONS), folder=tmp_path)
        assert attached.returncode == 0 and undisturbed(OPTIONS) in attached.stdout, attached.stderr
        listed = shoal("jobs", folder=tmp_path).stdout.splitlines()[1:]
        assert [line.split()[:2] for line in listed] == [["first", "running"], ["third", "succeeded"]]
        assert shoal("cancel", "first", folder=tmp_path).returncode == 0
        assert first.end()[0] == 1


def test_a_port_that_is_taken_and_a_token_that_is_wrong_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('never started')")
    with socket.create_server(("127.0.0.1", 0)) as door:
        taken = f"127.0.0.1:{door.getsockname()[1]}"
        flags = ["--http", taken, "--grpc", "127.0.0.1:0", "train.py"]
        done = shoal("run", *flags, folder=tmp_path)
        everywhere = f"0.0.0.0:{door.getsockname()[1]}"
        flags = ["--http", "127.0.0.1:0", "--grpc", everywhere, "train.py"]
        workers = shoal("run", *flags, folder=tmp_path)
    assert (workers.returncode, workers.stderr) == (
        2, f"shoal: cannot listen for workers on {everywhere}: it is in use; give another --grpc HOST:PORT\n"
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"shoal: cannot listen for REST on {taken}: Address already in use; give another --http HOST:PORT"
    ]
    with running(tmp_path, LONG, "--workers", "1", script="import time; time.sleep(600)") as command:
        for token, found in (
            ("wrong", "does not know the token that was shown"), ("", "asks for a token"),
            ("join:train:run:digits", "was shown a job's token, which is for its workers only"),
        ):  # fmt: skip
            environment = {**os.environ, "SHOAL_URL": command.rest.removesuffix("/v1"), "SHOAL_TOKEN": token}
            asked = shoal("jobs", env=environment)
            assert asked.returncode == 2 and found in asked.stderr and asked.stderr.count("\n") == 1


def test_a_controller_does_not_start_without_the_folder_for_logs_that_it_was_given(tmp_path: Path) -> None:
    ports = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0")
    done = shoal("controller", *ports, folder=tmp_path, env={**os.environ, "SHOAL_LOG_DIR": "/proc/logs"})
    assert (done.returncode, done.stdout) == (2, "")
    assert "logs of local workers cannot be written to /proc/logs: No such file or directory; " in done.stderr


def test_a_controller_does_not_start_without_its_data_folder_where_it_may_start_workers(tmp_path: Path) -> None:
    flags = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--data", "/proc/data", "--store", "embedded:store")
    done = shoal("controller", *flags, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (
        2, "", "shoal: records and logs of local workers cannot be written to /proc/data: No such file or directory; "
        "name another folder with --data, or allow no local workers (SHOAL_LAUNCHERS=none)\n",
    )  # fmt: skip


def test_a_worker_that_still_starts_when_its_job_fails_ends_with_it(tmp_path: Path) -> None:
    script = "import os, signal, sys\nsignal.pause() if os.environ['SHOAL_WORKER_ID'] == 'w1' else sys.exit('no data')"
    with running(tmp_path, OPTIONS, "--workers", "2", script=script) as command:
        until("w1 to be started", lambda: command.workers()[1:] and command.workers()[1]["pid"])
        [pid] = [worker["pid"] for worker in command.workers() if worker["worker"] == "w1"]
        code, _, errors = command.end()
        assert not psutil.pid_exists(pid)
    assert code == 1, errors


def output_of(cluster: Cluster, *arguments: str) -> str:
    """What a command that talks to the cluster's controller prints."""
    done = shoal(*arguments, "--url", cluster.url)
    assert done.returncode == 0, done.stderr
    return done.stdout


@promise("the command")
def test_a_job_is_described_scaled_paused_resumed_drained_and_cancelled_by_the_command() -> None:
    options = {"max_steps": 100_000, "pace": 0.05}
    with Cluster(workers=2, options=options) as cluster:
        cluster.wait_step(2)
        assert re.search(r"job +running +1 +2/2 +\d+/100000", output_of(cluster, "jobs"))
        described = output_of(cluster, "describe", "job")
        assert described.startswith("job running: step ")
        assert re.search(r"^w0 +active +0 +0-3 ", described, flags=re.MULTILINE)
        assert re.search(r"^ *1 +start +2 +0 ", described, flags=re.MULTILINE)
        assert "workers 2 of 3" in output_of(cluster, "scale", "job", "3")
        cluster.add(1)
        cluster.wait_world(3)
        output_of(cluster, "pause", "job")
        cluster.wait_phase("paused")
        output_of(cluster, "resume", "job")
        cluster.wait_phase("running")
        output_of(cluster, "drain", "job", "w2")
        cluster.wait_state("w2", "left")
        assert "w2 " in output_of(cluster, "top")
        news = [cluster.folder / name for name in ("news", "errors")]
        followed = Forked(["events", "job", "--follow", "--url", cluster.url], *news, cluster.folder)
        try:
            until("the history", lambda: "was drained" in followed.output.read_text())
            assert output_of(cluster, "cancel", "job").startswith("job ")
            until("news", lambda: "cancelled" in followed.output.read_text())
            followed.send_signal(signal.SIGINT)
            assert followed.wait() == 130
        finally:
            followed.kill()


def test_a_store_that_another_controller_holds_is_refused_in_one_sentence(tmp_path: Path) -> None:
    ports = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    with started("controller", *ports, folder=tmp_path) as first:
        done = shoal("controller", *ports, folder=tmp_path)
        first.send_signal(signal.SIGINT)
        code, _, _ = first.end()
    assert code == 130
    assert done.returncode == 3
    assert done.stdout == ""
    sentences = [line for line in done.stderr.splitlines() if line.startswith("shoal: ")]
    assert len(sentences) == 1
    assert ".shoal" in sentences[0]


def test_sigterm_is_the_ordinary_end_of_a_controller_also_right_after_its_first_line(tmp_path: Path) -> None:
    command = [SHOAL, "controller", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout and process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=100) == 0
        finally:
            process.kill()


def test_a_controller_serves_though_nobody_reads_what_it_prints(tmp_path: Path) -> None:
    port = free_port()
    command = [SHOAL, "controller", "--http", f"127.0.0.1:{port}", "--grpc", "127.0.0.1:0"]
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    with subprocess.Popen(command, cwd=tmp_path, stdout=writer, stderr=writer) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                until("the controller", lambda: answers(f"http://127.0.0.1:{port}/readyz"))
                assert client.get("/v1/jobs").json()["jobs"] == []
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=100) == 0
        finally:
            process.kill()
            os.close(reader)
            os.close(writer)


def test_a_store_that_cannot_be_read_is_exit_3_and_one_sentence(tmp_path: Path) -> None:
    (tmp_path / ".shoal").mkdir()
    (tmp_path / ".shoal/store.db").write_bytes(b"no database at all" * 1000)
    ports = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    done = shoal("controller", *ports, folder=tmp_path)
    sentences = [line for line in done.stderr.splitlines() if line.startswith("shoal: ")]
    assert (done.returncode, done.stdout, len(sentences)) == (3, "", 1), done.stderr


def test_a_store_that_cannot_be_written_is_exit_3_and_one_sentence(tmp_path: Path) -> None:
    """It was tried again every second, for ever."""
    (tmp_path / "train.py").touch()
    command = f"ulimit -f 40 && exec {SHOAL} run --http 127.0.0.1:0 --grpc 127.0.0.1:0 train.py"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 3 and done.stdout == "", done.stderr
    assert done.stderr.startswith("shoal: the store .shoal/store.db cannot be read or written: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        (("run", "train.py"), signal.SIGINT, 130),
        (("demo",), signal.SIGTERM, 130),
        (("controller",), signal.SIGINT, 130),
        (("controller",), signal.SIGTERM, 0),
    ],
)
def test_a_signal_ends_a_command_that_still_waits_for_its_store(
    command: tuple[str, ...], number: signal.Signals, code: int, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    port = free_port()
    store = f"etcd://127.0.0.1:{free_port()}/shoal"
    places = ["--http", f"127.0.0.1:{port}", "--grpc", "127.0.0.1:0", "--store", store]
    name, *script = command
    with subprocess.Popen([SHOAL, name, *places, *script], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        try:
            until("its health", lambda: process.poll() is not None or answers(f"http://127.0.0.1:{port}/healthz"))
            process.send_signal(number)
            _, errors = process.communicate(timeout=100)
            assert process.returncode == code, errors
            assert "Traceback" not in errors
        finally:
            process.kill()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False, timeout=60).is_success
    except httpx.TransportError:
        return False


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--http", "nowhere"], "--http (SHOAL_HTTP): 'nowhere' is not a valid address; expected HOST:PORT"),
        (["--store", "redis://x"], "expected embedded:DIR"),
        (["--workers", "9", "--max-workers", "4"], "--workers is 9; expected 1 (--min-workers) to 4 (--max-workers)"),
        (["--min-workers", "3", "--max-workers", "2", "--job", "a b"], "shoal: --job is "),
        (["--workers", "2", "--max-workers", "2", "--spares", "1"], "shoal: --spares is 1: job train cannot have 1"),
        (["--wrokers", "2"], "--workers"),
        (["--log-dir", "train.py/logs"], "shoal: the workers' logs cannot be written to "),
        (["--log-dir", "/proc/logs"], "to /proc/logs/train: No such file or directory; name another folder with --log"),
        (["--json", "/proc/report/of.json"], "shoal: the run report cannot be written to /proc/report: No such file"),
    ],
)
def test_what_run_cannot_do_is_exit_2_and_one_sentence(flags: list[str], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('never started')")
    ports = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    done = shoal("run", *ports, *flags, "train.py", folder=tmp_path)
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if sentence in line]
