"""A real group over gloo in one process: each member in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from shoal.group.build import Cancellation, GroupSpec
from shoal.group.gloo import build_gloo
from shoal.group.group import Group
from shoal.group.rendezvous_server import RendezvousServer


def over_gloo(size: int, act: Callable[[Group], object]) -> None:
    """Each member of a group of so many, in a thread of its own."""
    servers = [RendezvousServer("127.0.0.1") for _ in range(size)]
    addresses = tuple(server.address for server in servers)

    def member(rank: int) -> None:
        group = build_gloo(GroupSpec(1, rank, addresses, builder=0), Cancellation())
        try:
            act(group)
            group.all_gather(torch.zeros(1, dtype=torch.uint8))
        finally:
            group.close()

    try:
        with ThreadPoolExecutor(size) as threads:
            list(threads.map(member, range(size)))
    finally:
        for server in servers:
            server.close()
