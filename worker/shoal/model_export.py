"""Writes the model as a plain safetensors file with the model's own parameter names."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import save_file
from shoal_protos.errors import UserError
from torch import Tensor, nn

from shoal.core.module_names import named_state


def export(module: nn.Module, path: Path) -> None:
    """Atomic: the file is whole or not there. Tied tensors are written once; the metadata maps their other names.

    Raises `UserError` where the place cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    first_name: dict[tuple[int, tuple[int, ...]], str] = {}
    metadata = {"format": "pt"}
    for name, value in named_state(module):
        place = (value.data_ptr(), tuple(value.shape))
        if value.numel() and place in first_name:
            metadata[name] = first_name[place]
            continue
        first_name[place] = name
        tensors[name] = value.detach().cpu().clone().contiguous()
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, beside, metadata)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UserError(f"cannot export the model to {path}: {error}. Choose a place that can be written.") from error
