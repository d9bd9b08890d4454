"""The limit of this process's address space (`ulimit -v`), which both sides look at before gRPC starts its threads.

Where a thread of gRPC's finds no room for its stack the process aborts, or waits for ever, and says nothing that
anybody could understand.
"""

from __future__ import annotations

import resource
from pathlib import Path

from shoal_protos.errors import UserError

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
