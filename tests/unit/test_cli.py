"""The `shoal` command from outside: its flags are frozen, it starts quickly, and every refusal is one sentence."""

from __future__ import annotations

import inspect
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked_command
import pytest
import typer
import yaml
from forked_command import SHOAL
from matrices import shortened
from rich.console import Console
from rule import holds
from shoal_controller.access.tokens import made_token
from shoal_controller.cli import endings, main
from shoal_controller.cli.client import Client
from shoal_controller.cli.display import Rate
from shoal_controller.cli.endings import ending
from shoal_controller.cli.jobs import change
from shoal_controller.cli.run import goes_to_the_script, keeps_another, own
from shoal_controller.cli.tables import amount, described_lines, jobs_table, seconds
from shoal_protos.errors import JobFailed, NoController, StoreError, UserError
from shoal_protos.release import RELEASE
from tiers import check
from told_controller import Controller

pytestmark = [pytest.mark.usefixtures("commands"), check("starts commands")]

HEAVY = ("asyncio", "fastapi", "grpc", "httpx", "pydantic", "rich", "torch", "uvicorn", "yaml")

FLAGS = {
    "backup": "--keep --store --tokens FILE",
    "restore": "--store FILE",
    "demo": "--data --grpc --http --no-page --open-page --steps --store --text",
    "run": (
        "--adopt --attach --data --grpc --http --job --json --log-dir --max-workers --min-workers --no-page "
        "--open-page --quiet --spares --store --workers -m SCRIPT ARGUMENTS"
    ),
    "controller": "--adopt --data --grpc --http --no-page --open --store",
    "worker": "--controller --job --processes --restarts COMMAND",
    "submit": "--url FILE",
    "jobs": "--output --url",
    "describe": "--output --spec --url JOB",
    "scale": "--cells --max-workers --min-workers --spares --url JOB WORKERS",
    "drain": "--url --why JOB WORKER",
    "lost": "--url JOB WORKER",
    "pause": "--url JOB",
    "resume": "--url JOB",
    "cancel": "--url JOB",
    "checkpoint": "--url JOB",
    "checkpoints": "--output --url JOB",
    "events": "--follow --output --url JOB",
    "plot": "--data --png JOB",
    "logs": "--follow --url JOB WORKER",
    "workers": "--output --url JOB",
    "top": "--url",
    "token job": "--url JOB",
    "token create": "--days --role --url NAME",
    "token list": "--output --url",
    "token rotate": "--keep-seconds --url NAME",
    "token revoke": "--url NAME",
    "verify": "PATH",
    "export": "--averaged --dtype --format PATH FILE",
    "import": "--model-only FILE PATH",
    "reshape": "--context --expert --pipeline --tensor OLD NEW",
    "estimate": (
        "--common --config --context --expert --frozen --lanes --largest-parameter --micro-batches --mirrors "
        "--of-experts --offload --output --params --pipeline --precision --spares --stage --state-bytes --tensor "
        "--unit --workers"
    ),
    "what-if": (
        "--budget --deadline --for --from --lanes --measured --min --mirrors --output --overhead-seconds --price "
        "--restore-seconds --save-seconds --save-steps --seed --spares --stage --start-seconds --state-bytes "
        "--step-seconds --steps --url --workers --write-seconds TRACE"
    ),
    "doctor": "--checkpoint --config --data --for --grpc --http --output --store --url",
}
"""People and scripts rely on these."""


