"""A job whose models lie on a device that does not exist: a tensor that is made on the wrong one is an error.

`python tests/other_device.py '[{"stage": 1}]'` runs a job with each of these options, through a loss and a join.
Tensors of the device are fake (shapes and devices, no values), all others are real; PyTorch itself refuses an operation
on tensors of two devices. Whatever is read from the device is ones, so no bit is looked at. A process of its own,
because the device is known to all of torch from then on. In stage 3 storages are freed and found again as on any other.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import shoal.blocks.flat
import shoal.blocks.unit_flats
import torch
from crew import Crew, Task
from crew import _model as model_of_the_crew
from shoal.blocks.originals import Originals
from shoal.blocks.released import ON_TOUCH, Released
from shoal.checkpoint.snapshot import Arena, take_snapshot
from shoal.guards.write_guards import TakenGradientGuard
from shoal.process.device import HostDevice
from shoal.training.corruption_watch import block_checksums
from shoal.training.engine import Engine
from shoal_protos.runs import every
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten
DRAWN = (aten.uniform_.default, aten.normal_.default, aten.bernoulli_.float)
"""They fill with random numbers: nothing to do."""
STEPS = 4


class OtherDevice(HostDevice):
    """Copies are at once, but the host is another device."""

    kind = torch.device("privateuseone:0")
    on_host = False

    def pinned(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(elements, dtype=dtype)


class Ones(FakeTensorMode):
    """Tensors of the device have no values; those that are read are ones, and equal to all others of the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        wanted = given.get("device")
        is_there = any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, given)))
        goes_there = wanted is not None and torch.device(wanted).type == OtherDevice.kind.type
        if not is_there and not goes_there:
            return func(*args, **given)
        if func in DRAWN:
            return args[0]
        if func is aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        if func is aten.equal.default:
            assert args[0].device == args[1].device, f"{args[0].device} is compared with {args[1].device}"
            return True
        if func is aten._to_copy.default and wanted is not None and goes_there != is_there:
            dtype = given.get("dtype") or args[0].dtype
            if not goes_there:
                return torch.ones(args[0].shape, dtype=dtype)
            with self:
                return torch.empty(args[0].shape, dtype=dtype, device=wanted)
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            return args[0]
        return super().__torch_dispatch__(func, types, args, given)  # type: ignore[no-untyped-call]


def model_there() -> nn.Module:
    """The crew's model with tensors of the device in place of its own; tied ones stay tied. From now on this thread
    knows the device.
    """
    model = model_of_the_crew()
    Ones(allow_non_fake_inputs=True).__enter__()
    there: dict[int, nn.Parameter] = {}
    for part in model.modules():
        for name, one in part._parameters.items():
            if one is not None:
                blank = torch.empty(one.shape, dtype=one.dtype, device=OtherDevice.kind)
                part._parameters[name] = there.setdefault(id(one), nn.Parameter(blank, one.requires_grad))
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=OtherDevice.kind)
    return model


def do_without_addresses() -> None:
    """Fake tensors have none, and a class of their own, which parameters get back when they are gathered."""

    def to(module: nn.Module, dtype: torch.dtype) -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)
        for part in module.modules():
            floating = {n: one for n, one in part._buffers.items() if one is not None and one.is_floating_point()}
            part._buffers |= {name: one.to(dtype) for name, one in floating.items()}

    def guard(self: TakenGradientGuard, parameters: list[nn.Parameter]) -> None:
        self._parameters, self._taken = parameters, [torch.empty_like(one) for one in parameters]  # not sparse

    def put_back(originals: Originals) -> None:
        with torch.no_grad():
            for parameter, exact in zip(originals._parameters, originals.named.values(), strict=True):
                parameter.copy_(exact)

    def restore(parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.__class__ = FakeTensor  # type: ignore[assignment]
            vars(parameter).pop(ON_TOUCH, None)

    shoal.blocks.unit_flats.restore = restore
    Released.__torch_dispatch__ = FakeTensor.__torch_dispatch__
    shoal.blocks.flat._refuse_shared_storage = lambda _: None
    TakenGradientGuard.__init__ = guard  # type: ignore[method-assign, assignment]
    Originals.put_back = put_back  # type: ignore[method-assign]
    nn.Module.to = to  # type: ignore[method-assign, assignment]


def read_and_take(engine: Engine) -> None:
    """What a comparison, a save and a fill do with what is held."""
    state = engine.context.state
    runs = state.held.runs
    if engine.global_step != STEPS // 2 or not runs:
        return
    assert block_checksums(state, runs).device.type == "cpu"
    take_snapshot(state.layout, state.weights, state.held, runs, state.buffers.committed, Arena(state.device))
    found = state.held.home.states(runs, with_weights=True)
    came = {stretch: {k: torch.zeros(v.shape, dtype=v.dtype) for k, v in one.items()} for stretch, one in found.items()}
    state.held.take(came)
    now = state.held.home.states(runs, with_weights=True)
    devices = {key: value.device for one in found.values() for key, value in one.items()}
    assert devices == {key: value.device for one in now.values() for key, value in one.items()}
    state.held.join()
    assert state.everything == every(state.layout.blocks)


def main() -> None:
    _setup_privateuseone_for_python_backend("other")
    do_without_addresses()
    ends = []
    for options in json.loads(sys.argv[1]):
        task = Task(
            {"max_steps": STEPS, "lanes": 2, **options}, model=model_there, device=OtherDevice, in_loop=read_and_take
        )
        with Crew("ab", task) as crew:
            crew.train_to(1)
            crew.add("c")
            crew.train_to(2)
            crew.kill("b")
            ends.append(crew.finish())
    print(len(ends), flush=True)
    os._exit(0)  # torch lets go of a thread's mode after the thread is joined, and aborts where the interpreter is gone


if __name__ == "__main__":
    main()
