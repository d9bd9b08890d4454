"""Peaks of memory in stage 3, counted by the allocator: what is there once is not there twice, unit by unit at most."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import check

pytestmark = [pytest.mark.xdist_group("peaks"), check("measures memory")]

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS.parent / "benchmarks"))
from tensor_bytes import preloaded  # noqa: E402 (the counter is the benchmarks')

SMALL = 1 << 16
"""Scalars, messages, pages."""


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Bytes above what was there before, by what was done; and what is left of them."""
    return measured(tmp_path_factory.mktemp("peaks"))


def measured(place: Path, *more: str) -> dict[str, int]:
    """As `peak_memory.py` prints it."""
    path = f"{TESTS}:{TESTS / 'unit'}"
    environment = {**os.environ, **preloaded(place), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TESTS / "peak_memory.py"), str(place), *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert not done.returncode, done.stderr
    return dict(json.loads(done.stdout))


def test_a_save_takes_one_copy_of_what_it_writes_and_nothing_else(peaks: dict[str, int]) -> None:
    state = 3 * peaks["parameters"]
    assert state <= peaks["save"] <= state + SMALL
    assert peaks["save, left"] <= state + SMALL


def test_a_streamed_save_takes_no_copy(peaks: dict[str, int]) -> None:
    assert peaks["streamed save"] <= SMALL


@pytest.mark.parametrize("work", ["save", "streamed save", "fingerprint", "export"])
def test_on_a_device_nothing_takes_more_than_two_units_above_what_is_there(peaks: dict[str, int], work: str) -> None:
    assert peaks[f"{work} on a device"] <= 2 * peaks["unit"] + SMALL
    assert peaks[f"{work} on a device, left"] <= SMALL


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_mirrors_on_the_host_take_no_more_of_a_device_than_none(tmp_path: Path) -> None:
    """Stage 3, four workers, by the bytes of all their devices at the peak of a step."""
    peaks = measured(tmp_path, "crew")
    assert peaks["mirrors on the host"] <= 1.05 * peaks["alone"]


def test_a_fingerprint_and_an_export_take_two_units_at_most(peaks: dict[str, int]) -> None:
    assert peaks["fingerprint"] <= 2 * peaks["unit"]
    assert peaks["unit"] <= peaks["export"] <= 2 * peaks["unit"] + SMALL
    assert peaks["fingerprint, left"] <= SMALL
    assert peaks["export, left"] <= SMALL


@pytest.mark.parametrize("ending", ["", " seen"])
def test_a_fill_is_received_where_it_stays(peaks: dict[str, int], ending: str) -> None:
    state = 3 * peaks["parameters"]
    assert state <= peaks[f"fill{ending}, left"] <= peaks[f"fill{ending}"] <= state + SMALL


def test_a_fill_takes_on_a_device_two_units_at_most_above_what_stays(peaks: dict[str, int]) -> None:
    state = 3 * peaks["parameters"]
    assert state <= peaks["fill on a device, left"] <= state + SMALL
    assert peaks["fill on a device"] <= state + 2 * peaks["unit"]


@pytest.mark.parametrize("ending", ["", " seen"])
def test_what_changes_have_cut_is_joined_unit_by_unit(peaks: dict[str, int], ending: str) -> None:
    assert peaks[f"join{ending}"] <= 2 * peaks["unit"]
    assert peaks[f"join{ending}, left"] <= SMALL


@pytest.mark.parametrize("ending", ["", " seen"])
def test_blocks_that_go_give_their_memory_back_while_the_rest_of_their_bucket_is_copied(
    peaks: dict[str, int], ending: str
) -> None:
    state = 3 * peaks["parameters"]
    assert peaks[f"free{ending}"] <= 2 * peaks["unit"]
    assert peaks[f"free{ending}, left"] + peaks[f"free all{ending}, left"] == pytest.approx(-state, abs=SMALL)
    assert peaks[f"free{ending}, left"] == pytest.approx(-state / 2, rel=0.02)
