"""Deaths of processes of this host, known before the kernel has freed their memory.

The sockets of a killed process are closed after its memory is freed: after 40 ms for half a gigabyte, after seconds for
what a worker has pinned or has on a GPU. The *robust* mutexes that its threads hold (pthread_mutexattr_setrobust(3))
the kernel gives back before that, and wakes a thread that waits for one. So each process has such a mutex in memory
that others may map (unnamed_memory.py), a thread that holds it for ever, and a thread for each process that it watches.

A process that ends by itself marks that before: how it ends is told otherwise. Where the kernel knows no such mutex
nothing is noticed here, and the sockets tell of the death.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import mmap
import os
import signal
import threading
from collections.abc import Callable

from shoal.process.unnamed_memory import LIFE, TOKEN_BYTES, MemoryAddress, address_of, make, map_shared, open_at

MARK_AT, MUTEX_AT = TOKEN_BYTES, 64
"""Where in the memory they lie, behind its token."""
LIVES, ENDS_BY_ITSELF, HAS_DIED = b"\0", b"\1", b"\2"
MOST_BYTES = 64
"""Of a `pthread_mutex_t` and of its attributes: 40 and 4 on x86-64, 48 and 8 on ARM."""
PROCESS_SHARED = ROBUST = 1
"""PTHREAD_PROCESS_SHARED and PTHREAD_MUTEX_ROBUST, of Linux."""
HELD_SECONDS = 10.0
"""For so long the thread that is to hold the mutex is waited for."""

_libc = ctypes.CDLL(None)
_lock = threading.Lock()
_own: OwnLife | None = None
_watched: dict[bytes, Callable[[], None]] = {}
"""By the token of a process's memory: what is called when it has died."""


def own_life() -> MemoryAddress:
    """Return where others watch this process. Raises `OSError` or `AttributeError` where the system has no means,
    `RuntimeError` where it gives no thread.
    """
    global _own
    with _lock:
        if _own is None:
            _own = OwnLife()
        return _own.address


def watch(life: MemoryAddress, on_death: Callable[[], None]) -> None:
    """Call `on_death`, on a thread of its own, when another process has died. For a process that is watched already it
    replaces what was to be called. Raises `OSError` where that process's memory cannot be opened, `RuntimeError` where
    the system gives no thread.
    """
    if life.process == os.getpid():
        return
    with _lock:
        if life.token not in _watched:
            memory = _open(life)
            threading.Thread(
                target=_wait_for_death, args=(life.token, memory), name=f"shoal-life-{life.process}", daemon=True
            ).start()
        _watched[life.token] = on_death


def _open(life: MemoryAddress) -> mmap.mmap:
    """Raises `OSError`."""
    descriptor = open_at(life)
    try:
        return map_shared(descriptor, mmap.PAGESIZE)
    finally:
        os.close(descriptor)


def _wait_for_death(token: bytes, memory: mmap.mmap) -> None:
    """The first one to have the mutex says in the memory what it has seen, for those that have it later: without
    `pthread_mutex_consistent` the C library need not wake them.
    """
    _block_signals()
    mutex = _address(memory)
    code = _libc.pthread_mutex_lock(mutex)
    if code == errno.EOWNERDEAD:
        _libc.pthread_mutex_consistent(mutex)
        if _mark_in(memory) == LIVES:
            memory[MARK_AT : MARK_AT + 1] = HAS_DIED
    has_died = _mark_in(memory) == HAS_DIED
    if code in (0, errno.EOWNERDEAD):
        _libc.pthread_mutex_unlock(mutex)  # which wakes the next one that waits for it
    with _lock:
        on_death = _watched.pop(token, None)
    if has_died and on_death is not None:
        on_death()


def _mark_in(memory: mmap.mmap) -> bytes:
    return memory[MARK_AT : MARK_AT + 1]


class OwnLife:
    """This process's mutex, held by a thread."""

    def __init__(self) -> None:
        """Raises `OSError`, `AttributeError`, `RuntimeError`."""
        descriptor, is_held = make(LIFE, mmap.PAGESIZE), threading.Event()
        try:  # open as long as the process lives
            self.memory, self.address = map_shared(descriptor, mmap.PAGESIZE), address_of(descriptor)
            _make_mutex(_address(self.memory))
            threading.Thread(target=_hold, args=(self.memory, is_held), name="shoal-life", daemon=True).start()
            if not is_held.wait(HELD_SECONDS):
                raise TimeoutError(f"a thread of this process has not begun within {HELD_SECONDS:g} s")
        except BaseException:
            os.close(descriptor)
            raise


def _make_mutex(mutex: ctypes.c_void_p) -> None:
    """Raises `OSError`, `AttributeError`."""
    attributes = ctypes.byref(ctypes.create_string_buffer(MOST_BYTES))
    codes = (
        _libc.pthread_mutexattr_init(attributes),
        _libc.pthread_mutexattr_setpshared(attributes, PROCESS_SHARED),
        _libc.pthread_mutexattr_setrobust(attributes, ROBUST),
        _libc.pthread_mutex_init(mutex, attributes),
    )
    if code := max(codes):
        raise OSError(code, os.strerror(code))


def _hold(memory: mmap.mmap, is_held: threading.Event) -> None:
    """For ever. Python's end, which takes down modules before the kernel looks at this thread's mutexes, leaves alone
    what a thread uses: so it keeps the memory mapped.
    """
    _block_signals()
    _libc.pthread_mutex_lock(_address(memory))
    is_held.set()
    while True:
        _libc.pause()


def _address(memory: mmap.mmap) -> ctypes.c_void_p:
    """Where the mutex lies."""
    return ctypes.c_void_p(ctypes.addressof((ctypes.c_char * MOST_BYTES).from_buffer(memory, MUTEX_AT)))


def _block_signals() -> None:
    """This thread sleeps in the C library; other threads handle signals."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _mark_end() -> None:
    if _own is not None and _own.address.process == os.getpid():  # else a child of which Python knows nothing
        _own.memory[MARK_AT : MARK_AT + 1] = ENDS_BY_ITSELF


def _forget() -> None:
    """In a forked child: it has no such memory, and threads of its parent may have held the lock."""
    global _lock, _own, _watched
    _lock, _own, _watched = threading.Lock(), None, {}


atexit.register(_mark_end)
threading._register_atexit(_mark_end)  # type: ignore[attr-defined]  # all that a child of multiprocessing calls
os.register_at_fork(after_in_child=_forget)
