"""What `shoal doctor` finds of this machine for cells of several processes: whether those that share a host find enough
devices here, connected by NVLink.

NVLink is what `nvidia-smi topo -m` says of pairs of devices; where there is no such tool nothing is said of it. One of
the checks of `training_checks.py`.
"""

from __future__ import annotations

import re
import subprocess
from itertools import combinations
from pathlib import Path

from shoal_protos.errors import UserError
from shoal_protos.finding import Finding, Given, Verdict
from shoal_protos.shape import Shape

TOPOLOGY = ("nvidia-smi", "topo", "-m")
TOOL_SECONDS = 20.0
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
NVLINK = re.compile(r"NV\d+")
EXPECTED = "devices for whole cells, connected by NVLink where their processes share a host"


def cells(given: Given) -> Finding:
    """The shape that the config gives cells, beside this machine's devices."""
    if not given["config"]:
        return Finding("cells", Verdict.OK, "no config was given", "--config FILE, to check its `shoal.cell`")
    try:
        from shoal.config.load import shape_of

        shape = shape_of(Path(given["config"]))
    except ImportError as error:
        return Finding("cells", Verdict.FAILED, f"it cannot be read here: {error}", EXPECTED, "install shoal[worker]")
    except UserError:
        return Finding("cells", Verdict.OK, "the config is at fault", EXPECTED)  # as the check of it says
    return fitting(shape, _devices(), _topology())


def fitting(shape: Shape, devices: int, topology: str) -> Finding:
    """Whether so many devices suit such cells. `topology`: what the tool printed; empty: it is not there."""
    together = len(shape.tight_parts[0])
    if shape.processes == 1 or not devices:
        why = f"cells of {shape}" if shape.processes > 1 else "a cell is one process"
        here = f"{devices} CUDA devices here" if devices else "no CUDA device here"
        return Finding("cells", Verdict.OK, f"{why}, {here}", EXPECTED)
    found = f"cells of {shape}, {devices} CUDA device{'s'[: devices != 1]} here"
    if together == 1:
        todo = 'give `"tight": ["tensor"]`, or processes of a cell may be on different hosts'
        return Finding("cells", Verdict.WARNING if shape.tensor > 1 else Verdict.OK, found, EXPECTED, todo)
    if devices % together:
        todo = f"start a multiple of {together} processes here; {devices % together} of the devices are in no cell"
        return Finding("cells", Verdict.WARNING, found, EXPECTED, todo)
    links = {pair: kind for pair, kind in links_of(topology).items() if max(pair) < devices}
    slow = [(pair, kind) for pair, kind in sorted(links.items()) if not NVLINK.fullmatch(kind)]
    if slow:
        ((one, other), kind) = slow[0]
        found += f"; GPU{one} and GPU{other} are connected by {kind}, not by NVLink"
        todo = "let CUDA_VISIBLE_DEVICES name devices that NVLink connects, or take smaller cells"
        return Finding("cells", Verdict.WARNING, found, EXPECTED, todo)
    known = "all connected by NVLink" if links else "whether NVLink connects them is not known (no nvidia-smi)"
    return Finding("cells", Verdict.OK, f"{found}, {known}", EXPECTED)


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
