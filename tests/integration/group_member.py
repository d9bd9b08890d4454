"""One member of a group under test, as a process of its own: it does what the test tells it over a socket.

Commands come as JSON lines and are answered when they are done. Each runs on a thread of its own, as the engine's calls
run on the training thread and `abort` on the session's; so a test can abort what another command is blocked in.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import torch
from shoal.exchange.packing import FramedSend, receive_framed
from shoal.group import host_peers
from shoal.group.build import Cancellation, GroupSpec
from shoal.group.gloo import build_gloo
from shoal.group.group import Group, WorldChanged
from shoal.group.rendezvous import RendezvousClient, RendezvousServer
from shoal.process.unnamed_memory import GROUP as NAME

MUCH = 128 << 20
"""Elements: so many that no machine has passed them on before the process that sends or takes them has frozen."""


class Member:
    """Its groups by generation, what cancels their building, and one buffer that outlives groups."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.server = RendezvousServer("127.0.0.1")
        self.groups: dict[int, Group] = {}
        self.cancellations: dict[int, Cancellation] = {}
        self.buffer = torch.zeros(1000)

    def address(self) -> str:
        return self.server.address

    def build(self, generation: int, rank: int, addresses: list[str], builder: int) -> str:
        cancellation = self.cancellations[generation] = Cancellation()
        self.groups[generation] = build_gloo(GroupSpec(generation, rank, tuple(addresses), builder), cancellation)
        return "built"

    def come_to(self, generation: int, address: str, size: int) -> str:
        """Say at the rendezvous that we are here, and go no further."""
        self.client = RendezvousClient(GroupSpec(generation, size - 1, (address,) * size, 0), Cancellation())
        return "came"

    def cancel(self, generation: int) -> str:
        self.cancellations[generation].cancel()
        return "cancelled"

    def gather(self, generation: int, number: int) -> list[int]:
        return [int(row) for row in self.groups[generation].all_gather(torch.tensor([number], dtype=torch.uint8))]

    def swap(self, generation: int, elements: int) -> list[float]:
        """Send a tensor of our rank to everybody; the means of what came."""
        group = self.groups[generation]
        others = [rank for rank in range(group.size) if rank != group.rank]
        received = [torch.empty(elements) for _ in others]
        works = [group.receive(tensor, rank, 3) for tensor, rank in zip(received, others, strict=True)]
        works += [group.send(torch.full((elements,), float(group.rank)), rank, 3) for rank in others]
        for work in works:
            work.wait()
        return [float(tensor.mean()) for tensor in received]

    def receive(self, generation: int, source: int) -> float:
        """Into the buffer."""
        self.groups[generation].receive(self.buffer, source, 5).wait()
        return self.mean()

    def post(self, generation: int, source: int) -> str:
        """A receive that nobody waits for."""
        self.groups[generation].receive(self.buffer, source, 5)
        return "posted"

    def send(self, generation: int, to: int) -> str:
        self.groups[generation].send(torch.full((1000,), 7.0), to, 5).wait()
        return "sent"

    def much(self, generation: int, kind: str, peer: int, freeze: bool = False) -> str:
        """Send or receive more than all socket buffers hold; with `freeze` this process stops in the middle of it. Not
        through shared memory, where all of it may have passed by the time it is posted.
        """
        host_peers.LEAST_BYTES = 4 * MUCH + 1
        posted = getattr(self.groups[generation], kind)(torch.zeros(MUCH), peer, 6)
        if freeze:
            os.kill(os.getpid(), signal.SIGSTOP)
        posted.wait()
        return "done"

    def fill(self, value: float) -> str:
        self.buffer.fill_(value)
        return "filled"

    def mean(self) -> float:
        return float(self.buffer.mean())

    def send_framed(self, generation: int, to: int, content: str) -> str:
        FramedSend(self.groups[generation], to, 0, content.encode()).wait()
        return "left"

    def read(self, generation: int, source: int) -> str:
        return receive_framed(self.groups[generation], source, 0).decode()

    def abort(self, generation: int) -> str:
        self.groups[generation].abort()
        return "aborted"

    def close(self, generation: int) -> str:
        self.groups[generation].close()
        return "closed"

    def broken(self, generation: int) -> list[int]:
        return list(self.groups[generation].broken_peers)

    def patience(self, generation: int) -> float:
        """Seconds after which gloo gives up by itself."""
        gloo: Any = self.groups[generation]._gloo  # type: ignore[attr-defined]
        return float(gloo.options._timeout.total_seconds())

    def shared_memory(self) -> list[int]:
        """How much of it this process has mapped, and has open."""
        files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]  # noqa: PTH208
        mapped = sum(NAME in line for line in Path("/proc/self/maps").read_text().splitlines())
        return [mapped, sum(NAME in os.readlink(file) for file in files if Path(file).exists())]  # noqa: PTH115

    def open_files(self) -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the listing itself must not be counted twice


def serve(port: int) -> None:
    """The process: until the test hangs up."""
    member, writing = Member(), threading.Lock()
    connection = socket.create_connection(("127.0.0.1", port))
    with connection, connection.makefile("r") as commands, connection.makefile("w") as answers:

        def do(number: int, command: str, given: dict[str, Any]) -> None:
            try:
                answer = {"number": number, "answer": getattr(member, command)(**given)}
            except WorldChanged as error:
                answer = {"number": number, "changed": str(error)}
            except Exception as error:
                answer = {"number": number, "error": repr(error)}
            with writing:
                answers.write(json.dumps(answer) + "\n")
                answers.flush()

        for line in commands:
            request = json.loads(line)
            threading.Thread(target=do, args=(request["number"], request["do"], request["given"]), daemon=True).start()
    os._exit(0)
