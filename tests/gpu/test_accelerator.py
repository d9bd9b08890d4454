"""The seam and a staged group on a real device: copies are late there by themselves."""

from __future__ import annotations

import pytest
import torch
from over_gloo import over_gloo
from shoal.blocks.flat import add_to, put_first
from shoal.core.sampler import Sampler
from shoal.data.data_workers import Reading
from shoal.data.fetch import Fetcher
from shoal.data.source import NumberedSamples
from shoal.group.device_group import StagedGroup
from shoal.group.group import Group
from shoal.process.device import Accelerator, device_of
from torch import Tensor

ELEMENTS = 4 << 20


@pytest.fixture
def device() -> Accelerator:
    found = device_of([("parameter", torch.zeros(1, device="cuda"))])
    assert isinstance(found, Accelerator)
    return found


def slowly(value: float) -> Tensor:
    """On the device, which needs a while for it: whoever does not wait finds something else."""
    matrix = torch.eye(4096, device="cuda")
    for _ in range(50):
        matrix = matrix @ matrix
    return torch.full((ELEMENTS,), value, device="cuda") * matrix[0, 0]


def test_a_copy_to_the_host_has_what_the_device_was_given_before_it(device: Accelerator) -> None:
    here = device.pinned(ELEMENTS, torch.float32)
    source = slowly(3.0)
    copy = device.to_host(source, here)
    copy.wait()
    assert copy.has_landed and here.eq(3.0).all()


def test_what_joins_a_copy_to_the_device_finds_it_landed(device: Accelerator) -> None:
    here = device.pinned(ELEMENTS, torch.float32).fill_(5.0)
    target = slowly(1.0)
    before = target * 2
    copy = device.to_device(here, target, device.promise(target))
    copy.join()
    assert (before.eq(2.0) & (target * 2).eq(10.0)).all()


def test_memory_that_is_given_back_at_once_is_not_used_by_others_before_its_copy_is_over(device: Accelerator) -> None:
    targets = [torch.zeros(ELEMENTS, device="cuda") for _ in range(20)]
    for number, target in enumerate(targets):
        here = device.pinned(ELEMENTS, torch.float32).fill_(float(number))
        device.to_device(here, target, device.promise(target)).join()
        device.give_back(here)
        del here
    assert all(target.eq(float(number)).all() for number, target in enumerate(targets))


def test_messages_between_tensors_of_a_device_have_what_was_computed() -> None:
    def act(group: Group) -> None:
        staged = StagedGroup(group, device_of([("parameter", torch.zeros(1, device="cuda"))]))
        others = [peer for peer in range(group.size) if peer != group.rank]
        sends = [staged.send(slowly(10.0 * group.rank + peer), peer, 1) for peer in others]
        came = [torch.zeros(ELEMENTS, device="cuda") for _ in others]
        staged.wait([staged.receive(message, peer, 1) for message, peer in zip(came, others, strict=True)])
        for message, peer in zip(came, others, strict=True):
            assert message.eq(10.0 * peer + group.rank).all()
        staged.wait(sends)

    over_gloo(3, act)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_gradients_in_half_precision_add_up_to_the_bits_that_they_have_on_the_host(dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)  # each value there is
    sums = []
    for device in ("cpu", "cuda"):
        gradient, view = every.to(device), torch.empty(every.shape, device=device)
        put_first(gradient, view)
        first = view.clone()
        add_to(gradient.flip(0), view)
        sums.append([first.cpu(), view.cpu()])
    for there, here in zip(*sums, strict=True):
        are_numbers = ~here.isnan()
        assert torch.equal(there.isnan(), here.isnan())
        assert torch.equal(there.view(torch.int32)[are_numbers], here.view(torch.int32)[are_numbers])


def test_a_batch_goes_to_the_device_through_pinned_memory() -> None:
    dataset = [{"x": torch.full((1000,), float(number)), "name": str(number)} for number in range(40)]
    source = NumberedSamples(dataset, None, Sampler(40, 4, 2, 1, 3), 3)
    for processes in (0, 1):
        fetcher = Fetcher(source, None, 3, "cuda", Reading(processes, pinned=True))
        try:
            batch = fetcher.micro_batch(0, 0, 0)
        finally:
            fetcher.close()
        expected = source.read((0, 0, 0)).batch
        assert batch["x"].is_cuda and torch.equal(batch["x"].cpu(), expected["x"]) and batch["name"] == expected["name"]
