"""Ports for servers that tests start, stop and start again."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOWEST = 10_000
_given: set[int] = set()


def free_port() -> int:
    """A port that nobody listens on, another one with each call, and none that the kernel gives to an outgoing
    connection: while a server is stopped, nobody comes to have its port.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(LOWEST, first)
        with socket.socket() as probe:
            if port not in _given and probe.connect_ex(("127.0.0.1", port)) != 0:
                _given.add(port)
                return port
