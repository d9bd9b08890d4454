"""The limits of a process that both sides check at start: open files (`ulimit -n`) and address space (`ulimit -v`).

Without the checks, a loop that cannot accept a connection ends in a traceback that explains nothing, and a gRPC thread
without room for its stack makes the process abort or hang silently. Called before sockets are opened and gRPC starts.
"""

from __future__ import annotations

import resource
from pathlib import Path

from shoal_protos.errors import UserError

LEAST_OPEN_FILES = 64
"""A controller with two workers needs 30, and so does each of them; every connection takes one more."""


def check_open_files(who: str) -> None:
    """Raises `UserError` where `who` may open too few."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < LEAST_OPEN_FILES:
        raise UserError(
            f"this process may open {limit} files and connections; {who} needs {LEAST_OPEN_FILES} at least, and more "
            "with every worker. Raise the limit: `ulimit -n 1024`"
        )


MIB = 1 << 20


def check_address_space(who: str, mebibytes: int) -> None:
    """Raises `UserError` where less than so many mebibytes are left for `who`."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    left = limit - _in_use()
    if limit != resource.RLIM_INFINITY and left < mebibytes * MIB:
        raise UserError(
            f"the address space of this process is limited to {limit // MIB} MiB, and {max(0, left) // MIB} MiB of it "
            f"are free; {who} needs {mebibytes} MiB. Raise it (`ulimit -v`), or limit memory by a cgroup instead"
        )


def _in_use() -> int:
    """0 where the system does not tell."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[0]
    except OSError:
        return 0
    return int(pages) * resource.getpagesize()
