"""Which device a worker computes on, and what is refused there. Nothing here needs one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import shoal
import shoal.process.device
import torch
from rule import Edit, rule
from shoal.exchange.finite import by_halves
from shoal.first_values.building import meant_device
from shoal.offload.state_place import StatePlace, held_blocks
from shoal.process.device import HOST, HostDevice, device_of
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.launchers.local import WorkerEnvironment
from shoal_protos.errors import UserError


def test_a_module_on_the_cpu_is_trained_on_the_host() -> None:
    assert device_of([("parameter a", torch.zeros(2)), ("buffer b", torch.zeros(2))]) is HOST
    assert device_of([]) is HOST


def on(device: str) -> Any:
    """As much of a tensor there as is looked at."""
    return SimpleNamespace(device=torch.device(device))


def test_a_model_on_two_devices_is_refused_by_what_lies_on_them() -> None:
    with pytest.raises(UserError) as refused:
        device_of([('parameter "a"', on("cpu")), ('buffer "b"', on("cuda:0"))])
    assert str(refused.value) == (
        'parameter "a" lies on cpu and buffer "b" on cuda:0; a worker trains on one device. Move the whole model there '
        'before shoal.initialize: model.to("cuda").'
    )


def test_a_model_that_is_built_without_memory_is_trained_on_the_cpu() -> None:
    assert device_of([("a", on("meta")), ("b", on("cpu"))]) is device_of([("a", on("meta"))]) is HOST
    with pytest.raises(UserError, match=r"^b lies on cuda:0; expected cpu or the accelerator of this machine"):
        device_of([("a", on("meta")), ("b", on("cuda:0"))])


def test_a_device_that_this_machine_has_no_accelerator_for_is_refused() -> None:
    with pytest.raises(UserError, match=r'parameter "a" lies on xpu:0; expected cpu or the accelerator of'):
        device_of([('parameter "a"', on("xpu:0"))])


def test_a_local_worker_gets_the_device_that_fewest_have_and_a_job_may_say_another() -> None:
    environment = WorkerEnvironment(lambda: ["h:1"], None, {"CUDA_VISIBLE_DEVICES": "2,GPU-5,7"}, ("2", "GPU-5", "7"))
    job = JobSpec("job", wanted=1, command=("true",))
    given: list[str] = []
    for _ in range(5):
        given.append(environment.of("w0", job, given)["CUDA_VISIBLE_DEVICES"])
    assert given == ["2", "GPU-5", "7", "2", "GPU-5"]
    assert environment.of("w0", job, ["2", "", "7"])["CUDA_VISIBLE_DEVICES"] == "GPU-5"
    shared = JobSpec("job", wanted=1, command=("true",), env={"CUDA_VISIBLE_DEVICES": "7"})
    assert environment.of("w0", shared, [])["CUDA_VISIBLE_DEVICES"] == "7"
    assert "CUDA_VISIBLE_DEVICES" not in WorkerEnvironment(lambda: ["h:1"]).of("w0", job)


@rule(
    "On an accelerator the norm's rows are added up element by element: the order of its kernel for sums depends "
    "on the number of rows",
    "Devices",
    broken_by=Edit(
        "shoal.exchange.finite",
        "    while rows.shape[1] > 1:\n"
        "        half = rows.shape[1] // 2\n"
        "        rows = rows[:, :half] + rows[:, half:]\n"
        "    return rows[:, 0]\n"
        "\n"
        "\n"
        "def _tree_sum",
        "    return rows.sum(1)\n\n\ndef _tree_sum",
    ),
)
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_rows_are_added_up_by_halves_in_an_order_that_depends_on_nothing_else(rows: int) -> None:
    def plain(row: list[float]) -> float:
        if len(row) == 1:
            return row[0]
        half = len(row) // 2
        added = [float(torch.tensor(a) + torch.tensor(b)) for a, b in zip(row[:half], row[half:], strict=True)]
        return plain(added)

    torch.manual_seed(0)
    values = torch.rand(64, 256) * 10.0 ** torch.randint(-6, 6, (64, 256))
    found: list[Any] = by_halves(values[:rows]).tolist()
    assert found == [plain(row) for row in values[:rows].tolist()]


class Elsewhere(HostDevice):
    kind = torch.device("cuda:0")
    on_host = False


def place_refused(**wanted: Any) -> str:
    sharded = wanted.pop("sharded", True)
    place = StatePlace(device=Elsewhere(), parameters_on_host=True, **wanted)
    nothing: Any = None
    with pytest.raises(UserError) as refused:
        held_blocks(place, nothing, nothing, nothing, {}, sharded)
    return str(refused.value)


def test_parameters_are_in_host_memory_only_in_stage_3_and_with_their_state() -> None:
    given = '`zero_optimization.offload_param.device` is "cpu" and the model is on cuda:0; '
    assert place_refused(on_host=True, sharded=False) == (
        f"{given}below ZeRO stage 3 every worker has all parameters there. Set `zero_optimization.stage`: 3, or leave "
        "`offload_param` out."
    )
    assert place_refused() == (
        f"{given}parameters are updated where they lie, so their optimizer state cannot be on the device: set "
        '`zero_optimization.offload_optimizer: {"device": "cpu"}`, or "nvme" with a folder.'
    )


@pytest.mark.parametrize(
    ("device", "sentence"),
    [
        ("meta", r"^shoal.deferred\(device=…\) is meta; expected the device where the model is to be trained.$"),
        ("gpu", r"^shoal.deferred\(device=…\) is gpu, which cannot be used here: Expected one of cpu, cuda, "),
    ],
)
def test_a_model_is_built_for_a_device_that_is_there(device: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence), shoal.deferred(device=device):
        pytest.fail("the body was run")
    with shoal.deferred(device="cpu"):
        model = torch.nn.Linear(2, 2)
    assert meant_device(model) == HOST.kind and model.weight.is_meta


def test_nothing_says_which_kind_of_accelerator_but_the_seam_and_the_groups() -> None:
    """And `shoal doctor`, which says to a person what this machine has."""
    package = Path(shoal.process.device.__file__).parent
    wrong = [
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if file.parent.name not in ("group", "doctor") and file.name != "device.py" and "cuda" in file.read_text()
    ]
    assert not wrong
