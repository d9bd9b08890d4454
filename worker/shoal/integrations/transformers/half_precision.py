"""Models in half precision, as `from_pretrained` gives them where the checkpoint is: trained parameters become float32.

Frozen parameters stay as they are, so that a large base under adapters takes no more memory; where others of that model
are trained beside them, the forward runs under autocast. Parameters that the engine keeps in half precision itself,
with float32 masters, are left alone: the DeepSpeed configuration asks for that (`bf16`, `fp16`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from shoal_protos.training_log import get_logger
from torch import Tensor, nn

HALVES = (torch.bfloat16, torch.float16)

log = get_logger("shoal")


def mixes_halves(model: nn.Module) -> bool:
    """Whether parameters in half precision are trained beside frozen ones."""
    return {one.requires_grad for one in model.parameters() if one.dtype in HALVES} == {True, False}


def upcast(model: nn.Module) -> None:
    """Parameters that are trained in half precision are float32 from here on."""
    mixed, dtypes = mixes_halves(model), set[str]()
    for module in model.modules():
        for tensor in _to_be_upcast(module, mixed):
            dtypes.add(str(tensor.dtype))
            tensor.grad, tensor.data = None, tensor.data.float()
    if dtypes:
        autocast = ", and the forward runs under autocast" if mixed else ""
        log.info("trained_in_float32", loaded_as=sorted(dtypes), means=f"frozen parameters stay as they are{autocast}")


def _to_be_upcast(module: nn.Module, mixed: bool) -> Iterator[Tensor]:
    """Of the module itself. Beside trained ones also frozen vectors, since a norm takes no wider input than its weight;
    and the buffers of modules with such parameters.
    """
    own = [one for one in module.parameters(recurse=False) if one.dtype in HALVES]
    found = [one for one in own if one.requires_grad or (mixed and one.dim() < 2)]
    yield from found
    if found:
        yield from (buffer for buffer in module.buffers(recurse=False) if buffer.dtype in HALVES)
