"""What `helm test` runs: a job of 8 steps with 2 workers, then the same with 1; their fingerprints must be equal.

The specification, without name and numbers of workers, is the JSON in `SHOAL_TEST_SPEC`. Both jobs are deleted.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from rest import Rest, environment, fail, until

OVER = ("succeeded", "failed", "cancelled")


def main() -> None:
    given = environment()
    seconds = float(given["SHOAL_TEST_SECONDS"])
    spec = json.loads(given["SHOAL_TEST_SPEC"])
    rest = Rest(given, seconds)
    suffix = secrets.token_hex(3)
    reports = {
        workers: fingerprint(rest, f"helm-test-{suffix}-{workers}", spec, workers, seconds) for workers in (2, 1)
    }
    rest.close()
    if reports[1] != reports[2]:
        fail(f"the fingerprint with 2 workers is {reports[2]}, with 1 worker {reports[1]}; expected equal ones")
    print(f"8 steps with 2 workers and with 1 worker: {reports[1]}")


def fingerprint(rest: Rest, job: str, spec: dict[str, Any], workers: int, seconds: float) -> str:
    """Of a run with so many workers."""
    rest.ask("POST", "/v1/jobs", {**spec, "job": job, "workers": {"wanted": workers, "min": workers, "max": workers}})
    shown: dict[str, Any] = {}

    def unfinished() -> str:
        shown.update(rest.ask("GET", f"/v1/jobs/{job}"))
        return "" if shown["phase"] in OVER else f"{job} is {shown['phase']}: {shown['reason']}"

    try:
        until(unfinished, seconds)
        if shown["phase"] != "succeeded":
            fail(f"{job} has {shown['phase']}: {shown['reason']}")
        report = rest.ask("GET", f"/v1/jobs/{job}/report")
        if report["steps"] != 8 or not report["fingerprint"]:
            fail(f"{job} has made {report['steps']} steps with fingerprint {report['fingerprint']!r}; expected 8 steps")
        return str(report["fingerprint"])
    finally:
        if shown.get("phase") not in OVER:
            rest.answer("DELETE", f"/v1/jobs/{job}")
        rest.answer("DELETE", f"/v1/jobs/{job}")


if __name__ == "__main__":
    main()
