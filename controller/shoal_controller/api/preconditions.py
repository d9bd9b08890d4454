"""The headers with which a request says on what it depends: `If-Match` of a change, `Idempotency-Key` of a new job.

Called by `routes.py`; what they mean for a job is in `only_if.py`.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from typing import Annotated

from fastapi import Depends, Header, Response
from shoal_protos.errors import UserError

from shoal_controller.api.models import JobBody
from shoal_controller.core.machine.spec import JobSpec, JobView
from shoal_controller.only_if import OnlyIf, version_of

TAG = r'(?:W/)?"[^"]*"'
TAGS = re.compile(rf"\s*{TAG}(?:\s*,\s*{TAG})*\s*")
KEY = re.compile(r"[!-~]{1,255}")

IfMatchHeader = Header(
    alias="If-Match",
    description="A version of the job, in quotes, as `ETag` and `version` have it: if the job has another one by now, "
    "nothing is done and the answer is 412, with its version now. Default, and `*`: whatever its version is.",
)
KeyHeader = Header(
    alias="Idempotency-Key",
    description="1 to 255 visible ASCII characters of the client's choice: a request that comes once more with it, "
    "because its answer was lost, gets the job that it has made. Kept with the job.",
)


def only_if(if_match: Annotated[str | None, IfMatchHeader] = None) -> OnlyIf | None:
    """What `If-Match` asks for; None: nothing. A weak tag matches nothing (RFC 9110)."""
    if if_match is None or if_match.strip() == "*":
        return None
    if not TAGS.fullmatch(if_match):
        raise UserError(
            f"the header `If-Match` is {if_match[:80]!r}; expected a version of the job in double quotes, as `ETag` "
            "has it, or *"
        )
    tags = re.findall(TAG, if_match)
    return OnlyIf(tuple(tag.strip('"') for tag in tags if not tag.startswith("W/")))


def request_key(idempotency_key: Annotated[str | None, KeyHeader] = None) -> str:
    """The key of the request; empty: it has none."""
    if idempotency_key is not None and not KEY.fullmatch(idempotency_key):
        raise UserError(
            f"the header `Idempotency-Key` is {idempotency_key[:80]!r}; expected 1 to 255 visible ASCII characters"
        )
    return idempotency_key or ""


AnOnlyIf = Annotated[OnlyIf | None, Depends(only_if)]
AKey = Annotated[str, Depends(request_key)]


def keyed(spec: JobSpec, body: JobBody, key: str) -> JobSpec:
    """The spec, with the key of the request and what tells it from another one."""
    if not key:
        return spec
    return replace(spec, request_key=key, request_digest=hashlib.sha256(body.model_dump_json().encode()).hexdigest())


def tag(response: Response, view: JobView) -> None:
    """Have an answer with a job say its version. It is no tag of the whole answer, which changes with every step: no
    cache may go by it.
    """
    response.headers["ETag"] = f'"{version_of(view)}"'
    response.headers["Cache-Control"] = "no-store"
