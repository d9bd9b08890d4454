"""Bad input in earnest: requests of schemathesis, and fuzzed sessions, against a real controller whose job trains on.

    python -m tests.fuzz.run --cases 5000 --sessions 1000         make fuzz
    python -m tests.fuzz.run --seed 17 --cases 0                  only the sessions of a seed
    python -m tests.fuzz.run --seed 17 --cases 0 --first 43 --sessions 1      one of them

Exit status 1 where an answer is not as the OpenAPI document says, a status is the controller's own fault, a session
does not end, or the job is harmed: another world, other bits, an error in the controller's log.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz import job
from integration.cluster import warmed

LEAST_SECONDS, CASES_PER_SECOND, SESSIONS_PER_SECOND = 60, 10, 4
"""How long the job lasts, and more than it is fuzzed for: what is left of it goes by in no time."""


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--cases", type=int, default=5000, help="requests")
    arguments.add_argument("--sessions", type=int, default=1000)
    arguments.add_argument("--first", type=int, default=0, help="number of the first session")
    arguments.add_argument("--seed", type=int, default=None, help="of both; default: one of chance")
    given = arguments.parse_args()
    begin = random.randrange(1 << 30) if given.seed is None else given.seed
    print(f"seed {begin}", flush=True)
    failures: list[str] = []
    with warmed():
        if given.cases:
            at = time.monotonic()
            with job.unharmed(LEAST_SECONDS + given.cases // CASES_PER_SECOND) as cluster:
                outcome = job.rest(cluster, given.cases, begin)
            print(f"{outcome.story()}\n{time.monotonic() - at:.0f} s; the job is unharmed", flush=True)
            failures += outcome.failures
        if given.sessions:
            at = time.monotonic()
            with job.unharmed(LEAST_SECONDS + given.sessions // SESSIONS_PER_SECOND) as cluster:
                ends = job.sessions(cluster, begin, range(given.first, given.first + given.sessions))
            seconds = time.monotonic() - at
            print(f"{ends.story()}\n{given.sessions} sessions, {seconds:.0f} s; the job is unharmed", flush=True)
            failures += ends.failures
    print(f"seed {begin}: {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
