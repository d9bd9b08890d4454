"""Members of a group over NCCL, each a process: `python -m gpu.nccl_members ACT RANK SIZE`, and a script for jobs.

Each takes the next device of this machine. Where there are fewer devices than members, some share one: NCCL refuses
two members of one host with one device, so each says that it is on a host of its own (NCCL_HOSTID), and what it
carries then goes through sockets. All else is NCCL as it is: communicators, grouped messages, streams, aborts. A member
prints the address of its rendezvous server and reads those of all; it exits with 0 when its act has held.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from integration import scripts
from shoal.exchange.traffic import BULK, FILLED, PARTIALS
from shoal.group.build import Cancellation, GroupSpec
from shoal.group.device_group import groups_of
from shoal.group.gloo import build_gloo
from shoal.group.group import Group, WorldChanged
from shoal.group.ordered import OrderedGroup
from shoal.group.rendezvous import RendezvousServer
from shoal.process.device import Accelerator
from shoal.session import link_choice

ELEMENTS = 1 << 20


def be_on_a_host_of_its_own() -> None:
    """Before NCCL is used for the first time."""
    os.environ |= {"NCCL_HOSTID": f"host-of-{os.getpid()}", "NCCL_SOCKET_IFNAME": "lo"}


def this_process(_: torch.device) -> bytes:
    """In place of `own_device`."""
    return str(os.getpid()).encode()


def train(**options: Any) -> None:
    """The script `train` of the other tests, in a job whose workers use NCCL whatever devices they share."""
    be_on_a_host_of_its_own()
    link_choice.own_device = this_process
    scripts.train(**options)


# ---- what members do


def messages_in_order(group: Group) -> None:
    """They have what was computed, in the order of their tags, whatever the order of the receives."""
    peer = (group.rank + 1) % group.size
    source = (group.rank - 1) % group.size
    sent = [
        group.send(torch.full((ELEMENTS,), 10.0 * group.rank + number, device="cuda") * 2, peer, tag_of(number))
        for number in range(8)
    ]
    came = []
    for number in (0, 2, 1, 4, 3, 5, 6, 7):
        target = torch.zeros(ELEMENTS, device="cuda")
        came.append((number, target, group.receive(target, source, tag_of(number))))
    for number, target, work in came:
        work.wait()
        assert target.eq(2 * (10.0 * source + number)).all(), f"message {number} is {target[:4].tolist()}"
    group.wait(sent)
    group.all_gather(torch.zeros(1, dtype=torch.uint8))


def tag_of(number: int) -> int:
    return (PARTIALS, FILLED)[number % 2]


def rank_0_aborts(group: Group) -> None:
    """Nobody waits longer for a message that never comes, or for one that is half-way."""
    group.all_gather(torch.zeros(1, dtype=torch.uint8))
    if group.rank == 0:
        group.send(torch.zeros(64 * ELEMENTS, device="cuda"), 1, PARTIALS)
        group.abort()
    elif group.rank == 1:
        target = torch.zeros(64 * ELEMENTS, device="cuda")
        works = [group.receive(target, 0, PARTIALS), group.receive(target.clone(), 0, PARTIALS)]
        expect_a_change(group, works)
    else:
        expect_a_change(group, [group.receive(torch.zeros(ELEMENTS, device="cuda"), 0, PARTIALS)])


def rank_0_dies(group: Group) -> None:
    """Whoever waits for it hears of it and is free again; its device goes on."""
    group.all_gather(torch.zeros(1, dtype=torch.uint8))
    target = torch.zeros(ELEMENTS, device="cuda")
    if group.rank == 0:
        group.send(target, 1, PARTIALS)
        os._exit(0)
    works = [group.receive(target, 0, PARTIALS) for _ in range(2)]
    expect_a_change(group, works)
    group.abort()
    assert target.add(1.0).eq(1.0).all()


def expect_a_change(group: Group, works: Any) -> None:
    try:
        group.wait(works)
    except WorldChanged:
        return
    raise AssertionError("what never comes has come")


def main(act: str, rank: int, size: int) -> None:
    if size > torch.cuda.device_count():
        be_on_a_host_of_its_own()
    kind = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(kind)
    server = RendezvousServer("127.0.0.1")
    print(server.address, flush=True)
    spec = GroupSpec(7, rank, tuple(json.loads(sys.stdin.readline())), builder=0)
    try:
        group = groups_of(build_gloo, Accelerator(kind), BULK, this_process)(spec, Cancellation())
        assert isinstance(group, OrderedGroup)
        try:
            ACTS[act](group)
        finally:
            group.close()
    finally:
        server.close()


ACTS = {act.__name__: act for act in (messages_in_order, rank_0_aborts, rank_0_dies)}

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
