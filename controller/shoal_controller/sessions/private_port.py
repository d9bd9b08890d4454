"""Where gRPC itself listens: a Unix socket that this process alone can reach, as its file is gone once it is open.

Every connection to it has a name, which gRPC says of the stream's other end: so `front.py` knows whose bytes a stream
was made of. With a port of the loopback device every user of the machine could go around the front.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal_protos.errors import UserError

LONGEST_PATH = 107
"""Of a Unix socket, in bytes."""


class PrivatePort:
    """`with port.offered() as address`, gRPC listens at `address`; then `connect`, until `close`."""

    def __init__(self) -> None:
        self._socket = -1
        self._names = map(f"shoal-{secrets.token_hex(8)}-{{}}".format, itertools.count())
        """Of connections; none is used again, and nobody else can have taken it."""

    @contextmanager
    def offered(self) -> Iterator[str]:
        """Where to listen meanwhile, for gRPC. Raises `UserError` where there can be no such socket."""
        try:
            with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
                path = Path(folder) / "workers"
                if len(os.fsencode(path)) > LONGEST_PATH:
                    raise UserError(
                        f"the path of the folder for temporary files ({tempfile.gettempdir()}) is too long for a "
                        "socket; set TMPDIR to a shorter one"
                    )
                yield f"unix:{path}"
                self._socket = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except (OSError, RuntimeError) as error:  # gRPC's is a RuntimeError
            raise UserError(
                f"no socket can be made in the folder for temporary files: {error}; set TMPDIR to another one"
            ) from error

    def connect(self) -> tuple[socket.socket, str]:
        """A new connection to gRPC, and what gRPC calls its other end. Raises `OSError`."""
        connection, name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), next(self._names)
        try:
            connection.setblocking(False)
            connection.bind(f"\0{name}")
            connection.connect(f"/proc/self/fd/{self._socket}")
        except BaseException:
            connection.close()
            raise
        return connection, f"unix-abstract:{name}"

    def close(self) -> None:
        """Nobody connects any more."""
        if self._socket >= 0:
            os.close(self._socket)
            self._socket = -1
