"""The bytes of one connection to the workers' port, carried to gRPC and back as they are: nothing here reads them.

`front.py` makes one for each connection that it lets through. Each way holds at most one piece: it reads on when the
other side has taken that, so who does not take what it is sent holds up its own connection and fills nothing.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

PIECE_BYTES = 1 << 16
LINGER_SECONDS = 1.0
"""How long a caller may take to hang up once gRPC has: what it still sends would else lose it the last words."""

_piece = memoryview(bytearray(PIECE_BYTES))
"""Where a piece lies between two sockets, whichever they are: it has left, or was copied, before the next is read."""
_NOTHING = memoryview(b"")
_RESET = struct.pack("ii", 1, 0)


class _Way:
    """From one socket to the other."""

    def __init__(self, source: socket.socket, sink: socket.socket, ended: Callable[[], None]) -> None:
        """`ended` hears that all is carried that will ever come from the source."""
        self._loop = asyncio.get_running_loop()
        self._source, self._sink = source, sink
        self._ended = ended
        self._left = _NOTHING
        """Of the last piece, what the sink has not taken yet."""
        self._room: int | None = None
        """Bytes that may still be read; None: there is no end."""
        self._on_full: Callable[[], None] = lambda: None
        self._drops = False
        """The sink takes nothing any more; what comes is read and forgotten."""
        self.has_ended = False
        self._go_on()

    def bound(self, most: int, full: Callable[[], None]) -> None:
        """Read so many bytes and no more, until `lift`; `full` hears when they have come."""
        self._room, self._on_full = most, full

    def lift(self) -> None:
        """Read all that comes."""
        self._room = None
        self._go_on()

    def drop(self) -> None:
        """Forget what is there and what comes."""
        self._drops = True
        if self._left:
            self._left = _NOTHING
            self._loop.remove_writer(self._sink)
        self.lift()

    def close(self) -> None:
        """Carry nothing more."""
        self._loop.remove_reader(self._source)
        self._loop.remove_writer(self._sink)

    def _go_on(self) -> None:
        """Read, or wait, as things are."""
        if self.has_ended or self._left or self._room == 0:
            self._loop.remove_reader(self._source)
        else:
            self._loop.add_reader(self._source, self._read)

    def _read(self) -> None:
        try:
            count = self._source.recv_into(_piece, PIECE_BYTES if self._room is None else min(self._room, PIECE_BYTES))
        except BlockingIOError:
            return None
        except OSError:
            count = 0
        if not count:
            self.has_ended = True
            self._go_on()
            return self._ended()
        if not self._drops:
            self._send(_piece[:count])
        if self._room is not None:
            self._room -= count
            if not self._room:
                self._go_on()
                self._on_full()
        return None

    def _send(self, piece: memoryview) -> None:
        try:
            sent = self._sink.send(piece)
        except BlockingIOError:
            sent = 0
        except OSError:
            return self.drop()
        if sent < len(piece):
            self._left = memoryview(bytes(piece[sent:]))
            self._loop.add_writer(self._sink, self._send_the_rest)
            self._go_on()
        return None

    def _send_the_rest(self) -> None:
        left, self._left = self._left, _NOTHING
        self._loop.remove_writer(self._sink)
        self._send(left)
        self._go_on()


class Passage:
    """A caller's socket and one of gRPC's, until both have hung up, or one has and the other is late."""

    def __init__(self, near: socket.socket, far: socket.socket, ended: Callable[[], None]) -> None:
        """`near`: the caller's. `ended` hears that both are closed."""
        self._near, self._far = near, far
        self._on_end = ended
        self._is_open = True
        self._deadline: asyncio.TimerHandle | None = None
        self._inward = _Way(near, far, self._caller_hung_up)
        self._outward = _Way(far, near, self._grpc_hung_up)

    def bound(self, most: int, full: Callable[[], None]) -> None:
        """Take so many bytes of the caller and no more, until `lift`; `full` hears when they have come."""
        self._inward.bound(most, full)

    def lift(self) -> None:
        """The caller may bring what it likes."""
        self._inward.lift()

    def take_no_more(self) -> None:
        """The caller is heard no more; what it is told still reaches it."""
        self._inward.drop()

    def end(self) -> None:
        """Close both at once. What a caller has not taken by then it does not get."""
        if not self._is_open:
            return
        self._is_open = False
        if self._deadline is not None:
            self._deadline.cancel()
        self._inward.close()
        self._outward.close()
        if not (self._inward.has_ended and self._outward.has_ended):
            reset(self._near)
        self._near.close()
        self._far.close()
        self._on_end()

    def _caller_hung_up(self) -> None:
        self._wait_for_the_other(self._outward, self._far)

    def _grpc_hung_up(self) -> None:
        self._inward.drop()
        self._wait_for_the_other(self._inward, self._near)

    def _wait_for_the_other(self, way: _Way, other: socket.socket) -> None:
        if way.has_ended:
            return self.end()
        with suppress(OSError):  # it is gone already
            other.shutdown(socket.SHUT_WR)
        self._deadline = asyncio.get_running_loop().call_later(LINGER_SECONDS, self.end)
        return None


def reset(connection: socket.socket) -> None:
    """Have it end at once when it is closed: the kernel would keep what was sent for one that does not take it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
