"""Numeric identity: all that decides which bits a kernel gives. Stated in the hello; a job refuses another one.

Read by the training thread (thread count and denormal mode are per thread) after `make_exact` and before the hello.
Names are what people see: `numerics: threads is 2, the job's is 1`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from shoal_protos.errors import UserError

VARIABLES = ("MKL_", "DNNL_", "ONEDNN_", "ATEN_", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE")
PRECISIONS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
WORKSPACE = ":4096:8"
"""What deterministic cuBLAS needs (eight buffers of 4 MiB): docs.nvidia.com/cuda/cublas, "Results reproducibility"."""


def make_exact(exact: bool, torch_threads: int) -> None:
    """Set the thread count; on CUDA, where `exact`, deterministic algorithms and no autotuning. Before CUDA is used."""
    torch.set_num_threads(torch_threads)
    if exact and torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a pass over all memory that is found


def check_threads(torch_threads: int) -> None:
    """Raises `UserError` where the script has changed the thread count since `make_exact`."""
    found = torch.get_num_threads()
    if found != torch_threads:
        raise UserError(
            f"torch uses {found} threads, and shoal.initialize has set {torch_threads}; other counts give other bits. "
            f"Remove torch.set_num_threads({found}) and set `shoal.torch_threads` in the config."
        )


def identity(
    device: torch.device | str = "cpu", environ: Mapping[str, str] | None = None, updates_on_host: bool = False
) -> dict[str, str]:
    """The numeric identity of this thread, with the model on `device`. `updates_on_host`: wherever the model is."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "shoal": version("shoal"),
        "device": _device_kind(torch.device(device)),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "denormals": "kept" if _keeps_denormals() else "flushed",
        "default_dtype": torch.get_default_dtype(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "mkldnn.deterministic": torch.backends.mkldnn.deterministic,
        **{f"{name}.fp32_precision": _precision(name) for name in PRECISIONS},
    }
    if updates_on_host and torch.device(device).type != "cpu":
        found["device"] += ", updates on the CPU"
    variables = os.environ if environ is None else environ
    found |= {name: value for name, value in sorted(variables.items()) if name.startswith(VARIABLES)}
    return {name: str(value) for name, value in found.items()}


def _device_kind(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"


def _precision(name: str) -> str:
    backend, part = name.split(".")
    return str(getattr(getattr(torch.backends, backend), part).fp32_precision)


def _keeps_denormals() -> bool:
    smallest = torch.tensor([1], dtype=torch.int32).view(torch.float32)
    return bool((smallest + 0.0).view(torch.int32).item() == 1)
