"""Names of the variables that Shoal sets itself in a worker's environment, so that no job may. Pure."""

from __future__ import annotations

SET_BY_SHOAL = frozenset(f"SHOAL_{name}" for name in ("CONTROLLER", "JOB", "RUN", "WORKER_ID", "TOKEN"))
"""Whatever starts the worker."""
IN_PODS = ("LAUNCHER", "HOST", "FAILURE_DOMAIN", "GRACE_SECONDS", "WANTED_WORKERS")
SET_IN_PODS = SET_BY_SHOAL | {f"SHOAL_{name}" for name in IN_PODS}
