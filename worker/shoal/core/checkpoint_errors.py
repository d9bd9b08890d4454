"""Errors of a checkpoint, or of the place where it lies.

    UserError
    ├── CheckpointDamaged   what lies there is not what was written: half, changed, or of a newer version
    │   └── CheckpointIncomplete   it never was a checkpoint: its save is not completed
    └── NoneReadable        there are checkpoints, and none of them can be read
    ShoalError
    └── StorageFailed       the place cannot be read or written: forbidden, not there, out of reach
        ├── StorageFull     there is no room left
        ├── StrangeFile     what lies under a name of Shoal's cannot be a file of Shoal's
        └── TransientStorageFailure   it may work when it is tried again

A damaged checkpoint is skipped for the one before; a failed save is counted and training goes on. Checkpoints of which
none can be read are not the same as no checkpoint: a job begins at step 0 beside them only when it is told to.
"""

from __future__ import annotations

from shoal_protos.errors import ShoalError, UserError


class CheckpointDamaged(UserError):
    """What lies there is not a whole checkpoint that this version can read."""


class CheckpointIncomplete(CheckpointDamaged):
    """A folder without a manifest: its save is under way, or was interrupted."""


class NoneReadable(UserError):
    """There are checkpoints to go on from, and none of them can be read."""


class StorageFailed(ShoalError):
    """The place of the checkpoints cannot be read or written."""

    http_status = 503
    grpc_status = "UNAVAILABLE"


class StorageFull(StorageFailed):
    """There is no room left: what is deleted makes some."""


class StrangeFile(StorageFailed):
    """What lies under a name of Shoal's cannot be a file of Shoal's: a pipe, a folder, too large."""


class TransientStorageFailure(StorageFailed):
    """The place failed for a reason that may pass: out of reach, slow, busy."""
