"""The names of a module's tensors as the plain model has them.

`torch.compile` wraps a module, or a part of one, and puts `_orig_mod.` into the names below it. Layouts, checkpoints,
exports and fingerprints go by these names, so compiled and plain runs of a model can read each other's.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

_WRAPPER = "_orig_mod."


def plain_name(name: str) -> str:
    """`_orig_mod.block.weight` → `block.weight`."""
    return name.replace(_WRAPPER, "")


def module_name(name: str) -> str:
    """Of a module, not of a tensor: `block._orig_mod` → `block`."""
    return plain_name(f"{name}.")[:-1]


def is_wrapper(module: nn.Module) -> bool:
    """Whether `torch.compile` has put it around another one."""
    return _WRAPPER.rstrip(".") in module._modules


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Each once, under its first name."""
    return ((plain_name(name), parameter) for name, parameter in module.named_parameters())


def named_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each once, persistent or not."""
    return ((plain_name(name), buffer) for name, buffer in module.named_buffers())


def named_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `module.state_dict`, not detached, under all their names."""
    return ((plain_name(name), value) for name, value in module.state_dict(keep_vars=True).items())
