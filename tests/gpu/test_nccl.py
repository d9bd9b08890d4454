"""Groups over NCCL: two devices of this machine, in one process and in jobs. Never run yet: no machine had two GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from integration.cluster import Cluster, undisturbed
from over_gloo import over_gloos
from shoal.device import Accelerator
from shoal.exchange.traffic import BULK, FILLED, PARTIALS
from shoal.group.build import Cancellation, GroupSpec
from shoal.group.gloo import build_gloo
from shoal.group.group import Group, WorldChanged
from shoal.group.of_device import groups_of
from shoal.group.ordered import OrderedGroup
from shoal.group.rendezvous_server import RendezvousServer

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ELEMENTS = 1 << 20


def over_nccl(act: Callable[[Group], object]) -> None:
    """Each of two members, on a device and in a thread of its own."""
    servers = [RendezvousServer("127.0.0.1") for _ in range(2)]
    addresses = tuple(server.address for server in servers)

    def member(groups: Sequence[Group]) -> None:
        rank = groups[0].rank
        with torch.cuda.device(rank):
            build = groups_of(build_gloo, Accelerator(torch.device("cuda", rank)), BULK)
            group = build(GroupSpec(7, rank, addresses, builder=0), Cancellation())
            assert isinstance(group, OrderedGroup)
            try:
                act(group)
            finally:
                group.close()

    try:
        over_gloos(2, 1, member)
    finally:
        for server in servers:
            server.close()


def test_messages_between_two_devices_have_what_was_computed_in_the_order_of_their_tags() -> None:
    def act(group: Group) -> None:
        peer, works, came = 1 - group.rank, [], []
        for number in range(8):
            tag = (PARTIALS, FILLED)[number % 2]
            there = torch.full((ELEMENTS,), 10.0 * group.rank + number, device="cuda")
            works.append(group.send(there * 2, peer, tag))
        for number in (0, 2, 1, 4, 3, 5, 6, 7):
            target = torch.zeros(ELEMENTS, device="cuda")
            came.append((number, target, group.receive(target, peer, (PARTIALS, FILLED)[number % 2])))
        for number, target, work in came:
            work.wait()
            assert target.eq(2 * (10.0 * peer + number)).all()
        group.wait(works)
        group.all_gather(torch.zeros(1, dtype=torch.uint8))

    over_nccl(act)


def test_an_abort_ends_a_wait_for_a_message_that_never_comes_and_one_that_is_half_way() -> None:
    begun = threading.Barrier(2)

    def act(group: Group) -> None:
        begun.wait(60.0)
        if group.rank == 0:
            group.send(torch.zeros(64 * ELEMENTS, device="cuda"), 1, PARTIALS)
            group.abort()
        else:
            target = torch.zeros(64 * ELEMENTS, device="cuda")
            with pytest.raises(WorldChanged):
                group.wait([group.receive(target, 0, PARTIALS), group.receive(target.clone(), 0, PARTIALS)])

    over_nccl(act)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_workers_with_a_device_each_go_by_nccl_through_a_kill_and_a_join(stage: int) -> None:
    options = {"device": "cuda:0", "max_steps": 20, "stage": stage}
    with Cluster(workers=1, options=options, pace=0.05) as cluster:
        (other,) = cluster.add(device="cuda:1")
        cluster.wait_world(2)
        assert '"over": "NCCL"' in cluster.log(other)
        cluster.kill(other)
        cluster.wait_world(1)
        cluster.add(device="cuda:1")
        cluster.wait_world(2)
        cluster.wait_done()
        assert cluster.fingerprint == undisturbed(options)
