"""What a worker tells of the error that ends its script."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from shoal.checkpoint.failure import ExportFailed, NeedsFreshProcess, result_of
from shoal.core.checkpoint_errors import CheckpointDamaged, StorageFailed
from shoal_protos.errors import JobFailed, UserError
from shoal_protos.messages import FRESH_PROCESS, START_AGAIN, WRONG_USE
from tiers import check

pytestmark = check("starts processes")


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except type(error) as caught:
        return caught


def test_a_fault_is_told_by_its_class_its_message_and_the_last_line_of_the_script() -> None:
    result = result_of(raised(ValueError("no such column")), step=11)
    assert result.step == 11 and not result.everyone
    assert result.failure.startswith("ValueError: no such column\n") and "test_worker_failure.py" in result.failure
    assert result.fault is not None and result.fault.frame.startswith("test_worker_failure.py:")
    assert (result.fault.exception, result.fault.message, result.fault.outage) == (
        "ValueError", "no such column", False,
    )  # fmt: skip


def test_the_frame_is_the_scripts_though_the_error_comes_out_of_a_library() -> None:
    try:
        Path("/none/such").read_text()
    except OSError as error:
        fault = result_of(error, 0).fault
    assert fault is not None and fault.frame.startswith("test_worker_failure.py:")


@pytest.mark.parametrize(
    ("error", "outage"),
    [
        (OSError(errno.EIO, "input/output error"), True),
        (ConnectionResetError("reset"), True),
        (StorageFailed("the place cannot be read"), True),
        (raised(RuntimeError("in a reader"), cause=TimeoutError("nothing came")), True),
        (MemoryError(), False),
        (ValueError("NaN"), False),
    ],
)
def test_what_may_be_back_later_is_an_outage(error: BaseException, outage: bool) -> None:
    fault = result_of(error, 0).fault
    assert fault is not None and fault.outage is outage


@pytest.mark.parametrize(
    ("error", "everyones"),
    [
        (UserError("optimizer.lr is -1; expected 0 or more"), True),
        (JobFailed("lr differs"), True),
        (CheckpointDamaged("half-written"), False),
        (raised(UserError("the place cannot be read"), cause=OSError(errno.EIO, "input/output error")), False),
        (raised(ExportFailed("no place for the model"), cause=OSError(errno.ENOSPC, "no space left")), True),
        (NeedsFreshProcess("it has trained before"), False),
        (ValueError("NaN"), False),
    ],
)
def test_a_mistake_of_the_users_or_a_failed_export_is_everyones_and_what_a_new_process_cures_is_not(
    error: BaseException, everyones: bool
) -> None:
    assert result_of(error, 0).everyone is everyones


def ended_by(ends: str) -> subprocess.CompletedProcess[str]:
    """A script that has called Shoal, and ends so."""
    script = f"""if True:
        import torch
        from shoal.checkpoint.failure import *
        from shoal.session.error_hook import tell_errors_in_a_sentence
        ALONE = dict(backend="gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        tell_errors_in_a_sentence()
        {ends}"""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)


def test_a_process_that_a_fresh_one_is_to_replace_says_so_in_a_sentence_and_by_its_exit_status() -> None:
    fault = result_of(raised(NeedsFreshProcess("it has trained before")), 3).fault
    assert fault is not None and fault.exception == FRESH_PROCESS
    done = ended_by("raise NeedsFreshProcess('it has trained before')")
    assert (done.returncode, done.stderr) == (START_AGAIN, "shoal: it has trained before\n")


@pytest.mark.parametrize(("error", "status"), [("UserError", WRONG_USE), ("NeedsFreshProcess", START_AGAIN)])
def test_a_sentence_is_told_where_torch_distributed_prints_what_a_hook_writes(error: str, status: int) -> None:
    """As it does in every cell, between `shoal.cell` and `shoal.initialize`."""
    done = ended_by(f"torch.distributed.init_process_group(**ALONE); raise {error}('lr is -1;\\nexpected more')")
    assert done.returncode == status
    assert done.stderr == "[rank0]: shoal: lr is -1;\n[rank0]: expected more\n"


def test_a_script_that_cannot_work_ends_with_a_sentence_instead_of_a_traceback_and_with_a_status_of_its_own() -> None:
    script = "import torch, shoal; shoal.initialize(torch.nn.Linear(1, 1), {'steps': 3}, [1, 2])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == WRONG_USE
    assert done.stderr.startswith("shoal: ") and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        ("raise UserError('a size is wrong')", WRONG_USE, "shoal: a size is wrong"),
        ("{}['a key']", 1, "still runs after"),
        ("sys.exit(3)", 1, 'its thread "mine" still runs after'),
    ],
)
def test_a_script_that_ends_before_its_engine_ends_its_process_though_a_thread_of_it_runs(
    end: str, status: int, words: str
) -> None:
    script = (
        "import sys, threading; from shoal_protos.errors import UserError; from shoal.session import error_hook as it\n"
        "it.GRACE_SECONDS = 0.1; it.tell_errors_in_a_sentence({'SHOAL_CONTROLLER': 'host:1'})\n"
        f"threading.Thread(target=threading.Event().wait, name='mine').start(); {end}"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == status and words in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("call", ["runtime", "pipe.PipelineModule([], num_stages=0)", "initialize()"])
def test_what_a_script_for_deepspeed_cannot_do_ends_it_with_a_sentence_wherever_it_is(call: str) -> None:
    script = f"import shoal.deepspeed as deepspeed; deepspeed.init_distributed(); deepspeed.{call}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == WRONG_USE
    assert "\nshoal: " in done.stderr and "Traceback" not in done.stderr


def test_an_error_of_a_script_for_deepspeed_is_told_as_python_tells_it() -> None:
    script = "import shoal.deepspeed as deepspeed; deepspeed.init_distributed(); {}['a key']"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.stderr.splitlines()[-1] == "KeyError: 'a key'"


def test_native_code_that_crashes_leaves_the_scripts_stack_behind(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "shoal": {"lanes": 1, "max_steps": 1},
    }
    script = tmp_path / "train.py"
    script.write_text(
        "import ctypes, torch, shoal\n"
        f"engine = shoal.initialize(torch.nn.Linear(1, 1), {config}, [torch.ones(1)] * 2)\n"
        "ctypes.string_at(0)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr and f'File "{script}", line 3 in <module>' in done.stderr
