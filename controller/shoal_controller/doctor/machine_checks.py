"""What `shoal doctor` finds of the machine: Python, what is installed, the clock, shared memory, open files.

Standard library only, so that it says what is missing where anything is.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import resource
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from shoal_protos.finding import Check, Finding, Given, Verdict
from shoal_protos.limits import LEAST_OPEN_FILES
from shoal_protos.release import RELEASE
from shoal_protos.text import of_shoal

from shoal_controller.cli.endings import EXTRAS

PYTHONS = ((3, 11), (3, 13))
SHARED_MEMORY = Path("/dev/shm")
SHARED_BYTES = 1 << 30
"""What a few workers of a DataLoader need; containers have 64 MB where nothing is said."""
OPEN_FILES = 4096
"""A controller has several for each worker."""
NOT_BEFORE = 1_767_225_600.0
"""2026-01-01: no clock that is set is behind it."""
TIMEX_BYTES = 512
"""More than the kernel's structure has."""
NOT_SYNCHRONIZED = 5
"""What adjtimex returns where no time service keeps the clock."""


def python(_: Given) -> Finding:
    """The interpreter and the system."""
    found = f"Python {platform.python_version()} on {platform.system()} ({platform.machine()})"
    expected = "Python 3.11 to 3.13 on Linux"
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        return Finding("python", Verdict.FAILED, found, expected, "make an environment with another Python")
    if sys.platform != "linux":
        todo = "a script runs alone here, without a controller; for more use Linux"
        return Finding("python", Verdict.WARNING, found, expected, todo)
    return Finding("python", Verdict.OK, found, expected)


def packages(given: Given) -> Finding:
    """What the extras bring that are needed here."""
    lacking = {
        extra: [module for module in sorted(EXTRAS[extra]) if importlib.util.find_spec(module) is None]
        for extra in given["extras"]
    }
    needed = " and ".join(given["extras"]) or "shoal"
    missing = {extra: modules for extra, modules in lacking.items() if modules}
    if missing:
        named = "; ".join(f"no {', '.join(modules)}" for modules in missing.values())
        return Finding("packages", Verdict.FAILED, named, needed, f"install {' and '.join(missing)}")
    return Finding("packages", Verdict.OK, f"{of_shoal(RELEASE)}, all of {needed}", needed)


def clock(_: Given) -> Finding:
    """Whether it is set, and kept by a time service."""
    now = time.time()
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < NOT_BEFORE:
        return Finding("clock", Verdict.FAILED, shown, "the time of today", "set the clock: certificates depend on it")
    if _is_adrift():
        todo = "start a time service (chrony, systemd-timesyncd); logs and certificates of machines must agree"
        return Finding("clock", Verdict.WARNING, f"{shown}, not synchronized", "a clock kept by NTP", todo)
    return Finding("clock", Verdict.OK, shown, "a clock kept by NTP")


def _is_adrift() -> bool:
    """Whether the kernel says that nothing keeps the clock. It is only asked."""
    if sys.platform != "linux":
        return False
    buffer = ctypes.create_string_buffer(TIMEX_BYTES)
    return int(ctypes.CDLL(None).adjtimex(buffer)) == NOT_SYNCHRONIZED


def shared_memory(_: Given) -> Finding:
    """For the workers of a DataLoader."""
    expected = "1 GB or more in /dev/shm"
    todo = "give containers more (docker run --shm-size=4g, kubernetes.shm_size of a spec), or read without workers"
    if not SHARED_MEMORY.is_dir():
        return Finding("shared memory", Verdict.WARNING, "there is no /dev/shm", expected, todo)
    free = shutil.disk_usage(SHARED_MEMORY).free
    found = f"{free / 1e9:.1f} GB free in /dev/shm"
    if free < SHARED_BYTES or not os.access(SHARED_MEMORY, os.W_OK):
        return Finding("shared memory", Verdict.WARNING, found, expected, todo)
    return Finding("shared memory", Verdict.OK, found, expected)


def open_files(_: Given) -> Finding:
    """The limit that a controller can raise for itself."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    found = "no limit" if most == resource.RLIM_INFINITY else f"at most {most}"
    if most != resource.RLIM_INFINITY and most < LEAST_OPEN_FILES:
        todo = "raise the hard limit (ulimit -n 1024, LimitNOFILE=)"
        return Finding("open files", Verdict.FAILED, found, f"{OPEN_FILES} or more", todo)
    if most != resource.RLIM_INFINITY and most < OPEN_FILES:
        todo = "raise the hard limit (ulimit -Hn, LimitNOFILE=); a controller serves fewer workers"
        return Finding("open files", Verdict.WARNING, found, f"{OPEN_FILES} or more", todo)
    return Finding("open files", Verdict.OK, found, f"{OPEN_FILES} or more")


CHECKS: Mapping[str, Check] = {
    "python": python,
    "packages": packages,
    "clock": clock,
    "shared memory": shared_memory,
    "open files": open_files,
}
