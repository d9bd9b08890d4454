"""The checksum that guards what lies in a checkpoint's files: XXH3-128, which is read at the speed of memory.

It finds whatever a disk, a copy or an interrupted write does to a file. It proves nothing about who wrote it; neither
would any other that lies beside the file. The fingerprint has SHA-256 of its own (`shoal.fingerprint`).
"""

from __future__ import annotations

from xxhash import xxh3_128_digest

CHECKSUM_BYTES = 16


def checksum(content: bytes | memoryview) -> bytes:  # (CHECKSUM_BYTES,)
    """Of bytes that lie in one piece."""
    return xxh3_128_digest(content)
