"""Frozen parameters: in one file that all checkpoints of a path share, written when none is there yet.

No optimizer changes them, so a checkpoint of a model whose larger part is frozen stays small. The file's name has their
digest; a manifest names the file, so that a checkpoint is whole without the script that built the model. They are read
one after the other, twice: where they are sharded they come unit by unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from torch import Tensor

from shoal.blocks.host_memory import tensor_bytes
from shoal.checkpoint.checksum import checksum
from shoal.checkpoint.container import CODES, Region, header
from shoal.checkpoint.manifest import FrozenEntry, TensorEntry, safe_name
from shoal.checkpoint.retention import FROZEN
from shoal.checkpoint.retrying_storage import Chunks
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.writer import head_entry
from shoal.model_export import Reading
from shoal.training.state import digest_of


def write_frozen(
    storage: Storage, named: Mapping[str, Tensor], incarnation: str, reading: Reading = iter
) -> FrozenEntry | None:
    """Writes the file where no whole one is there. None where nothing is frozen."""
    if not named:
        return None
    checksums: dict[str, str] = {}
    digest = digest_of(_noting_checksums(named, reading, checksums))
    regions, at = list[Region](), 0
    for name, tensor in named.items():
        regions.append(Region(name, tensor.dtype, tuple(tensor.shape), at))
        at += regions[-1].bytes
    head = header(regions, {"format": "pt", "shoal": "frozen parameters"})
    size, stem = len(head) + at, f"{FROZEN}{digest[:32]}"
    there = [name for name, found in storage.list().items() if name.startswith(stem) and found == size]
    file = there[0] if there else f"{stem}-{safe_name(incarnation)}.safetensors"
    if not there:
        storage.write(file, Chunks(partial(_stream, head, named, reading)))
    tensors = {
        region.name: TensorEntry(
            dtype=CODES[region.dtype],  # type: ignore[arg-type]
            shape=region.shape,
            at=region.at + len(head),
            checksum=checksums[region.name],
        )
        for region in regions
    }
    return FrozenEntry(file=file, bytes=size, head=head_entry(head), digest=digest, tensors=tensors)


def _noting_checksums(
    named: Mapping[str, Tensor], reading: Reading, found: dict[str, str]
) -> Iterator[tuple[str, Tensor]]:
    for name, value in zip(named, reading(list(named.values())), strict=True):
        copy = value.detach().to("cpu", copy=True)  # numpy pins what it looks at
        found[name] = checksum(tensor_bytes(copy)).hex()
        yield name, copy


def _stream(head: bytes, named: Mapping[str, Tensor], reading: Reading) -> Iterator[memoryview]:
    yield memoryview(head)
    for value in reading(list(named.values())):
        yield tensor_bytes(value.detach().to("cpu", copy=True))
