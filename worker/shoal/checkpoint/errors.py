"""What can be wrong with a checkpoint or with the place where it lies.

    UserError
    └── CheckpointDamaged   what lies there is not what was written: half, changed, or of a newer version
    ShoalError
    └── StorageFailed       the place cannot be read or written: forbidden, not there, out of reach
        ├── StorageFull     there is no room left
        └── TransientStorageFailure   it may work when it is tried again

A damaged checkpoint is skipped for the one before; a failed save is counted and training goes on.
"""

from __future__ import annotations

from shoal_protos.errors import ShoalError, UserError


class CheckpointDamaged(UserError):
    """What lies there is not a whole checkpoint that this version can read."""


class StorageFailed(ShoalError):
    """The place of the checkpoints cannot be read or written."""

    http_status = 503
    grpc_status = "UNAVAILABLE"


class StorageFull(StorageFailed):
    """There is no room left: what is deleted makes some."""


class TransientStorageFailure(StorageFailed):
    """The place failed for a reason that may pass: out of reach, slow, busy."""
