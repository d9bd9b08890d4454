"""Training scripts that are hindered without a death: a link between two workers that carries nothing, code that hangs.

What two workers post for each other is exchanged for receives that nobody sends to: as where packets are dropped, each
waits, nothing is refused, and both talk to the controller. Needs no root.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch
from integration import scripts

NOWHERE = (1 << 20) + 7
"""A tag that nobody uses."""


def beside_a_broken_link(result: str, **options: Any) -> None:
    """`broken`: while this file is there, what passes between ranks 1 and 2 of a world of three is lost.

    `one_way`: only what rank 1 sends.
    """
    from shoal.group.gloo import GlooGroup

    broken, one_way = Path(options.pop("broken")), options.pop("one_way")
    post = GlooGroup._post

    def lossy(group: GlooGroup, kind: str, tensor: torch.Tensor, peer: int, tag: int) -> object:
        hit = (group.rank, peer, kind) == (1, 2, "send") if one_way else {group.rank, peer} == {1, 2}
        if hit and group.size == 3 and broken.exists():
            return post(group, "recv", torch.empty_like(tensor), peer, NOWHERE)
        return post(group, kind, tensor, peer, tag)

    GlooGroup._post = lossy  # type: ignore[method-assign, assignment]
    scripts.train(result, **options)


def with_code_that_hangs(result: str, **options: Any) -> None:
    """`hangs`: the worker whose data set does not give another sample from the time on at which `broken` is there."""
    broken, hangs = Path(options.pop("broken")), options.pop("hangs")
    read = scripts.Samples.__getitem__

    def stuck(samples: scripts.Samples, index: int) -> dict[str, torch.Tensor]:
        if os.environ.get("SHOAL_WORKER_ID") == hangs and broken.exists():
            threading.Event().wait()
        return read(samples, index)

    scripts.Samples.__getitem__ = stuck  # type: ignore[method-assign]
    scripts.train(result, **options)
