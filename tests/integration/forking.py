"""What forked processes of the tests of forks run: workers that fork children of their own."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from integration.linked_workers import DESCRIPTION, NEW
from integration.scripts import Samples, config, model_of, optimizer_of, scheduler_of
from shoal.group.rendezvous import RendezvousServer, reachable
from shoal.process.forks import Connections
from shoal.session.controller_link import ControllerLink
from shoal.session.settings import SessionSettings


def fork_beside_a_session(controller: str, count: int, result: str) -> None:
    """Fork children that end at once while the session talks; how they ended, by exit status, goes to `result`."""
    link = ControllerLink(SessionSettings(controller=controller, job="job", worker="a"))
    link.introduce(DESCRIPTION, NEW)
    link.end_warm_up()
    ends: Counter[int] = Counter()
    for _ in range(count):
        child = os.fork()
        if child == 0:
            os._exit(0)
        ends[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])] += 1
    link.close()
    Path(result).write_text(json.dumps(ends))


def fork_beside_own_sockets(result: str) -> None:
    """What children still hold of the script's sockets, and of one that a library opens for Shoal; to `result`.

    All go to one port; to show what a fork does to the parent's, the script has set a time-out for new sockets.
    """
    rendezvous = RendezvousServer("127.0.0.1")
    server = socket.create_server(("127.0.0.1", 0))
    address = server.getsockname()
    earlier = socket.create_connection(address)
    with Connections(address[1]) as connections:
        opened = socket.create_connection(address)
        while_opening = _held_by_a_child(opened=opened)
        connections.settle()
        later = socket.create_connection(address)
        socket.setdefaulttimeout(60.0)
        settled = _held_by_a_child(server=server, earlier=earlier, opened=opened, later=later)
    left = _held_by_a_child(opened=opened)
    blocking = all(os.get_blocking(mine.fileno()) for mine in (server, earlier, opened, later))
    server.accept()
    far_end, _ = server.accept()
    opened.sendall(b"goes on")
    answers = [far_end.recv(7).decode(), reachable(rendezvous.address, "")]
    held = {
        "while_opening": while_opening,
        "settled": settled,
        "left": left,
        "blocking": blocking,
        "answers": answers,
    }
    Path(result).write_text(json.dumps(held))


def _held_by_a_child(**sockets: socket.socket) -> list[str]:
    """The names of those that are sockets still."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        held = [name for name, one in sockets.items() if stat.S_ISSOCK(os.fstat(one.fileno()).st_mode)]
        os.write(writer, json.dumps(held).encode())
        os._exit(0)
    os.wait()
    with os.fdopen(reader) as report:
        os.close(writer)
        return list(json.load(report))


def train_and_evaluate(result: str, **options: Any) -> None:
    """A loop that goes through a DataLoader with two worker processes after every step, as an evaluation does."""
    import shoal

    model = model_of(options)
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer, "CosineAnnealingLR")
    samples = Samples(100)
    engine = shoal.initialize(
        model=model, config=config(options), dataset=samples, optimizer=optimizer, scheduler=scheduler
    )
    evaluated = 0
    seen = 0
    for batch in engine:
        engine.backward(engine.module(**batch))
        engine.step()
        if engine.global_step > evaluated:
            evaluated = engine.global_step
            held_out = torch.utils.data.DataLoader(Samples(8), batch_size=2, num_workers=2)
            seen += sum(len(batch["tokens"]) for batch in held_out)
    Path(result).write_text(json.dumps({"fingerprint": engine.fingerprint(), "seen": seen}))
