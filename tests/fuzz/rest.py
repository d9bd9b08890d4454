"""Requests drawn by schemathesis from a controller's own OpenAPI document, and what must hold of every answer.

No status of the controller's own fault, none that the document does not name, no body that is not as it says. Half of
the requests are what the document allows, half are not; some name jobs that exist, so that they get past "there is
none". `run.py` and `integration/test_fuzz.py` call it; the same seed draws the same requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from requests import PreparedRequest
from requests.auth import AuthBase
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
SECONDS = 10.0
"""No answer takes longer."""
PLAYED_WITH = ("victim-0", "victim-1", "victim-2")
"""Jobs without workers, for requests that change something."""
TOKENS = ("ann", "bob")
NAMES = {"job": PLAYED_WITH, "worker": ("w0", "w1"), "name": TOKENS, "generation": (1, 2)}
"""What path parameters are called that may exist."""
MOST_SHOWN = 5
"""Failures that are told whole."""


class Bearer(AuthBase):
    """Every request shows the token, those too whose wrongness it was to show none: they are slowed by more and more
    (`failed_logins.py`), and the job would end long before the requests.
    """

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: PreparedRequest) -> PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._token}"
        return request


@dataclass(slots=True)
class Outcome:
    """What came of the requests."""

    cases: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def story(self) -> str:
        counts = ", ".join(f"{status}: {count}" for status, count in sorted(self.statuses.items()))
        more = len(self.failures) - MOST_SHOWN
        rest = [f"and {more} more"] if more > 0 else []
        return "\n".join([f"{self.cases} requests; {counts}", *self.failures[:MOST_SHOWN], *rest])


def fuzz_rest(url: str, token: str, cases: int, begin: int, untouched: str) -> Outcome:
    """Send so many requests to the controller. The job `untouched` is only read, and asked to be created again."""
    outcome = Outcome()
    with requests.Session() as session:
        session.trust_env = False
        session.auth = Bearer(token)
        document = session.get(f"{url}/openapi.json", timeout=SECONDS).json()
        schema = schemathesis.openapi.from_dict(document)
        operations = [found.ok() for found in schema.get_all_operations()]
        drawn = [(one, mode) for one in operations for mode in GenerationMode if mode.is_positive or _can_be_wrong(one)]
        for turn in count():  # some routes have one request only: others take their share in another turn
            for number, (operation, mode) in enumerate(drawn):
                share = (cases - outcome.cases) // (len(drawn) - number)
                if share > 0:
                    _make_targets(url, session)
                    send = partial(_send, url, session, outcome)
                    _play(_cases(operation, mode, untouched), send, share, begin + turn)
            if outcome.cases >= cases:
                break
    return outcome


def _make_targets(url: str, session: requests.Session) -> None:
    """What requests may change: some are gone by now."""
    for job in PLAYED_WITH:
        session.post(f"{url}/v1/jobs", json={"job": job}, timeout=SECONDS)
    for name in TOKENS:
        session.post(f"{url}/v1/tokens", json={"name": name, "role": "view"}, timeout=SECONDS)


def _send(url: str, session: requests.Session, outcome: Outcome, case: Case) -> None:
    answer = case.call(base_url=url, session=session, timeout=SECONDS)
    outcome.cases += 1
    outcome.statuses[answer.status_code] += 1
    try:
        case.validate_response(answer, checks=CHECKS)
    except* Exception as errors:
        found = "; ".join(str(error) for error in errors.exceptions)
        outcome.failures.append(f"{case.as_curl_command()}\n  {answer.status_code} {answer.text}\n  {found}")


def _play(drawn: st.SearchStrategy[Case], send: Callable[[Case], None], most: int, begin: int) -> None:
    """Every request counts, so a failure is not made smaller: that would send others."""
    every = settings(
        max_examples=most, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip

    @seed(begin)
    @every
    @given(drawn)
    def play(case: Case) -> None:
        send(case)

    with suppress(Unsatisfiable):  # where there is nothing that could be wrong in a request, others take its share
        play()


def _can_be_wrong(operation: APIOperation) -> bool:
    """Whether there is more in a request than names, of which any is allowed."""
    return bool(operation.body or operation.query)


def _cases(operation: APIOperation, mode: GenerationMode, untouched: str) -> st.SearchStrategy[Case]:
    """Requests of one route, half of them with names that exist."""
    reads = operation.method.upper() == "GET"
    known = {name: (*names, untouched) if reads and name == "job" else names for name, names in NAMES.items()}

    any_case = operation.as_strategy(generation_mode=mode)

    @st.composite
    def named(draw: st.DrawFn) -> Case:
        case = draw(any_case)
        for name in case.path_parameters or {}:
            if draw(st.booleans()):
                case.path_parameters[name] = draw(st.sampled_from(known[name]))
        if not reads and (case.path_parameters or {}).get("job") == untouched:
            case.path_parameters["job"] = PLAYED_WITH[0]
        if isinstance(case.body, dict) and "job" in case.body and draw(st.booleans()):
            case.body["job"] = draw(st.sampled_from((*PLAYED_WITH, untouched)))
        return case

    return named()
