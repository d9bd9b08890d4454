"""A plain model file as a checkpoint of step 0, which a job begins with (`resume`).

It holds tensors by name and no training state: one optimizer group, whatever the job has; a job takes the tensors by
name for its parameters, frozen parameters and buffers, and converts their dtype to its own. From safetensors or from a
torch state dict (read without running any code of the file's).
"""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from shoal_protos.errors import UserError
from shoal_protos.runs import every
from torch import Tensor

from shoal.blocks.flat import empty_flats, views
from shoal.blocks.held import HeldBlocks
from shoal.blocks.values import WholeValues
from shoal.checkpoint.catalogue import SaveName
from shoal.checkpoint.commit import commit
from shoal.checkpoint.container import CODES
from shoal.checkpoint.layout_entry import LayoutEntry
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.snapshot import Arena, take_snapshot
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.writer import Author, write_content
from shoal.core.layout import Trainable, lay_out

WRAPPINGS = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which training scripts keep a model's state dict among other things."""


def import_model(file: Path, storage: Storage) -> SaveName:
    """Writes the checkpoint; returns its name. Raises `UserError` for a file that holds no model."""
    tensors, tied = _once(read_model(file))
    layout = lay_out([Trainable(name, tuple(t.shape), t.dtype, 0) for name, t in tensors.items()])
    flats = empty_flats(layout)
    for bucket, flat in zip(layout.buckets, flats, strict=True):
        for slot, view in zip(bucket.slots, views(bucket, flat), strict=True):
            view.copy_(tensors[slot.parameter.name])
    weights = WholeValues(layout, flats)
    author = Author("import", secrets.token_hex(8))
    name = SaveName.of(0, 0, 0, author.incarnation)
    draft = Manifest(
        kind="model", job="", step=0, generation=0, last_step=0, layout=LayoutEntry.of(layout, tied), optimizer="",
        groups=[], data=None, scheduler=None, scaler=None, states={}, record="", buffers=(), frozen=None, config={},
        numerics={}, files=(),
    )  # fmt: skip
    storage.prepare()
    held = HeldBlocks(layout, torch.optim.SGD([torch.zeros(1)]), weights, {})
    held.hold(every(layout.blocks))
    snapshot = take_snapshot(layout, weights, held, every(layout.blocks), {}, Arena())
    entry = write_content(storage, name.folder, 0, author, snapshot)
    commit(storage, name.folder, draft, [entry.name])
    return name


def read_model(file: Path) -> dict[str, Tensor]:
    """Tensors by name, as the file has them."""
    try:
        with file.open("rb") as opened:
            head = opened.read(9)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from None
    try:
        if head[8:9] == b"{":
            return dict(load_file(file))
        content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        first = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise UserError(f"{file} is neither safetensors nor a torch state dict: {first}") from None
    return _state_dict(content, file)


def _state_dict(content: Any, file: Path) -> dict[str, Tensor]:
    for key in WRAPPINGS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise UserError(f"{file} holds a {type(content).__name__}; expected a state dict, names with tensors.")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise UserError(
                f'{file} holds a {type(value).__name__} under "{name}"; expected a state dict, names with tensors.'
            )
        if value.dtype not in CODES:
            raise UserError(f'{file} holds "{name}" with dtype {value.dtype}, which a checkpoint cannot hold.')
    return dict(content)


def _once(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tied tensors once, and their other names."""
    first: dict[tuple[int, torch.Size], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        kept = first.setdefault((tensor.data_ptr(), tensor.shape), name) if tensor.numel() else name
        if kept != name:
            tied[name] = kept
    return {name: tensor for name, tensor in tensors.items() if name not in tied}, tied
