"""Writes the model as a plain safetensors file with the model's own parameter names, tensor by tensor.

So the whole model need not be in memory for it: where parameters are sharded they come one unit after the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from shoal_protos.errors import UserError
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shoal.cells.marks import is_divided, local_of
from shoal.checkpoint.failure import ExportFailed
from shoal.checkpoint.named import Known
from shoal.core.container import CODES, Region, header
from shoal.core.units import named_state
from shoal.process.host_memory import tensor_bytes

Reading = Callable[[Sequence[Tensor]], Iterable[Tensor]]
"""The same tensors one after the other, each with its values until the next is asked for."""


def export(module: nn.Module, path: Path, reading: Reading = iter) -> None:
    """Atomic: the file is whole or not there. Tied tensors are written once; the metadata maps their other names.

    Raises `ExportFailed` where the place cannot be written, and what `reading` raises.
    """
    tensors, tied = _tensors(module)
    known = {name: Known(tuple(value.shape), value.dtype) for name, value in tensors.items()}
    write(path, known, tied, reading(list(tensors.values())))


def write(
    path: Path,
    known: Mapping[str, Known],
    tied: Mapping[str, str],
    tensors: Iterable[Tensor],  # each of its own shape, in the order of `known`
) -> None:
    """The same of these tensors. `tied`: other names of some."""
    regions, at = list[Region](), 0
    for name, one in known.items():
        regions.append(Region(name, one.dtype, one.shape, at))
        at += regions[-1].bytes
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as file:
            file.write(header(regions, {"format": "pt", **tied}))
            file.writelines(_contents(tensors))
        beside.replace(path)
    except OSError as error:
        raise ExportFailed(
            f"cannot export the model to {path}: {error}. Choose a place that can be written."
        ) from error
    finally:
        beside.unlink(missing_ok=True)


def _tensors(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """By name, each once; and the other names of those that have several. Raises `UserError` for an unknown dtype."""
    tensors: dict[str, Tensor] = {}
    first_name: dict[object, str] = {}
    tied: dict[str, str] = {}
    for name, value in named_state(module):
        if is_traceable_wrapper_subclass(value) and not is_divided(value):
            raise UserError(
                f'cannot export the model: "{name}" is a {type(value).__name__}, which safetensors lacks. Save what is '
                "trained by the script (state_dict within engine.gathered()), or export from a model that is not "
                "quantised."
            )
        if value.dtype not in CODES:
            raise UserError(f'cannot export the model: "{name}" has dtype {value.dtype}, which safetensors lacks.')
        place = id(value) if isinstance(value, nn.Parameter) else (value.data_ptr(), tuple(value.shape))
        if value.numel() and place in first_name:
            tied[name] = first_name[place]
            continue
        first_name[place] = name
        tensors[name] = value
    return tensors, tied


def _contents(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    for value in tensors:
        here = local_of(value.detach()).cpu()
        yield tensor_bytes(here.clone().contiguous())  # a copy: numpy pins what it looks at
