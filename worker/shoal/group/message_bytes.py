"""A message's bytes, as a group writes them: whatever its shape and dtype. Called by what carries messages."""

from __future__ import annotations

import torch
from torch import Tensor


def message_bytes(
    tensor: Tensor,  # contiguous, of any shape and dtype
) -> Tensor:  # (bytes,) uint8
    return tensor.data.reshape(-1).view(torch.uint8)  # as from the wire: no version counter sees what comes
