"""A real group over gloo in one process: each member in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from shoal.group.build import Cancellation, GroupSpec
from shoal.group.gloo import build_gloo
from shoal.group.group import Group
from shoal.group.rendezvous import RendezvousServer


def over_gloo(size: int, act: Callable[[Group], object]) -> None:
    """Each member of a group of so many, in a thread of its own."""

    def member(groups: Sequence[Group]) -> None:
        (group,) = groups
        act(group)
        group.all_gather(torch.zeros(1, dtype=torch.uint8))

    over_gloos(size, 1, member)


def over_gloos(
    size: int, count: int, act: Callable[[Sequence[Group]], object], hosts: Sequence[str] = ("127.0.0.1",)
) -> None:
    """Each member of `count` groups of so many, in a thread of its own. `hosts`: of the members by turns. A test whose
    time is up ends what members still wait for.
    """
    all_groups: list[Group] = []
    servers = [RendezvousServer(hosts[rank % len(hosts)]) for rank in range(size)]
    addresses = tuple(server.address for server in servers)

    def member(rank: int) -> None:
        groups: list[Group] = []
        try:
            for number in range(count):
                groups.append(build_gloo(GroupSpec(number + 1, rank, addresses, builder=0), Cancellation()))
            all_groups.extend(groups)
            act(groups)
        finally:
            for group in groups:
                group.close()

    try:
        with ThreadPoolExecutor(size) as threads:
            members = threads.map(member, range(size))
            try:
                list(members)
            except BaseException:
                for group in all_groups:
                    group.abort()
                raise
    finally:
        for server in servers:
            server.close()
