"""What is to be said of how far back a controller's series go. Pure."""

from __future__ import annotations

from datetime import UTC, datetime


def since_sentence(since: float | None) -> str:
    """`since`: when the controller began to record; None: it does not lead, and records nothing."""
    if since is None:
        return "this controller does not lead, and the one that does cannot be asked: it has no series"
    began = datetime.fromtimestamp(since, UTC)
    return f"recorded since {began:%Y-%m-%d %H:%M:%S} UTC; a controller that takes over begins anew"
