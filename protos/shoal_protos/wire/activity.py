"""What a worker does, on the wire: a part of every heartbeat."""

from __future__ import annotations

from shoal_protos import session_pb2 as pb
from shoal_protos.activity import MOST_NAMED, Activity, StepPhase
from shoal_protos.wire import bounds

LAST_PHASE = max(StepPhase)


def write_activity(activity: Activity) -> pb.Activity:
    return pb.Activity(
        generation=activity.generation,
        boundary=activity.boundary,
        phase=activity.phase,
        bucket=activity.bucket,
        waits_for=activity.waits_for[:MOST_NAMED],
        seconds=activity.seconds,
        slowest_piece_seconds=activity.slowest_piece_seconds,
    )


def read_activity(message: pb.Activity) -> Activity:
    """Raises `UserError` for whatever is out of bounds."""
    return Activity(
        bounds.whole("activity.generation", message.generation),
        bounds.whole("activity.boundary", message.boundary),
        StepPhase(bounds.whole("activity.phase", message.phase, most=LAST_PHASE)),
        bounds.whole("activity.bucket", message.bucket),
        tuple(
            bounds.name("activity.waits_for", peer)
            for peer in bounds.few("activity.waits_for", message.waits_for, MOST_NAMED)
        ),
        bounds.seconds("activity.seconds", message.seconds),
        bounds.seconds("activity.slowest_piece_seconds", message.slowest_piece_seconds),
    )
