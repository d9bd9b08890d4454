"""What a worker's GPU is at: asked of NVML beside training, and a GPU that says nothing costs a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import shoal.process.gpu_watch as gpu_watch
import torch
from fake_nvml import MIB, NAME, TOTAL_MIB, UUID, FakeNvml
from integration.cluster import until
from shoal.process.device import HOST, gpu_uuid
from shoal.process.gpu_watch import GpuWatch
from shoal_protos.gpu import Gpu, Throttle
from shoal_protos.messages import Telemetry
from shoal_protos.wire.telemetry import read_telemetry, write_telemetry

PATIENCE_SECONDS = 100


@contextmanager
def watching(nvml: Callable[[], Any], every: float = 0.001) -> Iterator[GpuWatch]:
    watch = GpuWatch(UUID, nvml, every)
    watch.start()
    try:
        yield watch
    finally:
        watch.close()


def shown(watch: GpuWatch, wanted: Callable[[Gpu], bool] = lambda gpu: True) -> Gpu:
    """The first figures that are wanted."""
    return until("the GPU's figures", lambda: (found := watch.newest) is not None and wanted(found) and found)


def logged(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Why figures are missing, as the log has it."""
    lines = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    return [line["why"] for line in lines if line["event"] == "gpu_figures_missing"]


def test_the_figures_are_those_that_nvml_tells() -> None:
    with watching(lambda: FakeNvml(ahead=7), every=60) as watch:
        assert shown(watch) == Gpu(
            NAME, 3, 0.97, 62464 * MIB, TOTAL_MIB * MIB, 86.0, Throttle.POWER_CAP | Throttle.HEAT
        )


def test_each_reason_of_nvml_has_its_name_and_idleness_is_none() -> None:
    found = {}
    for reasons in (0x0, 0x1, 0x2, 0x4, 0x8, 0x10, 0x20, 0x40, 0x80, 0x100, 0xFF):
        nvml = FakeNvml()
        nvml.nvmlDeviceGetCurrentClocksEventReasons = lambda handle, reasons=reasons: reasons  # type: ignore[method-assign]
        with watching(lambda nvml=nvml: nvml, every=60) as watch:
            throttled = shown(watch).throttled
            assert throttled is not None
            found[reasons] = throttled.names
    everything = ("power_cap", "heat", "power_brake", "slowdown")
    assert found == {
        0x0: (), 0x1: (), 0x2: (), 0x4: ("power_cap",), 0x8: ("slowdown",), 0x10: (), 0x20: ("heat",),
        0x40: ("heat",), 0x80: ("power_brake",), 0x100: (), 0xFF: everything,
    }  # fmt: skip


def test_a_part_of_a_gpu_tells_its_memory_and_its_boards_temperature() -> None:
    with watching(lambda: FakeNvml(mig=True), every=60) as watch:
        part = shown(watch)
    assert (part.index, part.memory_bytes, part.celsius, part.throttled) == (3, 1024 * MIB, 38.0, Throttle(0))
    assert part.use_ratio is None
    assert part.why == f"GPU 3 ({NAME}) does not tell its use (Not Supported)"


def test_what_a_gpu_does_not_tell_is_one_sentence_in_the_log_however_often_it_is_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nvml = FakeNvml(unsupported={"nvmlDeviceGetTemperature", "nvmlDeviceGetCurrentClocksEventReasons"})
    with watching(lambda: nvml) as watch:
        shown(watch, lambda gpu: nvml.looks > 5)
        found = shown(watch)
    why = f"GPU 3 ({NAME}) does not tell its temperature (Not Supported), throttling (Not Supported)"
    assert (found.celsius, found.throttled, found.why) == (None, None, why)
    assert found.use_ratio is not None and found.memory_bytes is not None
    assert logged(capsys) == [why]


def test_what_a_gpu_cannot_be_at_is_named_and_not_shown_and_all_else_is(capsys: pytest.CaptureFixture[str]) -> None:
    odd: dict[str, tuple[Any, str, str]] = {
        "nvmlDeviceGetMemoryInfo": (SimpleNamespace(used=(1 << 64) - 1, total=(1 << 64) - 1), "memory", "1.1259e+15"),
        "nvmlDeviceGetTemperature": ((1 << 32) - 5, "temperature", "1000"),
        "nvmlDeviceGetUtilizationRates": (SimpleNamespace(gpu=101), "use", "1"),
    }
    fields = {
        "memory": {"memory_bytes": None, "memory_total_bytes": None},
        "temperature": {"celsius": None},
        "use": {"use_ratio": None},
    }
    for function, (answer, figure, highest) in odd.items():
        nvml = FakeNvml(ahead=7)
        setattr(nvml, function, lambda *_, answer=answer: answer)
        with watching(lambda nvml=nvml: nvml, every=60) as watch:
            found = shown(watch)
        why = f"GPU 3 ({NAME}) does not tell its {figure} (the driver's answer is not within 0 to {highest})"
        assert {name: getattr(found, name) for name in fields[figure]} == fields[figure]
        assert found.why == why and logged(capsys) == [why]
        assert [found.use_ratio, found.memory_bytes, found.celsius, found.throttled].count(None) == 1
        assert read_telemetry(write_telemetry(Telemetry(gpu=found))).gpu == found


