"""Numeric identity: it names all that changes bits, and it is the same where nothing does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from crew import Task, undisturbed
from rule import holds, rule
from shoal.process.numerics import identity, make_exact
from shoal.training.engine import Engine
from shoal_protos.errors import UserError


@pytest.fixture(autouse=True)
def settings_are_left_as_they_were() -> Any:
    threads = torch.get_num_threads()
    precision = torch.backends.mkldnn.matmul.fp32_precision
    yield
    torch.set_num_threads(threads)
    torch.backends.mkldnn.matmul.fp32_precision = precision
    torch.set_flush_denormal(False)
    torch.use_deterministic_algorithms(False)


def changed(before: dict[str, str]) -> dict[str, str]:
    after = identity(environ={})
    assert after.keys() == before.keys()
    return {key: value for key, value in after.items() if value != before[key]}


def test_it_names_versions_device_and_processor() -> None:
    found = identity(environ={})
    assert found["torch"] == torch.__version__
    assert found["device"] == "cpu"
    assert found["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert all(isinstance(value, str) for value in found.values())
    assert identity(environ={}) == found


@holds("A worker's hello contains its")
def test_it_tells_threads_denormals_determinism_and_precision() -> None:
    make_exact(exact=True, torch_threads=1)
    before = identity(environ={})
    assert (before["threads"], before["denormals"]) == ("1", "kept")
    make_exact(exact=True, torch_threads=2)
    assert changed(before) == {"threads": "2"}
    make_exact(exact=True, torch_threads=1)
    if torch.set_flush_denormal(True):
        assert changed(before) == {"denormals": "flushed"}
        torch.set_flush_denormal(False)
    torch.use_deterministic_algorithms(True)
    assert changed(before) == {"deterministic_algorithms": "True"}
    torch.use_deterministic_algorithms(False)
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    assert changed(before) == {"mkldnn.matmul.fp32_precision": "bf16"}


@holds("A worker's hello contains its")
def test_where_cells_train_a_lane_it_tells_in_which_order_compiled_code_makes_collectives() -> None:
    import torch._inductor.config as inductor

    before = identity(environ={})
    assert identity(environ={}, in_cells=True) == before, "the defaults of this PyTorch, which it names"
    overlap = "aten_distributed_optimizations.enable_overlap_scheduling"
    with inductor.patch({"reorder_for_compute_comm_overlap": True, overlap: True, "max_autotune": True}):
        assert identity(environ={}) == before
        added = identity(environ={}, in_cells=True).items() - before.items()
    assert added == {("inductor.reorder_for_compute_comm_overlap", "True"), (f"inductor.{overlap}", "True")}


def test_it_has_the_variables_that_steer_kernels_and_no_others() -> None:
    steering = {"MKL_CBWR": "AVX2", "DNNL_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "default"}
    found = identity(environ={**steering, "HOME": "/root", "SHOAL_TOKEN": "secret"})
    assert {key: found[key] for key in found.keys() - identity(environ={}).keys()} == steering


def test_without_cuda_nothing_but_the_threads_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    make_exact(exact=True, torch_threads=1)
    assert not torch.are_deterministic_algorithms_enabled()


@rule(
    "… on CUDA: deterministic algorithms, no autotuning, a fixed cuBLAS workspace",
    "Arithmetic and layout",
    needs="CUDA",
    after="A worker with another numeric",
)
def test_on_cuda_algorithms_are_deterministic_unless_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    make_exact(exact=False, torch_threads=1)
    assert torch.backends.cudnn.benchmark and not torch.are_deterministic_algorithms_enabled()
    make_exact(exact=True, torch_threads=1)
    found = identity()
    assert found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert (found["deterministic_algorithms"], found["cudnn.benchmark"], found["cudnn.deterministic"]) == (
        "True", "False", "True",
    )  # fmt: skip


def test_another_thread_count_in_the_loop_is_refused_because_it_gives_other_bits() -> None:
    def more(engine: Engine) -> None:
        if engine.global_step == 1:
            torch.set_num_threads(3)

    with pytest.raises(UserError, match=r"torch uses 3 threads, .* has set 1; .*`shoal\.torch_threads`"):
        undisturbed(Task({"max_steps": 3}, in_loop=more))
