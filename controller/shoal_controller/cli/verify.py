"""`shoal verify`: read checkpoints whole and compare every checksum."""

from __future__ import annotations

from shoal_controller.cli.options import Place


def verify(path: Place) -> None:
    """Verify every checksum of a checkpoint, or of all checkpoints in a folder."""
    from shoal_controller.cli.offline import become

    become("verify", path)
