"""What this process sees of parameters that workers share (shared_weights.py), and what a child of it does."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from shoal.process.unnamed_memory import WEIGHTS


def memories() -> dict[int, int]:
    """All shared weights of this process, by their number: the bytes that each takes."""
    found = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it is closed by now
            if WEIGHTS in str(descriptor.readlink()):
                memory = descriptor.stat()
                found[memory.st_ino] = memory.st_blocks * 512
    return found


def taken_bytes(earlier: Collection[int] = ()) -> int:
    """What they take but for `earlier`: those of an earlier test may go at any time."""
    return sum(taken for number, taken in memories().items() if number not in earlier)


def windows(earlier: Collection[int] = ()) -> int:
    """How many mappings there are of them, but for those of `earlier`."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(WEIGHTS in line and int(line.split()[4]) not in earlier for line in lines)


def in_a_child(look: Callable[[], object]) -> str:
    """What it finds there; the process must end well."""
    receive, send = os.pipe()
    child = os.fork()
    if not child:
        try:
            found = str(look())
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        os.write(send, found.encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as file:
        found = file.read()
    assert os.waitpid(child, 0)[1] == 0
    return found
