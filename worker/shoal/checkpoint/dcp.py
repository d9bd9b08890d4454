"""A checkpoint as a directory of `torch.distributed.checkpoint`, so that plain PyTorch goes on from it.

`{"model": state dict, "optimizer": {"state": {name: …}, "param_groups": […]}}` with the model's own names: the form of
`torch.distributed.checkpoint.state_dict`, which loads it into DDP, FSDP and plain modules alike. The whole state is in
memory while it is written.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from shoal_protos.errors import UserError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from shoal.checkpoint import named
from shoal.checkpoint.export import cannot_export
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.plain import decode
from shoal.checkpoint.reader import Reader


def export_dcp(reader: Reader, folder: Path, dtype: torch.dtype | None) -> None:
    """Writes the directory, which must not hold anything yet. `dtype`: of the model's floating tensors.

    Raises `UserError`.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} already exists; choose a new directory for the export.")
    content: dict[str, Any] = {"model": _model(reader, dtype)}
    if reader.manifest.kind == "training":
        content["optimizer"] = {
            "state": {name: _cloned(state) for name, state in named.states(reader) if state},
            "param_groups": _groups(reader.manifest),
        }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no_dist.*|.*torch.distributed.*")  # this is one process
        try:
            save(content, storage_writer=FileSystemWriter(folder), no_dist=True)
        except OSError as error:
            raise cannot_export(folder, error) from error
        except CheckpointException as error:
            (why, _), *_ = error.failures.values()
            raise cannot_export(folder, why) from error


def _model(reader: Reader, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in named.tensors(reader, exact=named.shows_masters(dtype)):
        found[name] = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor.clone()
    return found | {other: found[first] for other, first in reader.manifest.layout.tied.items()}


def _cloned(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in state.items()}


def _groups(manifest: Manifest) -> list[dict[str, Any]]:
    """Hyper-parameters, and the names of each group's parameters in the order of the model."""
    groups = [{**decode(group, {}), "params": []} for group in manifest.groups]
    for bucket in manifest.blocks.buckets:
        groups[bucket.group]["params"] += [slot.parameter.name for slot in bucket.slots]
    for group in groups:
        group["params"].reverse()  # a layout has the parameters in reverse registration order
    return groups
