"""Python values as JSON and back, exactly: what a scheduler's or a user's `state_dict` may hold.

Numbers, strings, None, bytes, lists, tuples, sets, dicts with any such keys, tensors and numpy arrays. What JSON lacks
is a section `{"$": kind, "of": …}`; tensors stand beside it under names. Nothing that is read back can run code, which
is why it is not a pickle.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from shoal_protos.errors import UserError
from torch import Tensor

from shoal.core.checkpoint_errors import CheckpointDamaged
from shoal.core.container import CODES

Json = Any
"""What `json` reads and writes."""

KIND, CONTENT = "$", "of"
SEQUENCES: dict[type, str] = {tuple: "tuple", torch.Size: "tuple", set: "set", frozenset: "frozenset"}
MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter", defaultdict: "dict"}


def encode(value: Any, tensors: dict[str, Tensor], where: str) -> Json:
    """The value as JSON; its tensors are put into `tensors`, under names that begin with `where`.

    Raises `UserError` naming the place of a value that cannot be kept.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is float:
        return {KIND: "float", CONTENT: repr(value)}
    if kind is bytes:
        return {KIND: "bytes", CONTENT: base64.b64encode(value).decode()}
    if kind is list:
        return [encode(item, tensors, f"{where}.{number}") for number, item in enumerate(value)]
    if kind in SEQUENCES:
        return {KIND: SEQUENCES[kind], CONTENT: encode(list(value), tensors, where)}
    if kind in MAPPINGS:
        return _mapping(value, tensors, where)
    return _array(value, tensors, where)


def _mapping(value: Mapping[Any, Any], tensors: dict[str, Tensor], where: str) -> Json:
    if type(value) is dict and all(type(key) is str for key in value) and KIND not in value:
        return {key: encode(item, tensors, f"{where}.{key}") for key, item in value.items()}
    pairs = [
        [encode(key, tensors, f"{where}, key {key!r}"), encode(item, tensors, f"{where}.{key}")]
        for key, item in value.items()
    ]
    return {KIND: MAPPINGS[type(value)], CONTENT: pairs}


def _array(value: Any, tensors: dict[str, Tensor], where: str) -> Json:
    if isinstance(value, Tensor) and value.layout == torch.strided and value.dtype in CODES:
        kind, tensor = "tensor", value.detach().cpu().clone()
    elif isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in "biufc" and value.itemsize <= 8:
        kind = "numpy" if isinstance(value, numpy.ndarray) else "numpy number"
        tensor = torch.from_numpy(numpy.array(value))
    else:
        raise UserError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved or sent to a "
            "joiner; use numbers, strings, lists, tuples, dicts, tensors and arrays."
        )
    name = _free(where, tensors)
    tensors[name] = tensor.contiguous()
    return {KIND: kind, CONTENT: name}


def _free(where: str, tensors: Mapping[str, Tensor]) -> str:
    """A name that no other tensor has: keys 1 and "1" of a dict look alike in a path."""
    name, number = where, 1
    while name in tensors:
        number += 1
        name = f"{where}#{number}"
    return name


def decode(tree: Json, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `encode`. Raises `CheckpointDamaged` for a tree that `encode` does not make."""
    try:
        return _decoded(tree, tensors)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointDamaged(f"a state cannot be read: {error!r}.") from None


def _decoded(tree: Json, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_decoded(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if KIND not in tree:
        return {key: _decoded(item, tensors) for key, item in tree.items()}
    kind, content = tree[KIND], tree[CONTENT]
    match kind:
        case "float":
            return float(content)
        case "bytes":
            return base64.b64decode(content, validate=True)
        case "tensor":
            return tensors[content].clone()
        case "numpy":
            return tensors[content].numpy().copy()
        case "numpy number":
            return tensors[content].numpy()[()]
        case "tuple" | "set" | "frozenset":
            made: type = {"tuple": tuple, "set": set, "frozenset": frozenset}[kind]
            return made(_decoded(item, tensors) for item in content)
        case "dict" | "ordered" | "counter":
            mapping: type = {"dict": dict, "ordered": OrderedDict, "counter": Counter}[kind]
            return mapping({_decoded(key, tensors): _decoded(item, tensors) for key, item in content})
    raise ValueError(f"it holds the kind {kind!r}")
