"""What NCCL asks for while it connects: one value that rank 0 has and all others wait for, over the host's group.

Called on the builder's thread only, by a process group that is being made.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from shoal.group.group import RESERVED_TAGS, Group

STORE_TAG = RESERVED_TAGS + 4


class NcclStore(Store):
    """Values that rank 0 sets, in the order in which the others get them. A reference must be kept as long as a process
    group uses it.
    """

    def __init__(self, host: Group) -> None:
        super().__init__()
        self._host = host

    def set(self, key: str, value: str | bytes) -> None:
        del key
        content = value.encode() if isinstance(value, str) else bytes(value)
        body = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        size = torch.tensor([len(content)], dtype=torch.int64, device="cpu")
        others = [peer for peer in range(self._host.size) if peer != self._host.rank]
        works = [self._host.send(message, peer, STORE_TAG) for peer in others for message in (size, body)]
        self._host.wait(works)

    def get(self, key: str) -> bytes:
        del key
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._host.wait([self._host.receive(size, 0, STORE_TAG)])
        body = torch.zeros(int(size), dtype=torch.uint8, device="cpu")
        self._host.wait([self._host.receive(body, 0, STORE_TAG)])
        return body.numpy().tobytes()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """`get` waits."""

    def has_extended_api(self) -> bool:
        return False
