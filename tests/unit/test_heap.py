"""What a step frees stays with the process. In processes of their own: the heap's settings are the process's."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import check

pytestmark = check("measures memory")

PROGRAM = """
import resource, sys, torch
from shoal.process.host_memory import keep_freed_memory

def a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [torch.ones(2 << 20) for _ in range(8)]  # 8 MiB each
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if "keep" in sys.argv:
    keep_freed_memory()
a_step()
print(min(a_step() for _ in range(5)))  # where blocks come to lie differs a little from step to step
"""
FEW = 500
PAGES = 16_384
"""Of 64 MiB."""
SEARCHES = 100
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def faults_of_a_step(*arguments: str, **environment: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env={**os.environ, **environment}, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return int(done.stdout)


def test_a_worker_that_loads_torch_and_shoal_looks_for_no_garbage_meanwhile() -> None:
    program = (
        "import gc, shoal; shoal.initialize; print(gc.isenabled(), [one['collections'] for one in gc.get_stats()])"
    )
    environment = {**os.environ, "SHOAL_CONTROLLER": "http://127.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    is_enabled, *collections = done.stdout.replace("[", "").replace("]", "").replace(",", "").split()
    assert is_enabled == "True"
    assert sum(map(int, collections)) < SEARCHES, "there are 600 where nothing keeps them off"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_a_step_meets_the_pages_that_the_one_before_has_freed() -> None:
    assert faults_of_a_step("keep") < FEW


def test_the_users_own_settings_of_the_heap_stand() -> None:
    tuned = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
    assert faults_of_a_step("keep", **tuned) > PAGES // 2


GROWN = """
import sys, torch
from pathlib import Path
from shoal.process.host_memory import keep_freed_memory

if "keep" in sys.argv:
    keep_freed_memory()
kept = [torch.empty(1 << 20) for _ in range(100)]  # 4 MiB each
middles = [one.data_ptr() + (2 << 20) for one in kept]
found = 0
for line in Path("/proc/self/smaps").read_text().splitlines():
    if "-" in line.split()[0]:
        begin, end = (int(place, 16) for place in line.split()[0].split("-"))
    elif line.startswith("VmFlags") and "hg" in line.split():
        found += sum(begin <= place < end for place in middles)
print(found)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or not HUGE_PAGES.exists(), reason="needs glibc and huge pages")
def test_what_a_workers_heap_grows_by_is_asked_for_in_huge_pages() -> None:
    def huge(*arguments: str) -> int:
        command = [sys.executable, "-c", GROWN, *arguments]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)

    assert huge("keep") == 100
    assert huge() == 0


PILE = """
import sys, torch
from pathlib import Path
from shoal.process.host_memory import give_back_freed_memory

def own_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

if "give" in sys.argv:
    assert give_back_freed_memory()
torch.ones(2 << 20)  # once it is freed, glibc takes the like from its heap
before = own_bytes()
pairs = [(torch.ones(1 << 18), torch.ones(1 << 12)) for _ in range(32)]
kept = [small for _, small in pairs]
del pairs
print(own_bytes() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_what_is_large_and_freed_is_given_back_though_what_came_after_it_is_kept() -> None:
    def left(*arguments: str) -> int:
        command = [sys.executable, "-c", PILE, *arguments]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)

    assert left("give") < 4 << 20 < 16 << 20 < left()
