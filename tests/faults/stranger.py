"""A process that has got the port of a dead worker: `python stranger.py HOST PORT MANNER`, until it is killed.

`other` says that it is another worker, as one of another job would; `silent` takes connections and says nothing;
`rude` ends each one at once. Whoever asks for the dead worker there must not take any of them for it.
"""

from __future__ import annotations

import socket
import sys

from shoal_protos.rendezvous import INCARNATION, entry

MANNERS = ("other", "silent", "rude")


def main() -> None:
    host, port, manner = sys.argv[1:]
    taken = []
    with socket.create_server((host, int(port))) as listener:
        while True:
            client, _ = listener.accept()
            if manner == "rude":
                client.close()
                continue
            if manner == "other":
                client.sendall(entry(INCARNATION, b"somebody-else"))
            taken.append(client)


if __name__ == "__main__":
    main()
