"""What this process's forked children let go of: the connections by which others notice that it is dead.

A child (a data loader's worker) inherits every socket, and one that it holds stays open when its parent is killed: the
parent then looks frozen, not dead. So a child puts /dev/null in the place of Shoal's sockets, and of no other. It
neither shuts them down, which would end the parent's connection, nor closes them: whoever closes the number later would
close what else has got it. gRPC and gloo do not tell their sockets, so the child asks the kernel what each one is. Only
what a group is built with (gloo's listener, the rendezvous client's connection) stays: the building is cancelled
anyway.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

Ours = Callable[[socket.socket], bool]
"""Whether a TCP socket is one of Shoal's; `OSError` means no. Called in the child, so it takes no lock: a thread that
is not there may hold it."""

OPEN_FILES = Path("/proc/self/fd")

_ours: set[Ours] = set()


def let_go_in_children(ours: Ours) -> None:
    """Let go of our sockets in children forked from here on. Idempotent."""
    _ours.add(ours)


def keep_in_children(ours: Ours) -> None:
    """Takes `let_go_in_children` back. Idempotent."""
    _ours.discard(ours)


def bound_as(listener: socket.socket) -> Ours:
    """A listener on one address, and what it has accepted."""
    host, port, *_ = listener.getsockname()
    return lambda tcp: bool(tcp.getsockname()[:2] == (host, port))


class Connections:
    """Connections to one port, opened by a library in the `with` and before `settle`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._before: frozenset[int] = frozenset()
        self._opened: frozenset[int] | None = None

    def __enter__(self) -> Connections:
        self._before = frozenset(_sockets().values())
        let_go_in_children(self._is_one)
        return self

    def __exit__(self, *_: object) -> None:
        keep_in_children(self._is_one)

    def settle(self) -> None:
        """All are there: a later connection to such a port is somebody else's."""
        self._opened = frozenset(_sockets().values()) - self._before

    def _is_one(self, tcp: socket.socket) -> bool:
        number = os.fstat(tcp.fileno()).st_ino
        is_new = number not in self._before if self._opened is None else number in self._opened
        return is_new and bool(tcp.getpeername()[1] == self._port)


def _sockets() -> dict[int, int]:
    """The kernel's number of each open socket, by file descriptor."""
    found = {}
    if OPEN_FILES.exists():  # not on macOS, which has worlds of one only
        for fd in map(int, os.listdir(OPEN_FILES)):  # noqa: PTH208 - a child has no time for paths
            try:
                status = os.fstat(fd)
            except OSError:  # closed by now, as that of the listing is
                continue
            if stat.S_ISSOCK(status.st_mode):
                found[fd] = status.st_ino
    return found


def _tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    """TCP sockets by file descriptor; each is valid until the next one is asked for. In the child only: see below."""
    seconds = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)  # with one, Python would make the parent's sockets non-blocking
    for fd in _sockets():
        tcp = socket.socket(fileno=fd)
        if tcp.family in (socket.AF_INET, socket.AF_INET6) and tcp.type == socket.SOCK_STREAM:
            yield fd, tcp
        tcp.detach()
    socket.setdefaulttimeout(seconds)


def _let_go() -> None:
    if not _ours:
        return
    null = os.open(os.devnull, os.O_RDWR)
    for fd, tcp in _tcp_sockets():
        if any(_is(ours, tcp) for ours in _ours):
            os.dup2(null, fd, inheritable=False)
    os.close(null)
    _ours.clear()  # sessions that the child opens have sockets of their own


def _is(ours: Ours, tcp: socket.socket) -> bool:
    try:
        return ours(tcp)
    except OSError:  # a listener has no peer
        return False


os.register_at_fork(after_in_child=_let_go)