def shoal(
    *arguments: str, env: dict[str, str] | None = None, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return forked_command.shoal(*arguments, env=plain(env), folder=folder)


def fresh(*arguments: str) -> subprocess.CompletedProcess[str]:
    """By the console script, as it is installed."""
    return subprocess.run([SHOAL, *arguments], capture_output=True, text=True, timeout=100, env=plain())


def plain(more: dict[str, str] | None = None) -> dict[str, str]:
    """An environment without settings of Shoal's but these."""
    return {key: value for key, value in os.environ.items() if not key.startswith("SHOAL_")} | (more or {})


def commands(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """All commands by the words that call them, those of groups too."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{above}{name} ")
        else:
            yield f"{above}{name}", command


def test_the_commands_and_their_flags_are_these() -> None:
    found = {}
    for name, command in commands(typer.main.get_command(main.app)):
        options = sorted(parameter.opts[0] for parameter in command.params if parameter.param_type_name == "option")
        arguments = [p.name.upper() for p in command.params if p.param_type_name == "argument"]
        found[name] = " ".join([*options, *arguments])
    assert found == FLAGS


def test_nothing_heavy_is_imported_for_help() -> None:
    code = f"import sys, shoal_controller.cli.main; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "command",
    shortened(
        [one for one in FLAGS if "--url" in FLAGS[one] and one not in ("doctor", "what-if")],
        "jobs",
        "submit",
        "scale",
        "token create",
    ),
)
def test_an_unreachable_controller_is_exit_3_and_one_sentence(command: str, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"job": "j"}')
    positional = {
        "NAME": "n",
        "--role": "--role=view",
        "JOB": "j",
        "WORKERS": "2",
        "WORKER": "w0",
        "FILE": str(tmp_path / "job.json"),
    }
    given = [positional[name] for name in FLAGS[command].split() if name in positional]
    done = shoal(*command.split(), *given, "--url", "http://127.0.0.1:1")
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith("shoal: no controller answers at http://127.0.0.1:1 (")
    assert done.stderr.count("\n") == 1


JOB = {
    "job": "j", "phase": "running", "generation": 3, "workers": {"wanted": 3, "active": 2, "min": 1, "max": None},
    "lanes": 8, "step": 7, "max_steps": 100, "loss": 1.25, "samples": 56, "last_checkpoint_step": None,
    "reason": "2 workers train [8 lanes]; w3 is starting",
}  # fmt: skip


WORKER = {
    "worker": "w0", "host": "here", "pid": 7, "state": "active", "rank": 0, "lanes": [0, 1], "blocks": 3,
    "mirrored_blocks": 1, "step": 7, "step_seconds": 0.5, "memory_bytes": 1000, "log": None,
    "pod": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "rows"),
    [(["jobs"], [JOB]), (["workers", "j"], [WORKER]), (["checkpoints", "j"], []), (["events", "j"], [])],
)
def test_a_list_is_written_as_rest_answers_it(controller: str, command: list[str], rows: list[Any]) -> None:
    Controller.body = json.dumps({command[0]: rows})
    as_json = shoal(*command, "--output", "json", "--url", controller)
    assert (as_json.returncode, json.loads(as_json.stdout)) == (0, {command[0]: rows})
    as_yaml = shoal(*command, "-o", "yaml", "--url", controller)
    assert (as_yaml.returncode, yaml.safe_load(as_yaml.stdout)) == (0, {command[0]: rows})
    assert shoal(*command, "--output", "xml", "--url", controller).returncode == 2


def test_a_long_reason_leaves_a_job_its_name_and_phase() -> None:
    job = {
        **JOB,
        "phase": "failed",
        "job": "a-job-of-mine",
        "reason": "worker w0 failed: " + "very " * 60 + "bad\nTraceback",
    }
    narrow = Console(width=60, file=io.StringIO())
    narrow.print(jobs_table([job]))
    printed = narrow.file.getvalue()  # type: ignore[attr-defined]
    assert "a-job-of-mine  failed" in printed and "2/3" in printed and "7/100" in printed
    assert printed.count("very") == 60 and "Traceback" not in printed


def test_a_description_names_the_owner_of_a_job_that_has_one() -> None:
    assert described_lines({**JOB, "owner": "ann"})[-1] == "  owner ann"
    assert not any("owner" in line for line in described_lines({**JOB, "owner": ""}))


def test_the_version_is_told() -> None:
    assert fresh("--version").stdout == f"shoal {RELEASE}\n"


def test_logs_prints_the_log_of_rank_0_or_of_the_named_worker(controller: str, tmp_path: Path) -> None:
    for name in ("w0", "w1"):
        (tmp_path / f"{name}.log").write_text(f"{name} says\nmuch\n" * 20_000 + "and no more")
    logs = [
        {**WORKER, "worker": name, "rank": rank, "log": str(tmp_path / f"{name}.log")}
        for name, rank in (("w0", 1), ("w1", 0))
    ]
    Controller.body = json.dumps({"workers": [*logs, {**WORKER, "worker": "w2"}]})
    for given, name in (([], "w1"), (["w0"], "w0")):
        done = shoal("logs", "j", *given, "--url", controller)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == (tmp_path / f"{name}.log").read_text() + "\n"
    done = shoal("logs", "j", "w2", "--url", controller)
    assert (done.returncode, done.stderr) == (
        2, "shoal: worker w2 of job j has no log that this controller knows; those with one: w0, w1. Only launched "
        "workers write one\n",
    )  # fmt: skip
    (tmp_path / "w0.log").unlink()
    shoal("logs", "j", "w0", "--url", controller)
    assert Controller.requests[-1][1] == "/v1/jobs/j/workers/w0/log?follow=false", "one elsewhere is asked for"


def test_a_change_shows_the_job_as_the_controller_answered_it(controller: str) -> None:
    Controller.status, Controller.body = 202, json.dumps(JOB)
    done = shoal("scale", "j", "3", env={"SHOAL_URL": controller, "SHOAL_TOKEN": "secret"})
    assert Controller.requests == [("POST", "/v1/jobs/j/scale", '{"workers":3}', "Bearer secret")]
    shoal("scale", "j", "--min-workers", "2", "--max-workers", "6", "--url", controller)
    assert Controller.requests[1][2] == '{"min":2,"max":6}'
    assert (done.returncode, done.stderr) == (0, "")
    assert "has no cells of several workers" in shoal("scale", "j", "--cells", "3", "--url", controller).stderr
    shape = {"tensor": 2, "pipeline": 1, "context": 1, "expert": 1, "processes": 2}
    Controller.body = json.dumps({**JOB, "cell": shape, "cells": {"full": 1, "wanted": 1}})
    assert "cells 1 of 1 (tensor 2)" in shoal("scale", "j", "--cells", "3", "--url", controller).stdout
    assert Controller.requests[-1][2] == '{"workers":6}'
    assert done.stdout.splitlines() == [
        "j running: step 7/100, loss 1.25, generation 3, workers 2 of 3 (1 to lanes), lanes 8",
        "  2 workers train [8 lanes]; w3 is starting",
    ]


def test_the_token_of_this_folder_is_shown_to_this_machine_only(controller: str, tmp_path: Path) -> None:
    token = made_token(tmp_path / ".shoal")
    for env in ({}, {"SHOAL_DATA": str(tmp_path / ".shoal")}):
        folder = None if env else tmp_path
        assert shoal("jobs", "--url", controller, env=env, folder=folder).returncode == 3
    assert [request[3] for request in Controller.requests] == [f"Bearer {token}"] * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.delenv("SHOAL_TOKEN", raising=False)
        others = [
            "http://example.org",
            "http://127.example.org",
            "http://localhost.example.org",
            "http://10.0.0.7:7070",
        ]
        here = ["http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1"]
        for url, shown in [(url, f"Bearer {token}") for url in here] + [(url, None) for url in others]:
            assert Client(url)._http.headers.get("authorization") == shown


def test_the_token_of_a_runs_workers_is_the_controllers_answer(controller: str) -> None:
    Controller.body = json.dumps({"job": "train", "run": "r1", "token": "join:train:r1:abc"})
    done = shoal("token", "train", env={"SHOAL_URL": controller, "SHOAL_TOKEN": "secret"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "join:train:r1:abc\n", "")
    assert Controller.requests == [("POST", "/v1/jobs/train/token", "", "Bearer secret")]


def test_what_follows_two_dashes_is_a_job_whose_token_is_asked_for_even_where_a_command_has_its_name(
    controller: str,
) -> None:
    Controller.body = json.dumps({"job": "list", "run": "r1", "token": "join:list:r1:abc"})
    done = shoal("token", "--", "list", env={"SHOAL_URL": controller, "SHOAL_TOKEN": "secret"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "join:list:r1:abc\n", "")
    assert Controller.requests == [("POST", "/v1/jobs/list/token", "", "Bearer secret")]
    assert '"-x" is no name of a job' in shoal("token", "--", "-x").stderr


@pytest.mark.parametrize(("status", "code"), [(404, 2), (409, 2), (400, 2), (403, 2), (429, 3), (503, 3), (500, 1)])
def test_a_refusal_is_the_controllers_own_sentence(controller: str, status: int, code: int) -> None:
    Controller.status, Controller.kind = status, "application/problem+json"
    Controller.body = json.dumps({"title": "No", "status": status, "detail": "workers is 9; expected 1 to 8."})
    done = shoal("scale", "j", "9", "--url", controller)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "shoal: workers is 9; expected 1 to 8.\n")


@pytest.mark.parametrize(
    ("status", "body"), [(200, "<html>"), (404, "<html>"), (500, "[]"), (200, "[1]"), (200, '{"jobs": [{}]}')]
)
def test_something_else_at_the_address_is_exit_3(controller: str, status: int, body: str) -> None:
    Controller.status, Controller.body = status, body
    done = shoal("jobs", "--url", controller)
    assert done.returncode == 3
    assert done.stderr.endswith(f"is it a Shoal controller? This is shoal {RELEASE}\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["describe", "\udcff"],
            "\"\\udcff\" is no name of a job, a worker or a token; expected letters, digits, '.',",
        ),
        (["describe", "../x"], '"../x" is no name of a job, a worker or a token; expected letters'),
        (["pause", "train/workers"], '"train/workers" is no name of a job, a worker or a token'),
        (["drain", "train", "a\nb"], '"a\\nb" is no name of a job, a worker or a token'),
        (["cancel", ""], '"" is no name of a job, a worker or a token'),
        (["token", "revoke", ".."], '".." is no name of a job, a worker or a token'),
        (
            ["worker", "--controller", "a:1", "--job", "a b", "true"],
            "--job is \"a b\"; expected the name of a job: letters, digits, '.', '_' and '-', a letter or digit first",
        ),
        (["drain", "j", "w0", "--why", "\udcff"], "what is to be sent holds text that is not valid"),
        (["jobs", "--url", "http://127.0.0.1:70x"], "(Invalid port: '70x'); expected something like http://127."),
        (
            ["jobs", "--url", "http://127.0.0.1:70707"],
            "(Port out of range 0-65535); expected something like http://127.",
        ),
        (["token", "rotate", "ci", "--keep-seconds", "inf"], "what is to be sent holds a number that is not finite"),
        (["jobs", "--url", "nonsense"], "the controller's URL is 'nonsense'; expected something like http://127."),
        (
            ["worker", "--controller", "nonsense", "--job", "j", "true"],
            "--controller is 'nonsense'; expected",
        ),
        (["worker", "--controller", "a:1", "--job", "j", "--restarts", "-1", "true"], '--restarts is "-1"; expected'),
        (
            ["worker", "--controller", "a:1", "--job", "j", "--restarts", "often", "true"],
            '--restarts is "often"; expected',
        ),
        (["worker", "--controller", "a:1", "--job", "j", "no-such-program"], "there is no program 'no-such-program'"),
        (["submit", __file__], "cannot be read as a job spec"),
    ],
)
def test_wrong_use_is_exit_2_and_one_sentence(arguments: list[str], sentence: str) -> None:
    done = shoal(*arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_flag_that_is_missing_or_unknown_is_exit_2() -> None:
    assert "there is nothing to change" in shoal("scale", "j").stderr
    assert "3 workers and 2 cells are asked for" in shoal("scale", "j", "3", "--cells", "2").stderr
    assert shoal("jobs", "--colour").returncode == 2
    assert shoal("run", "no-such-script.py").returncode == 2
    assert shoal("no-such-command").returncode == 2


def test_a_worker_that_is_not_to_be_started_again_becomes_the_command_with_its_environment_set() -> None:
    script = "import os; print(os.getpid(), os.environ['SHOAL_CONTROLLER'], os.environ['SHOAL_JOB'])"
    command = [SHOAL, "worker", "--controller", "h:1", "--job", "j", "--restarts", "0", "--"]
    command += [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.communicate(timeout=100)
    assert output == f"{process.pid} h:1 j\n"


FIRST_PROCESS = """
import os, sys
from shoal_controller.cli import worker
os.getpid = os.getppid = lambda: 1
sys.exit(worker.worker("h:1", "j", sys.argv[1:]))
"""


@holds("SIGTERM ends a worker that")
def test_as_the_first_process_of_a_container_it_hands_signals_on_and_ends_as_its_command() -> None:
    def ends(script: str, *numbers: int) -> int:
        command = [sys.executable, "-c", FIRST_PROCESS, sys.executable, "-c", f"import os, signal, sys\n{script}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
            assert first.stdout
            try:
                for number in numbers:
                    assert first.stdout.readline() == "here\n"
                    first.send_signal(number)
                return first.wait(timeout=100)
            finally:
                first.kill()

    assert ends("sys.exit(7)") == 7
    assert ends("print('here', flush=True); signal.pause()", signal.SIGTERM) == 143
    kept = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); print('here', flush=True); signal.pause()"
    assert ends(kept, signal.SIGTERM) == 5
    orphan = "os.fork() or (os.fork() or os._exit(0)); os.execlp('true', 'true')"
    assert ends(orphan) == 0


def test_windows_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    sentence = "Shoal runs on Linux, and on macOS without a controller, but not on Windows."
    assert capsys.readouterr().err == f"shoal: {sentence}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (UserError("a sentence"), 2),
        (JobFailed("a sentence"), 1),
        (NoController("a sentence"), 3),
        (StoreError("a sentence"), 3),
        (ModuleNotFoundError(name="fastapi.routing"), 2),
    ],
)
def test_every_end_has_its_exit_code(error: BaseException, code: int) -> None:
    def command() -> None:
        raise error

    async def same() -> None:
        raise error

    assert ending(command, {}) == code
    assert ending(same, {}) == code


def test_a_missing_extra_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert endings.missing(ModuleNotFoundError(name="torch")).endswith("not installed: install shoal[worker]")
    assert endings.missing(ModuleNotFoundError(name="uvicorn.config")).endswith("install shoal[controller]")
    with pytest.raises(ModuleNotFoundError):
        endings.missing(ModuleNotFoundError(name="shoal_controller.typo"))


def test_every_module_of_an_extra_is_known_by_its_import_name() -> None:
    import tomllib

    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    imported = {"pyyaml": "yaml"}
    for extra in ("worker", "controller"):
        names = {requirement.partition(">")[0].replace("-", "_") for requirement in extras[extra]}
        assert {imported.get(name, name) for name in names} == endings.EXTRAS[f"shoal[{extra}]"]


def test_commands_that_talk_to_a_controller_are_coroutines_and_no_thread_is_needed() -> None:
    plain = [command.__name__ for command in main.COMMANDS if not inspect.iscoroutinefunction(command)]
    assert plain == ["worker", "submit", "plot", "verify", "export", "import_", "reshape", "estimate"]
    assert inspect.iscoroutinefunction(change), "submit reads a file, and then"


def test_a_flag_of_run_behind_the_script_is_the_scripts_and_that_is_said() -> None:
    """A run with another number of workers than was asked for would be found out late."""
    assert goes_to_the_script(["--lr", "1", "--workers=3"]).startswith("--workers stands behind the script")
    assert goes_to_the_script(["--lr", "1"]) == ""
    assert goes_to_the_script(["--", "--workers", "3"]) == ""


def test_the_scripts_arguments_may_follow_two_dashes() -> None:
    assert own(["--", "--lr", "1"]) == own(["--lr", "1"]) == ["--lr", "1"]
    assert own(["a", "--", "b"]) == ["a", "--", "b"]


def test_a_rate_is_the_growth_over_the_last_seconds() -> None:
    rate = Rate()
    assert rate.per_second is None
    for second in range(20):
        rate.see(count=second * (10 if second < 10 else 30), now=float(second))
    assert rate.per_second == 30.0
    rate.see(count=1, now=20.0)
    assert rate.per_second is None


def test_a_rate_does_not_count_the_time_before_the_first_sample() -> None:
    rate = Rate()
    for second, count in enumerate([0, 0, 0, 16, 32]):
        rate.see(count, now=float(second))
    assert rate.per_second == 16.0


def test_figures_are_written_for_people() -> None:
    assert [amount(size) for size in (0, 999, 1000, 1_234_567, 10**12, 10**15)] == [
        "0 B", "999 B", "1.0 kB", "1.2 MB", "1.0 TB", "1000.0 TB",
    ]  # fmt: skip
    assert [seconds(value) for value in (None, 0.0034, 0.25, 1.5)] == ["–", "3 ms", "250 ms", "1.50 s"]


def test_a_job_that_goes_on_with_other_arguments_than_were_given_says_so() -> None:
    given = ["python", "train.py", "--lr", "0.5"]
    assert keeps_another("train", tuple(given), given) == ""
    assert keeps_another("train", ("python", "train.py", "--note", "a b"), given) == (
        "job train keeps the command that it was created with, `python train.py --note 'a b'`, not "
        "`python train.py --lr 0.5`. To run this one, end that job first (Ctrl-C), or name another with --job"
    )
