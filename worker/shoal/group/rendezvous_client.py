"""A client of another process's rendezvous server: what gloo asks for while it connects, in calls that can be
cancelled.

Called on the builder's thread only. The cancellation shuts the connection down from outside, so every wait ends at
once, whether the host is alive, frozen or gone.
"""

from __future__ import annotations

import contextlib
import socket
from datetime import timedelta

from shoal_protos.addresses import split_address
from shoal_protos.rendezvous import HEAD, MOST_KEY_BYTES, MOST_VALUE_BYTES, entry
from torch._C._distributed_c10d import Store

from shoal.group.build import Cancellation, GroupSpec
from shoal.group.group import WorldChanged
from shoal.group.rendezvous_server import ALL, is_greeted

HERE = "here/"
"""Before a rank: its client has come."""
CONNECT_SECONDS = 5.0
"""Time to reach the rendezvous server of a process that was alive when the plan was made."""


class RendezvousClient(Store):
    """One rank of a group being built, as a store for gloo. Raises `WorldChanged` when cancelled or cut off.

    A reference must be kept as long as gloo uses it: C++ holds only its own half.
    """

    def __init__(self, spec: GroupSpec, cancellation: Cancellation) -> None:
        super().__init__()
        self._spec, self._cancellation = spec, cancellation
        self._address = spec.addresses[spec.builder]
        self._progress = spec.progress
        self._entries: dict[str, bytes] = {}
        host, port = split_address(self._address)
        self._progress.wait_for(spec.builder)
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._stream = self._socket.makefile("rb")
        cancellation.on_cancel(self._shut_down)
        try:
            self._socket.settimeout(CONNECT_SECONDS)
            self._socket.connect((host, port))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.settimeout(None)
        except OSError as error:
            self.close()
            raise self._lost(error) from None
        if cancellation.is_cancelled:  # the way out was tried before there was a connection
            self.close()
            raise self._lost("")
        try:
            self._check_server()
            self._post(spec.room, str(spec.size).encode())
            self._post(f"{HERE}{spec.rank}", spec.announces)
        except WorldChanged:
            self.close()
            raise

    def _check_server(self) -> None:
        """● Before anything is said: another job's worker may have got the port of one that is dead, and rooms of two
        jobs can have one name.
        """
        if not is_greeted(self._read, self._spec.incarnation(self._spec.builder)):
            raise self._lost("what answers there is not the process that the plan names")

    def close(self) -> None:
        """Leave the room."""
        self._stream.close()
        self._socket.close()

    def _shut_down(self) -> None:
        """Shut down the connection; from any thread."""
        with contextlib.suppress(OSError):  # not connected yet, or no more
            self._socket.shutdown(socket.SHUT_RDWR)

    def wait_for_all(self) -> None:
        """Until everybody is here: whoever dies before is not waited for in gloo, which cannot be cancelled."""
        ranks = [rank for rank in range(self._spec.size) if rank != self._spec.rank]
        self._progress.wait_for(*ranks)
        while ALL not in self._entries:
            self._read_entry()
            self._progress.keep_waiting_for([rank for rank in ranks if f"{HERE}{rank}" not in self._entries])

    def announced(self) -> tuple[bytes, ...]:
        """By rank, what each says of itself."""
        for rank in range(self._spec.size):
            if rank != self._spec.rank:
                self._read_until(f"{HERE}{rank}")  # everybody may be here before all have said so
        entries = {**self._entries, f"{HERE}{self._spec.rank}": self._spec.announces}
        return tuple(entries[f"{HERE}{rank}"] for rank in range(self._spec.size))

    # ---- what gloo asks

    def set(self, key: str, value: str | bytes) -> None:
        self._post(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        self._read_until(key)
        return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait as long as it takes: only the cancellation ends it, so `timeout` is ignored."""
        del timeout
        for key in keys:
            self._read_until(key)

    def has_extended_api(self) -> bool:
        return False

    # ---- the connection

    def _post(self, key: str, value: bytes) -> None:
        try:
            self._socket.sendall(entry(key, value))
        except OSError as error:
            raise self._lost(error) from None

    def _read_until(self, key: str) -> None:
        while key not in self._entries:
            self._read_entry()

    def _read_entry(self) -> None:
        name, size = HEAD.unpack(self._read(HEAD.size))
        if name > MOST_KEY_BYTES or size > MOST_VALUE_BYTES:
            raise self._lost("what answers there is not a rendezvous server")
        posted = self._read(name).decode(errors="replace")
        self._entries[posted] = self._read(size)

    def _read(self, count: int) -> bytes:
        try:
            data = self._stream.read(count)
        except OSError as error:
            raise self._lost(error) from None
        if len(data) < count:
            raise self._lost("it hung up")
        return data

    def _lost(self, why: object) -> WorldChanged:
        if self._cancellation.is_cancelled:
            return WorldChanged("the building of the group was cancelled")
        return WorldChanged(f"the rendezvous server at {self._address} is out of reach: {why}")
