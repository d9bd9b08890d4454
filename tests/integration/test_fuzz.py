"""A short case of each kind of fuzzing, of a fixed seed; `make fuzz` runs thousands of them.

`python -m tests.fuzz.run --seed N` replays what `make fuzz` has found.
"""

from __future__ import annotations

from fuzz import job
from fuzz.sessions import MANNERS

SEED = 20
SECONDS = 90
"""For so long the job would last; at the end of the fuzzing it goes on at once."""
CASES = 60
SESSIONS = 3 * len(MANNERS)


def test_every_answer_to_a_fuzzed_request_is_as_the_openapi_document_says_and_the_job_is_unharmed() -> None:
    with job.unharmed(SECONDS) as cluster:
        outcome = job.rest(cluster, CASES, SEED)
    assert not outcome.failures, outcome.story()
    assert outcome.cases >= CASES // 2 and {200, 202, 400, 404} <= outcome.statuses.keys(), outcome.story()


def test_fuzzed_sessions_end_in_time_and_the_job_is_unharmed() -> None:
    with job.unharmed(SECONDS) as cluster:
        ends = job.sessions(cluster, SEED, range(SESSIONS))
    assert not ends.failures, ends.story()
    assert len(ends.by_manner) == len(MANNERS), ends.story()
