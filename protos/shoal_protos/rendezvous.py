"""What is said on a worker's rendezvous port: entries, and the greeting that names the process.

Members of a generation leave addresses for each other there (`shoal.exchange`); the controller looks whether the
process lives (`shoal_controller.jobs.probes`). Pure: only the form of the bytes.
"""

from __future__ import annotations

import struct

HEAD = struct.Struct(">HI")
"""An entry: length of the key, length of the value; then both."""
MOST_KEY_BYTES = 256
MOST_VALUE_BYTES = 1 << 16
INCARNATION = "incarnation"
"""Key of the first entry on every connection: the process says who it is."""


def entry(key: str, value: bytes) -> bytes:
    """An entry as it goes over the wire, in both directions."""
    name = key.encode()
    return HEAD.pack(len(name), len(value)) + name + value
