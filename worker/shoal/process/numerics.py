"""Numeric identity: all that decides which bits a kernel gives. Stated in the hello; a job refuses another one.

Read by the training thread (thread count and denormal mode are per thread) after `make_exact` and before the hello.
Names are what people see: `numerics: threads is 2, the job's is 1`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from shoal_protos.errors import UserError

from shoal.process.device import ACCELERATOR_PRECISIONS, described, make_accelerator_exact

VARIABLES = ("MKL_", "DNNL_", "ONEDNN_", "ATEN_", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE")
PRECISIONS = (*ACCELERATOR_PRECISIONS, "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")

INDUCTOR = "torch._inductor.config"
COLLECTIVES = (
    "_fuse_ddp", "_micro_pipeline_tp", "aten_distributed_optimizations.", "bucket_", "reorder_for_compute_comm_overlap",
    "reorder_prefetch_limit",
)  # fmt: skip
"""Settings of the compiler that begin so decide in which order compiled code makes collectives, and which it joins."""


def make_exact(exact: bool, torch_threads: int) -> None:
    """Set the thread count; where `exact`, all that an accelerator needs, before it is used."""
    torch.set_num_threads(torch_threads)
    if exact:
        make_accelerator_exact()


def check_threads(torch_threads: int) -> None:
    """Raises `UserError` where the script has changed the thread count since `make_exact`."""
    found = torch.get_num_threads()
    if found != torch_threads:
        raise UserError(
            f"torch uses {found} threads, and shoal.initialize has set {torch_threads}; other counts give other bits. "
            f"Remove torch.set_num_threads({found}) and set `shoal.torch_threads` in the config."
        )


def identity(
    device: torch.device | str = "cpu",
    environ: Mapping[str, str] | None = None,
    updates_on_host: bool = False,
    in_cells: bool = False,
) -> dict[str, str]:
    """The numeric identity of this thread, with the model on `device`. `updates_on_host`: wherever the model is.
    `in_cells`: several processes train a lane, by collectives that compiled code makes too.
    """
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "shoal": version("shoal"),
        "device": described(torch.device(device)),
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
    found |= _order_of_collectives() if in_cells else {}
    return {name: str(value) for name, value in found.items()}


def _order_of_collectives() -> dict[str, str]:
    """The compiler's settings for it that are not PyTorch's defaults; none where the compiler is not loaded."""
    if (settings := sys.modules.get(INDUCTOR)) is None:
        return {}
    lines = (line.removeprefix(f"{INDUCTOR}.").partition(" = ") for line in settings.codegen_config().splitlines())
    return {f"inductor.{name}": value for name, _, value in lines if name.startswith(COLLECTIVES)}


def _precision(name: str) -> str:
    backend, part = name.split(".")
    return str(getattr(getattr(torch.backends, backend), part).fp32_precision)


def _keeps_denormals() -> bool:
    smallest = torch.tensor([1], dtype=torch.int32).view(torch.float32)
    return bool((smallest + 0.0).view(torch.int32).item() == 1)
