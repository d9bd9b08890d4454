"""Where processes meet: the store that each opens at its start, and a client of one that can be called off.

A TCPStore's client blocks for as long as its host is frozen, so only threads of their own talk to one: `AbortableStore`
answers gloo on the builder's thread while its helper thread makes the calls, and every wait ends at once when the
meeting is stopped. A helper whose host is frozen lives on until the host thaws or dies, and harms nobody.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from shoal.exchange.group import WorldChanged
from shoal.exchange.meeting import Stop

CONNECT_SECONDS = 5.0
"""To reach the store of a process that was alive when the plan was made."""
CALL_SECONDS = 30.0
"""The client's own limit for one question."""
LONGEST_POLL_SECONDS = 0.02
BACKLOG = 1024


class OwnStore:
    """This process's store: others build groups over it, and a refused connection to it proves that we are dead."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((host, 0))
        listener.listen(BACKLOG)
        port = listener.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._store: TCPStore | None = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=CALL_SECONDS),
            master_listen_fd=listener.detach(),
        )

    def close(self) -> None:
        """Ends the server's thread and frees the port. Idempotent."""
        self._store = None


def split_address(address: str) -> tuple[str, int]:
    """`HOST:PORT`, or `[HOST]:PORT` where the host has colons."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def reachable(address: str, seconds: float = 1.0) -> bool:
    """Whether the process that opened this store can be connected to from here."""
    try:
        socket.create_connection(split_address(address), timeout=seconds).close()
    except OSError:
        return False
    return True


@dataclass(slots=True)
class _Call:
    """One question to the store and, once `done`, its answer."""

    ask: Callable[[TCPStore], object]
    done: bool = False
    answer: object = None
    error: Exception | None = None


@dataclass(slots=True)
class _Hurry:
    """Polls often at first, then less often: most meetings take milliseconds."""

    pause: float = field(default=0.0005)

    def rest(self) -> None:
        time.sleep(self.pause)
        self.pause = min(self.pause * 1.5, LONGEST_POLL_SECONDS)


class AbortableStore(Store):
    """A client of the store at `address`, under a prefix, for one meeting. Every call raises at once when stopped.

    A reference must be kept as long as gloo uses it: C++ holds only its own half. `close` ends the helper.
    """

    def __init__(self, address: str, prefix: str, stop: Stop) -> None:
        super().__init__()
        self._address, self._prefix, self._stop = address, prefix, stop
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._keys = {prefix + "present", prefix + "all", prefix + "built"}
        """Those of the meeting that this process has seen."""
        threading.Thread(target=self._help, name=f"shoal-store-{prefix}", daemon=True).start()

    def close(self) -> None:
        """No more calls; the helper ends after the one it is in."""
        self._calls.put(None)

    # ---- what the meeting asks

    def gather(self, size: int) -> None:
        """Waits until `size` processes have called this, so that whoever dies before is not waited for in gloo."""
        if self.add("present", 1) == size:
            self.set("all", "here")
        self.wait(["all"])

    def part(self, size: int) -> None:
        """The group is built here. The last one clears the meeting away; nobody waits for it."""
        self._calls.put(_Call(lambda store: self._clear_away(store, size)))

    def _clear_away(self, store: TCPStore, size: int) -> None:
        if store.add(self._prefix + "built", 1) == size:
            for key in self._keys:
                store.delete_key(key)

    # ---- what gloo asks

    def set(self, key: str, value: str) -> None:
        self._keys.add(self._prefix + key)
        self._ask(lambda store: store.set(self._prefix + key, value))  # gloo gives bytes, which do as well

    def get(self, key: str) -> bytes:
        self.wait([key])
        answer = self._ask(lambda store: store.get(self._prefix + key))
        assert isinstance(answer, bytes)
        return answer

    def add(self, key: str, amount: int) -> int:
        answer = self._ask(lambda store: store.add(self._prefix + key, amount))
        assert isinstance(answer, int)
        return answer

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """As long as it takes: only the stop ends it, so `timeout` is not heeded."""
        del timeout
        self._keys.update(self._prefix + key for key in keys)
        self._ask(lambda store: self._poll(store, [self._prefix + key for key in keys]))

    def has_extended_api(self) -> bool:
        return False

    def _ask(self, ask: Callable[[TCPStore], object]) -> object:
        call = _Call(ask)
        self._calls.put(call)
        with self._stop.changed:
            self._stop.changed.wait_for(lambda: call.done or self._stop.is_set)
        if not call.done:
            raise WorldChanged("the building of the group was called off")
        if call.error is not None:
            raise WorldChanged(f"the store of the group at {self._address} failed: {call.error}") from call.error
        return call.answer

    # ---- the helper thread

    def _help(self) -> None:
        store: TCPStore | None = None
        while (call := self._calls.get()) is not None and not self._stop.is_set:
            try:
                store = store or self._connect()
                call.answer = call.ask(store)
            except Exception as error:  # the asker raises it
                call.error = error
            with self._stop.changed:
                call.done = True
                self._stop.changed.notify_all()

    def _connect(self) -> TCPStore:
        host, port = split_address(self._address)
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()  # says at once that nobody is there
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=CALL_SECONDS))

    def _poll(self, store: TCPStore, keys: list[str]) -> None:
        """A timed wait of the store's own would write a warning for each time-out."""
        hurry = _Hurry()
        while not store.check(keys) and not self._stop.is_set:
            hurry.rest()
