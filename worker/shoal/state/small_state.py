"""The small state that a joiner is given, as bytes: a JSON tree in the plain form of checkpoints, and its tensors.

Peers are reached by sockets that nobody guards, so what comes from one can run no code: no pickle travels between
workers. `training_state.py` says what is in it. A message that is none is refused in one sentence before anything of
it counts.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import safetensors
import safetensors.torch
from shoal_protos.errors import PeerError
from torch import Tensor

from shoal.core.checkpoint_errors import CheckpointDamaged
from shoal.core.plain import decode, encode

LENGTH = struct.Struct("<Q")

FIELDS: dict[str, type | tuple[type, ...]] = {
    "step": int,
    "committed_in": int,
    "record": bytes,
    "hyper": list,
    "evaluating": list,
    "scheduler": (dict, type(None)),
    "loss_scale": (dict, type(None)),
    "buffers": dict,
    "last_step": int,
    "lineage": list,
    "frozen": str,
    "streams": list,
    "missed": tuple,
    "registered": dict,
    "followed": int,
}
OPTIONAL: dict[str, type | tuple[type, ...]] = {"joins": dict}
"""Left out where the script has declared none of it."""


def pack(content: Mapping[str, Any]) -> bytes:
    """`content` has all `FIELDS`, and perhaps `OPTIONAL` ones. Raises `UserError` naming what cannot be kept."""
    return packed(dict(content), "the small state")


def packed(content: Any, called: str) -> bytes:
    """A value for another worker. Raises `UserError` naming a part of it that cannot be sent."""
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(encode(content, tensors, called), separators=(",", ":")).encode()
    return LENGTH.pack(len(tree)) + tree + safetensors.torch.save(tensors)


def unpack(message: bytes) -> dict[str, Any]:
    """The inverse of `pack`. Raises `PeerError` for bytes that `pack` does not make."""
    content = unpacked(message, "the small state")
    if not isinstance(content, dict) or content.keys() - OPTIONAL.keys() != FIELDS.keys():
        found = sorted(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise PeerError(f"the small state that another worker sent has {found}; expected {sorted(FIELDS)}")
    for name, kind in (FIELDS | OPTIONAL).items():
        if name in content and not isinstance(content[name], kind):
            raise PeerError(f"the small state that another worker sent has {type(content[name]).__name__} as {name}")
    return content


def unpacked(message: bytes, called: str) -> Any:
    """The inverse of `packed`. Raises `PeerError` for bytes that it does not make."""
    try:
        (length,) = LENGTH.unpack_from(message)
        tree = json.loads(message[LENGTH.size : LENGTH.size + length])
        return decode(tree, safetensors.torch.load(message[LENGTH.size + length :]))
    except (struct.error, ValueError, RecursionError, safetensors.SafetensorError, CheckpointDamaged) as error:
        raise PeerError(f"{called} that another worker sent cannot be read: {error}") from None
