"""SIGTERM as a request to be drained, seen at once by the session's thread.

A Python handler does not run while the main thread sits in a call of gloo's; the wake-up descriptor is written by the
C handler, so the session's thread reads it in any case. Children that this process forks get the old behaviour back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

_installed: TermSignal | None = None


class TermSignal:
    """Installed by the main thread, read by the session's; `harmless` says whether SIGTERM means a drain by now."""

    def __init__(self, harmless: Callable[[], bool]) -> None:
        self._harmless = harmless
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        self._replaced = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if self._replaced:
            signal.signal(signal.SIGTERM, self._on_term)
        self._forwards_to = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def has_come(self) -> bool:
        """Whether a SIGTERM is among the signals that came. Others had their wake-up descriptor first: it gets all."""
        try:
            numbers = self.reader.recv(4096)
        except BlockingIOError:
            return False
        if self._forwards_to >= 0:
            with contextlib.suppress(OSError):
                os.write(self._forwards_to, numbers)
        return signal.SIGTERM in numbers

    def close(self) -> None:
        """Puts back what was there. On the main thread."""
        signal.set_wakeup_fd(self._forwards_to)
        if self._replaced and signal.getsignal(signal.SIGTERM) == self._on_term:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.reader.close()
        self._writer.close()

    def _on_term(self, number: int, _: FrameType | None) -> None:
        """Where there is nobody to drain us yet, SIGTERM ends the process as ever.

        The kernel spares process 1 of a container the default action, so that ends by itself, with the same status.
        """
        if not self._harmless():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            os._exit(128 + number)


def install(harmless: Callable[[], bool]) -> TermSignal | None:
    """None where this is not the main thread: signals are then its business."""
    global _installed
    if threading.current_thread() is not threading.main_thread():
        return None
    _installed = TermSignal(harmless)
    return _installed


def uninstall(term: TermSignal | None) -> None:
    """Idempotent."""
    global _installed
    if term is not None and term is _installed:
        _installed = None
        term.close()


# ---- forks: a child (a data loader's) must die of SIGTERM, and must not write to its parent's descriptor

_masks = threading.local()


def _hold_back() -> None:
    """No SIGTERM reaches the child before it is a process like any other."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _forget_in_child() -> None:
    uninstall(_installed)
    _let_through()


os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_forget_in_child)
