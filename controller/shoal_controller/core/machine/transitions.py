"""The phases of a job: from which it may go to which, and why. docs/phases.md is printed from this table.

`Turn.enter` is the only way to set a phase, and it refuses what is not here. `paused`, and `waiting` with a world that
is too small to step, are not phases: `view` shows them for a running world that commits no steps.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal_controller.core.machine.spec import Phase

LIVING = (Phase.WAITING, Phase.STARTING, Phase.RUNNING, Phase.RESIZING, Phase.STALLED)
"""The phases of a job that is not over."""

ALLOWED: Mapping[tuple[Phase, Phase], str] = {
    (Phase.WAITING, Phase.STARTING): "enough workers are ready",
    (Phase.STARTING, Phase.RUNNING): "every member is ready, the world opens",
    (Phase.STARTING, Phase.WAITING): "too few workers are left to start, or the controller was restarted",
    (Phase.RUNNING, Phase.RESIZING): "a member is lost or cut off, or all return to a checkpoint",
    (Phase.RUNNING, Phase.STALLED): "the last members have left",
    (Phase.RESIZING, Phase.RUNNING): "every member is ready, the world opens",
    (Phase.RESIZING, Phase.STALLED): "a block has no living copy, or two needed workers cannot reach each other",
    (Phase.RESIZING, Phase.WAITING): "too few workers are left, and no step was committed yet",
    (Phase.STALLED, Phase.RESIZING): "a worker came back, or all return to a checkpoint",
    (Phase.STALLED, Phase.RUNNING): "every member is ready, the world opens",
    (Phase.STALLED, Phase.WAITING): "no worker is left: others begin from a checkpoint or step 0",
    (Phase.RUNNING, Phase.SUCCEEDED): "every member has ended its script after the last step",
    (Phase.STALLED, Phase.SUCCEEDED): "every block is lost after the last step, and the digests are known",
    **{(phase, Phase.FAILED): "a failure that another attempt cannot cure" for phase in LIVING},
    **{(phase, Phase.CANCELLED): "an operator has cancelled the job" for phase in LIVING},
}