def test_a_function_that_an_older_package_lacks_costs_its_figure_and_not_the_thread() -> None:
    def lacks(handle: str) -> None:
        raise AttributeError("module 'pynvml' has no such function")

    nvml = FakeNvml()
    vars(nvml)["nvmlDeviceGetCurrentClocksEventReasons"] = lacks
    with watching(lambda: nvml) as watch:
        found = shown(watch)
        shown(watch, lambda gpu: nvml.looks > 3)
    assert found.throttled is None and found.celsius is not None
    assert found.why == f"GPU 3 ({NAME}) does not tell its throttling (module 'pynvml' has no such function)"


def test_figures_that_cannot_be_made_end_as_a_sentence_and_no_old_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> None:
        raise RuntimeError("a bug")

    nvml = FakeNvml()
    with watching(lambda: nvml) as watch:
        shown(watch, lambda gpu: gpu.use_ratio is not None)
        monkeypatch.setattr(gpu_watch._Found, "figures", fails)
        assert shown(watch, lambda gpu: gpu.use_ratio is None).why.startswith("no figures of the GPU: NVML cannot be")


def test_a_name_in_bytes_is_text_on_the_wire() -> None:
    nvml = FakeNvml()
    vars(nvml)["nvmlDeviceGetName"] = lambda handle: b"NVIDIA \xff"
    with watching(lambda: nvml, every=60) as watch:
        found = shown(watch)
    assert found.name == "NVIDIA \N{REPLACEMENT CHARACTER}"
    assert read_telemetry(write_telemetry(Telemetry(gpu=found))).gpu == found


def test_a_driver_that_does_not_answer_is_told_as_such_and_waited_for_by_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_watch, "OLD_SECONDS", 0.05)
    monkeypatch.setattr(gpu_watch, "END_SECONDS", 0.05)
    nvml = FakeNvml()
    with watching(lambda: nvml) as watch:
        shown(watch, lambda gpu: nvml.looks > 2)
        nvml.answers.clear()
        silent = shown(watch, lambda gpu: bool(gpu.why))
        watch.close()
        assert watch._thread.is_alive(), "it hangs in the driver"
        nvml.answers.set()
        watch._thread.join(PATIENCE_SECONDS)
    assert silent.why.startswith("NVML has not answered for ") and "Xid" in silent.why
    assert (silent.name, silent.index, silent.use_ratio) == (NAME, 3, None)


def test_only_its_own_thread_asks_and_that_ends_with_it() -> None:
    nvml = FakeNvml()
    with watching(lambda: nvml) as watch:
        shown(watch, lambda gpu: nvml.looks > 3)
    watch._thread.join(PATIENCE_SECONDS)
    assert nvml.threads == {"shoal-gpu"} and not watch._thread.is_alive()


def test_a_machine_without_a_driver_ends_as_one_sentence_of_the_real_library(
    capsys: pytest.CaptureFixture[str],
) -> None:
    watch = GpuWatch(UUID)
    watch.start()
    watch._thread.join(PATIENCE_SECONDS)
    assert not watch._thread.is_alive()
    why = (
        "no figures of the GPU: NVML cannot be asked (NVML Shared Library Not Found); give the container the "
        "driver's tools: NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    )
    assert watch.newest == Gpu(why=why)
    assert logged(capsys) == [why]
    watch.close()


def test_a_package_that_is_not_installed_is_named_with_its_extra() -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'pynvml'", name="pynvml")

    with watching(missing) as watch:
        assert shown(watch).why == ("no figures of the GPU: nvidia-ml-py is not installed; install shoal[gpu]")


def test_nothing_is_asked_of_a_machine_without_a_gpu() -> None:
    assert gpu_uuid(torch.device("cpu")) == ""
    assert gpu_uuid(torch.device("meta")) == ""
    assert GpuWatch.of(HOST) is None


def test_shoal_does_not_import_the_package_where_its_session_is_made() -> None:
    code = (
        "import sys; sys.modules['pynvml'] = None\n"  # torch imports it where it finds it
        "import shoal, shoal.session.link_choice\n"
        "shoal.session.link_choice.open_link({'SHOAL_CONTROLLER': '127.0.0.1:1', 'SHOAL_JOB': 'job'})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_the_newest_figures_do_not_wait_for_a_driver_that_hangs() -> None:
    nvml = FakeNvml()
    with watching(lambda: nvml) as watch:
        shown(watch)
        nvml.answers.clear()
        assert watch.newest is not None, "where it waits for the driver it waits for ever"
        nvml.answers.set()
