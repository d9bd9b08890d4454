"""What `shoal doctor` finds of what training needs here: torch, devices, the backend, the config, checkpoints' place.

Each check says for itself what is missing; the command ends one that hangs.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal_protos.all_at_once import Refusals
from shoal_protos.errors import ShoalError, UserError
from shoal_protos.finding import Check, Finding, Given, Verdict
from shoal_protos.shape import Shape

if TYPE_CHECKING:
    from shoal.config.training import TrainingConfig

TORCH = (2, 13)
BACKEND_SECONDS = 20.0
ROOM_BYTES = 1 << 30
MANY_STEPS = 1_000_000
"""Of a job whose config does not say how many it has."""
NO_TORCH = "install shoal[worker]"
NO_PLACE = "give another path, or the right to use it"


def torch_itself(_: Given) -> Finding:
    """Whether it can be imported, and is one that Shoal knows."""
    expected = f"torch {TORCH[0]}.{TORCH[1]} or later, below {TORCH[0] + 1}"
    try:
        import torch
    except ImportError as error:
        return Finding("torch", Verdict.FAILED, f"it cannot be imported: {error}", expected, NO_TORCH)
    found = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    number = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not TORCH <= number < (TORCH[0] + 1,):
        return Finding("torch", Verdict.WARNING, found, expected, f"{NO_TORCH}: it brings one that was tested")
    return Finding("torch", Verdict.OK, found, expected)


def devices(_: Given) -> Finding:
    """What a model can be on."""
    try:
        import torch
    except ImportError:
        return Finding("devices", Verdict.FAILED, "unknown without torch", "a device", NO_TORCH)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    host = f"{cores} CPU core{'s'[: cores != 1]}"
    if not torch.cuda.is_available():
        todo = "" if not Path("/proc/driver/nvidia").exists() else "this torch has no CUDA, or not for this driver"
        verdict = Verdict.WARNING if todo else Verdict.OK
        return Finding("devices", verdict, f"{host}, no CUDA device", "CUDA devices, or the CPU", todo)
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    total = torch.ones(8, device="cuda").sum().item()
    if total != 8:
        return Finding("devices", Verdict.FAILED, f"{names[0]} adds up eight ones to {total}", "8", "replace it")
    return Finding("devices", Verdict.OK, f"{host}; {', '.join(names)}", "CUDA devices, or the CPU")


def backend(_: Given) -> Finding:
    """Two processes of this machine add a number up over gloo, under the address that others would use."""
    expected = "two processes that reach each other over gloo"
    try:
        import torch.distributed as dist
    except ImportError:
        return Finding("backend", Verdict.FAILED, "unknown without torch", expected, NO_TORCH)
    if not dist.is_available() or not dist.is_gloo_available():
        return Finding("backend", Verdict.FAILED, "this torch has no gloo", expected, NO_TORCH)
    todo = "name this machine in /etc/hosts, open its loopback to itself, or set SHOAL_HOST (docs/network.md)"
    try:
        why = _added_up()
    except OSError as error:
        why = str(error)
    nccl = " and NCCL" if dist.is_nccl_available() else ""
    if why:
        return Finding("backend", Verdict.FAILED, f"{socket.gethostname()}: {why}", expected, todo)
    return Finding("backend", Verdict.OK, f"gloo{nccl}; two processes added up over {socket.gethostname()}", expected)


def _added_up() -> str:
    """Why a sum of two processes does not come out; empty where it does."""
    with tempfile.TemporaryDirectory(prefix="shoal-doctor-") as folder:
        child = os.fork()
        if child == 0:
            os._exit(0 if _sum(folder, 1) == "" else 1)
        why = _sum(folder, 0)
        _, status = os.waitpid(child, 0)
    return why or ("" if status == 0 else "the other process did not reach this one")


def _sum(folder: str, rank: int) -> str:
    import torch
    import torch.distributed

    dist: Any = torch.distributed  # half of it has no types
    store = dist.FileStore(os.path.join(folder, "store"), 2)  # noqa: PTH118
    try:
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=BACKEND_SECONDS))
        one = torch.ones(1)
        group.allreduce([one]).wait()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return "" if one.item() == 2 else f"1 + 1 came out as {one.item()}"


def config(given: Given) -> Finding:
    """The training config that was named: all that is wrong with it."""
    if not given["config"]:
        return Finding("config", Verdict.OK, "none was given", "--config FILE, to check one")
    expected = "a config without faults"
    try:
        from shoal.config.load import load_config

        settled = load_config(Path(given["config"]))
        _try_named(settled)
    except ImportError as error:
        return Finding("config", Verdict.FAILED, f"it cannot be read here: {error}", expected, NO_TORCH)
    except UserError as error:
        return Finding("config", Verdict.FAILED, str(error), expected, "see docs/configuration.md")
    return Finding("config", Verdict.OK, f"{given['config']}: {settled.lanes} lanes", expected)


def _try_named(settled: TrainingConfig) -> None:
    """Raises `UserError` for an optimizer or a scheduler that cannot be made as the config has it, where torch is."""
    try:
        from torch import nn, optim

        from shoal.optim.config_sections import build_optimizer, build_scheduler
    except ImportError:
        return
    refusals, model = Refusals("the config"), nn.Linear(1, 1)
    made = refusals.of(build_optimizer, settled.optimizer, model) if settled.optimizer else None
    if settled.scheduler:
        over = made or optim.AdamW(model.parameters())
        refusals.of(build_scheduler, settled.scheduler, over, settled.max_steps or MANY_STEPS)
    refusals.raise_all()


def checkpoints(given: Given) -> Finding:
    """Whether the place for checkpoints can be written, read and cleared; it is left as it was."""
    expected, path = "a place that can be written and read, with room", ""
    try:
        path = given["checkpoint"] or _configured(given)
        if not path:
            return Finding("checkpoints", Verdict.OK, "no path was given", "--checkpoint PATH, or --config FILE")
        return _tried(path, expected)
    except ImportError as error:
        return Finding("checkpoints", Verdict.FAILED, f"it cannot be tried here: {error}", expected, NO_TORCH)
    except ShoalError as error:
        return Finding("checkpoints", Verdict.FAILED, str(error), expected, NO_PLACE)
    except OSError as error:
        found = f"cannot keep checkpoints in {path}: {error.strerror}"
        return Finding("checkpoints", Verdict.FAILED, found, expected, NO_PLACE)


def _configured(given: Given) -> Any:
    """The path that a config has, as far as it can be read."""
    from shoal_protos.config_file import read_config

    if not given["config"]:
        return None
    section = read_config(Path(given["config"])).get("shoal") or {}
    return (section.get("checkpoint") or {}).get("path") if isinstance(section, dict) else None


def _tried(path: str, expected: str) -> Finding:
    from shoal.checkpoint.storage import open_storage

    storage, name = open_storage(path), f"doctor-{secrets.token_hex(4)}"
    content = secrets.token_bytes(64)
    made = _missing_folders(path)
    try:
        storage.prepare()
        storage.publish(name, content)
        try:
            read = storage.read(name, len(content))
        finally:
            storage.remove(name)
    finally:
        for folder in made:
            if folder.exists():
                folder.rmdir()
    if read != content:
        return Finding("checkpoints", Verdict.FAILED, f"{storage.url} returns other bytes than were written", expected)
    free = None if "://" in path else shutil.disk_usage(_existing(path)).free
    found = f"{storage.url} can be written and read" + (f", {free / 1e9:.1f} GB free" if free is not None else "")
    if free is not None and free < ROOM_BYTES:
        todo = "free some space; `shoal estimate` says what a model's state takes"
        return Finding("checkpoints", Verdict.WARNING, found, expected, todo)
    return Finding("checkpoints", Verdict.OK, found, expected)


def _missing_folders(path: str) -> list[Path]:
    """Folders that trying it makes, the innermost first."""
    if "://" in path:
        return []
    folder = Path(path).expanduser().absolute()
    return [one for one in (folder, *folder.parents) if not one.exists()]


def _existing(path: str) -> Path:
    folder = Path(path).expanduser().absolute()
    return next(one for one in (folder, *folder.parents) if one.exists())


# ---- cells of several processes

TOPOLOGY = ("nvidia-smi", "topo", "-m")
TOOL_SECONDS = 20.0
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
NVLINK = re.compile(r"NV\d+")
WHOLE_CELLS = "devices for whole cells, connected by NVLink where their processes share a host"


def cells(given: Given) -> Finding:
    """The shape that the config gives cells, beside this machine's devices: those whose processes share a host are to
    find enough of them here, connected by NVLink, as `nvidia-smi topo -m` says it of pairs.
    """
    if not given["config"]:
        return Finding("cells", Verdict.OK, "no config was given", "--config FILE, to check its `shoal.cell`")
    try:
        from shoal.config.load import shape_of

        shape = shape_of(Path(given["config"]))
    except ImportError as error:
        return Finding(
            "cells", Verdict.FAILED, f"it cannot be read here: {error}", WHOLE_CELLS, "install shoal[worker]"
        )
    except UserError:
        return Finding("cells", Verdict.OK, "the config is at fault", WHOLE_CELLS)  # as the check of it says
    return fitting(shape, _devices(), _topology())


def fitting(shape: Shape, devices: int, topology: str) -> Finding:
    """Whether so many devices suit such cells. `topology`: what the tool printed; empty: it is not there."""
    together = len(shape.tight_parts[0])
    if shape.processes == 1 or not devices:
        why = f"cells of {shape}" if shape.processes > 1 else "a cell is one process"
        here = f"{devices} CUDA devices here" if devices else "no CUDA device here"
        return Finding("cells", Verdict.OK, f"{why}, {here}", WHOLE_CELLS)
    found = f"cells of {shape}, {devices} CUDA device{'s'[: devices != 1]} here"
    if together == 1:
        todo = 'give `"tight": ["tensor"]`, or processes of a cell may be on different hosts'
        return Finding("cells", Verdict.WARNING if shape.tensor > 1 else Verdict.OK, found, WHOLE_CELLS, todo)
    if devices % together:
        todo = f"start a multiple of {together} processes here; {devices % together} of the devices are in no cell"
        return Finding("cells", Verdict.WARNING, found, WHOLE_CELLS, todo)
    links = {pair: kind for pair, kind in links_of(topology).items() if max(pair) < devices}
    slow = [(pair, kind) for pair, kind in sorted(links.items()) if not NVLINK.fullmatch(kind)]
    if slow:
        ((one, other), kind) = slow[0]
        found += f"; GPU{one} and GPU{other} are connected by {kind}, not by NVLink"
        todo = "let CUDA_VISIBLE_DEVICES name devices that NVLink connects, or take smaller cells"
        return Finding("cells", Verdict.WARNING, found, WHOLE_CELLS, todo)
    known = "all connected by NVLink" if links else "whether NVLink connects them is not known (no nvidia-smi)"
    return Finding("cells", Verdict.OK, f"{found}, {known}", WHOLE_CELLS)


def links_of(topology: str) -> dict[tuple[int, int], str]:
    """How pairs of devices are connected, by the matrix that `nvidia-smi topo -m` prints: `NV18`, `PHB` and others."""
    lines = (COLOURS.sub("", line).split() for line in topology.splitlines())
    rows = [words[1:] for words in lines if len(words) > 2 and re.fullmatch(r"GPU\d+", words[0]) and "X" in words]
    pairs = combinations(range(len(rows)), 2)
    return {(one, other): rows[one][other] for one, other in pairs if other < len(rows[one])}


def _devices() -> int:
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _topology() -> str:
    try:
        done = subprocess.run(TOPOLOGY, capture_output=True, text=True, errors="replace", timeout=TOOL_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


CHECKS: Mapping[str, Check] = {
    "torch": torch_itself,
    "devices": devices,
    "cells": cells,
    "backend": backend,
    "config": config,
    "checkpoints": checkpoints,
}
