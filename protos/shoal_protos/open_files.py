"""The limit of open files (`ulimit -n`), which both sides look at before they open sockets.

A loop that can accept no connection and a thread that can open none end in tracebacks that nobody could understand.
"""

from __future__ import annotations

import resource

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
