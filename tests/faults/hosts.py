"""Hosts as network namespaces on one bridge, whose links can be hindered. Needs root, `ip`, `tc` and `nft`.

    with Hosts(4) as hosts:
        hosts.cut(1, 2)           # packets from host 1 to host 2 are dropped, as by a broken switch
        hosts.refuse(1, 2)        # connections of host 1 to host 2 are reset, as by a firewall
        hosts.lose(1, 2, 20)      # 20 of 100 packets are lost
        hosts.shape(2, 2000)      # host 2 has 2,000 kbit/s each way, and packets wait for their turn
        hosts.unplug(3)           # host 3 has no cable
        hosts.heal()

Host 0 is the controller's, and this process is there while the context lasts. Where namespaces cannot be had,
`Loopback` stands in: every process on this host, and no links to hinder.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Self

SUBNET = "10.77"
CLONE_NEWNET = 0x40000000
QUEUE = "burst 16kb latency 2s"
"""Of a shaped host: a full queue delays what comes last by two seconds."""


class Loopback:
    """All processes on 127.0.0.1."""

    has_links = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing was made."""

    def address(self, host: int) -> str:
        return "127.0.0.1"

    def command(self, host: int) -> list[str]:
        """What a command is started with on a host."""
        return []

    def heal(self) -> None:
        """No link was cut."""


class Hosts:
    """See the module's text. `count` hosts beside the controller's."""

    has_links = True

    def __init__(self, count: int) -> None:
        self._name = f"shoal{os.getpid() % 100_000}"
        self._net = f"{SUBNET}.{os.getpid() % 250}"
        self._hosts = range(count + 1)
        self._shaped: set[int] = set()
        self._unplugged: set[int] = set()
        self._home = os.open("/proc/self/ns/net", os.O_RDONLY)

    @staticmethod
    def can_be_had() -> bool:
        return os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc", "nft")))

    def __enter__(self) -> Self:
        try:
            self._make()
            enter_host(self.space(0))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _enter(self._home)
        for host in self._hosts:
            subprocess.run(["ip", "netns", "del", self.space(host)], check=False, stderr=subprocess.DEVNULL)

    def address(self, host: int) -> str:
        return f"{self._net}.{host + 1}"

    def command(self, host: int) -> list[str]:
        """What a command is started with on a host."""
        return ["ip", "netns", "exec", self.space(host)]

    def cut(self, source: int, target: int) -> None:
        """Packets from one host to another are dropped where they arrive."""
        self._arriving(source, target, "drop")

    def refuse(self, source: int, target: int) -> None:
        """TCP connections of one host to another are reset, those that there are as well as new ones."""
        self._arriving(source, target, "meta l4proto tcp reject with tcp reset")

    def lose(self, source: int, target: int, percent: int) -> None:
        """So many of a hundred packets from one host to another are dropped, by chance."""
        self._arriving(source, target, f"numgen random mod 100 < {percent} drop")

    def shape(self, host: int, kbit: int, queue: str = QUEUE) -> None:
        """All that a host sends, and all that is sent to it, has so many kbit/s."""
        self._shaped.add(host)
        self._queue(host, "replace", f"tbf rate {kbit}kbit {queue}")

    def unplug(self, host: int) -> None:
        """A host's cable is out: nothing reaches it, and nobody is told."""
        self._unplugged.add(host)
        _run(f"{self._at(0)} ip link set port{host} down")

    def plug(self, host: int) -> None:
        """It is in again."""
        self._unplugged.discard(host)
        _run(f"{self._at(0)} ip link set port{host} up")

    def heal(self) -> None:
        """All links are whole."""
        for host in tuple(self._unplugged):
            self.plug(host)
        for host in self._hosts:
            _run(f"{self._at(host)} nft flush chain inet cuts arriving")
        while self._shaped:
            self._queue(self._shaped.pop(), "del", "")

    def _arriving(self, source: int, target: int, verdict: str) -> None:
        _run(f"{self._at(target)} nft add rule inet cuts arriving ip saddr {self.address(source)} {verdict}")

    def _queue(self, host: int, act: str, discipline: str) -> None:
        """At both ends of the host's cable."""
        _run(f"{self._at(host)} tc qdisc {act} dev wire root {discipline}")
        _run(f"{self._at(0)} tc qdisc {act} dev port{host} root {discipline}")

    def _make(self) -> None:
        for host in self._hosts:
            _run(f"ip netns add {self.space(host)}")
            _run(f"{self._at(host)} ip link set lo up")
            _run(f"{self._at(host)} nft add table inet cuts")
            hook = "{ type filter hook input priority 0 ; }"
            subprocess.run(
                [*self.command(host), "nft", f"add chain inet cuts arriving {hook}"], check=True, capture_output=True
            )
        switch = self._at(0)
        _run(f"{switch} ip link add switch type bridge")
        _run(f"{switch} ip addr add {self.address(0)}/24 dev switch")
        _run(f"{switch} ip link set switch up")
        for host in self._hosts[1:]:
            _run(f"{switch} ip link add port{host} type veth peer name wire netns {self.space(host)}")
            _run(f"{switch} ip link set port{host} master switch up")
            _run(f"{self._at(host)} ip addr add {self.address(host)}/24 dev wire")
            _run(f"{self._at(host)} ip link set wire up")

    def space(self, host: int) -> str:
        """The name of its network namespace."""
        return f"{self._name}-{host}"

    def _at(self, host: int) -> str:
        return " ".join(self.command(host))


def enter_host(space: str) -> None:
    """This thread, and what it starts, live on that host from here on."""
    with Path(f"/run/netns/{space}").open() as opened:
        _enter(opened.fileno())


def _enter(space: int) -> None:
    """This thread, and what it starts, live in that network namespace from here on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(space, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr.strip()}"
