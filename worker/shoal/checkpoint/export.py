"""Exports of a checkpoint in the model's own names: a `model.safetensors`, or a `torch.distributed.checkpoint` folder.

The safetensors file can have another dtype. It is written tensor by tensor, so that a model larger than memory can be
exported, and every block is verified on the way; tied tensors are written once, and the metadata has their other names,
as with `engine.export`.

The folder lets plain PyTorch continue training: `{"model": state dict, "optimizer": {"state": {name: …},
"param_groups": […]}}`, the form of `torch.distributed.checkpoint.state_dict`, which loads it into DDP, FSDP and plain
modules alike. The whole state is in memory while it is written.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from shoal_protos.errors import UserError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from shoal.checkpoint import named
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.named import Known, check_cuts, has_averages, names, shows_masters, tensors
from shoal.checkpoint.reader import Reader
from shoal.checkpoint.storage import LocalStorage
from shoal.core.checkpoint_errors import StorageFull
from shoal.core.container import Region, header
from shoal.core.plain import decode
from shoal.process.host_memory import tensor_bytes

FLOATS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""What `--dtype` takes; tensors of whole numbers and truth values keep their own."""


def dtype_named(name: str) -> torch.dtype:
    """Raises `UserError` naming what is allowed."""
    if name not in FLOATS:
        raise UserError(f"--dtype is {name}; expected {', '.join(FLOATS)}.")
    return FLOATS[name]


def export(reader: Reader, file: Path, dtype: torch.dtype | None, averaged: bool = False) -> None:
    """Writes the file; it is whole or not there. An old one of that name is replaced. `averaged`: averages of weights
    in the place of parameters, in the parameters' dtype where no other is said. Raises `UserError`.
    """
    _refuse(reader, averaged)
    if not file.name or file.is_dir():
        raise UserError(f"{file} is a folder; name the file to write, such as {file / 'model.safetensors'}.")
    regions, at = list[Region](), 0
    for name, known in names(reader.manifest).items():
        regions.append(Region(name, _converted(known, dtype), known.shape, at))
        at += regions[-1].bytes
    metadata = {"format": "pt", **reader.manifest.layout.tied}
    beside = f".{file.name}.{os.getpid()}"
    found = tensors(reader, exact=shows_masters(dtype), averaged=averaged)
    try:
        LocalStorage(file.absolute().parent).write(beside, _stream(regions, header(regions, metadata), found))
        file.with_name(beside).replace(file)
    except (OSError, StorageFull) as error:
        raise cannot_export(file, error) from error


def _refuse(reader: Reader, averaged: bool) -> None:
    if averaged and not has_averages(reader.manifest):
        raise UserError(
            f"cannot export averages of {reader.where}: it has none, as its job kept none by that step "
            "(`shoal.average`); leave out --averaged."
        )
    check_cuts(reader.manifest.blocks, f"export {reader.where}")


def cannot_export(place: Path, why: BaseException) -> UserError:
    """What can be done about a place that takes no export."""
    reason = "there is no room" if isinstance(why, StorageFull) else f"{getattr(why, 'strerror', '') or why}"
    return UserError(f"cannot export the model to {place}: {reason}; choose a place that can be written and has room.")


def _converted(known: Known, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and known.dtype.is_floating_point else known.dtype


def _stream(
    regions: Sequence[Region],
    head: bytes,
    found: Iterable[tuple[str, torch.Tensor]],  # each of its own shape
) -> Iterator[memoryview]:
    yield memoryview(head)
    for region, (name, tensor) in zip(regions, found, strict=True):
        assert region.name == name, f"{name} is where {region.name} was expected"
        yield tensor_bytes(tensor.to(region.dtype))


def export_dcp(reader: Reader, folder: Path, dtype: torch.dtype | None, averaged: bool = False) -> None:
    """Writes the directory, which must not hold anything yet. `dtype`: of the model's floating tensors. `averaged`: as
    for `export`.

    Raises `UserError`.
    """
    _refuse(reader, averaged)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} already exists; choose a new directory for the export.")
    content: dict[str, Any] = {"model": _model(reader, dtype, averaged)}
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


def _model(reader: Reader, dtype: torch.dtype | None, averaged: bool) -> dict[str, torch.Tensor]:
    found, known = {}, names(reader.manifest)
    for name, tensor in tensors(reader, exact=shows_masters(dtype), averaged=averaged):
        found[name] = tensor.to(_converted(known[name], dtype), copy=True)
    return found | {other: found[first] for other, first in reader.manifest.layout.tied.items()}


def _cloned(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in state.items()}


def _groups(manifest: Manifest) -> list[dict[str, Any]]:
    """Hyper-parameters, and the names of each group's parameters in the order of the model; of experts, those of one
    number on all places follow each other.
    """
    groups = [{**decode(group, {}), "params": []} for group in manifest.groups]
    for buckets in reversed(manifest.blocks.by_stage):
        for bucket in buckets:
            for slot in bucket.slots:
                groups[bucket.group]["params"] += slot.parameter.whole_names(manifest.layout.experts)[::-1]
    for group in groups:
        group["params"].reverse()  # a layout has the parameters of a stage in reverse registration order
    return groups
