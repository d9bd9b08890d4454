"""Every error becomes one `application/problem+json` (RFC 9457) with the sentence as its detail."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from shoal_protos.error_codes import ErrorCode
from shoal_protos.errors import ShoalError, UserError
from shoal_protos.text import shown_name
from shoal_protos.validation import every_sentence
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from shoal_controller.api.answers import Problem
from shoal_controller.api.models import WITH_BODIES, JobBody
from shoal_controller.api.token_routes import RotateBody, TokenBody
from shoal_controller.jobs.only_if import VersionMismatch

BODIES: Mapping[str, tuple[str, type[BaseModel]]] = {
    "create_job": ("the job spec", JobBody),
    **{act.operation: (f"the request to {act}", model) for act, (model, _) in WITH_BODIES.items()},
    "create_token": ("the request for a token", TokenBody),
    "rotate_token": ("the request to rotate", RotateBody),
}
"""By the route's name: what its body is called, and what it must be."""

RETRY_SECONDS = 5
"""When what the store did not take, or what was too much of one address, may be tried again."""

HEADERS: Mapping[int, Mapping[str, str]] = {
    HTTPStatus.UNAUTHORIZED: {"WWW-Authenticate": "Bearer"},
    HTTPStatus.TOO_MANY_REQUESTS: {"Retry-After": f"{RETRY_SECONDS}"},
    HTTPStatus.SERVICE_UNAVAILABLE: {"Retry-After": f"{RETRY_SECONDS}"},
}
"""By the status that needs them."""

CODES: Mapping[int, ErrorCode] = {
    HTTPStatus.NOT_FOUND: ErrorCode.PATH_UNKNOWN,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: ErrorCode.BODY_TOO_LARGE,
}
"""Of what the framework itself refuses."""

PROBLEM_TYPE = "application/problem+json"

BUG = "this is a bug in Shoal; see the controller's log"


class TooLarge(UserError):
    """The body is larger than anything that could be meant."""

    http_status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    problem_code = ErrorCode.BODY_TOO_LARGE


OUTCOME_UNKNOWN = "urn:shoal:outcome-unknown"
"""Type of a problem after which a change may have been made: who sends it again without a look may make it twice."""


def problem(path: str, status: int, sentence: str, code: ErrorCode) -> JSONResponse:
    """The answer for an error."""
    kind = OUTCOME_UNKNOWN if code is ErrorCode.OUTCOME_UNKNOWN else "about:blank"
    title = HTTPStatus(status).phrase
    body = Problem(type=kind, code=code, title=title, status=status, detail=sentence, instance=_reference(path))
    headers = HEADERS.get(status, {})
    return JSONResponse(body.model_dump(), status, headers, media_type=PROBLEM_TYPE)


def _reference(path: str) -> str:
    """The path as RFC 9457 wants it, a URI reference: characters that none has are escaped, and no host is named."""
    escaped = quote(path, safe="/:@!$&'()*+,;=~", errors="replace")
    return f"/.{escaped}" if escaped.startswith("//") else escaped


def problem_of(path: str, error: ShoalError) -> JSONResponse:
    """The answer for an error of Shoal's own."""
    answer = problem(path, error.http_status, str(error), error.problem_code)
    if isinstance(error, VersionMismatch):
        answer.headers["ETag"] = f'"{error.version}"'
    return answer


def install(app: FastAPI) -> None:
    """Have the app answer every error in this way."""
    app.add_exception_handler(ShoalError, _shoal_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _defect)


async def _shoal_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ShoalError)
    return problem_of(request.scope["path"], error)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    route = request.scope.get("route")
    whole, model = BODIES.get(getattr(route, "name", ""), ("the request", None))
    header = next((fault["loc"][-1] for fault in error.errors() if fault["loc"][0] == "header"), "")
    whole = f"the header `{header}`" if header else whole
    faults = [{**fault, "loc": fault["loc"][1:]} for fault in error.errors()]  # without "body" or "query"
    if any(not fault["loc"] and isinstance(fault.get("input"), bytes) for fault in faults):
        sentence = f"{whole} came without the header `Content-Type: application/json`; send it as JSON, and say so"
    else:
        sentence = every_sentence(faults, whole, model, error.body)
    return problem(request.scope["path"], UserError.http_status, sentence, UserError.problem_code)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    """What the framework itself refuses: unknown paths, wrong methods, bodies it cannot read."""
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ShoalError):
        return problem_of(request.scope["path"], error.__cause__)
    sentence, code = str(error.detail), CODES.get(error.status_code, ErrorCode.INVALID_REQUEST)
    if error.status_code == HTTPStatus.NOT_FOUND:
        sentence = f"there is nothing at {shown_name(request.url.path)}; /openapi.json lists what there is"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return _not_allowed(request, (error.headers or {}).get("Allow", ""))
    return problem(request.scope["path"], error.status_code, sentence, code)


def _not_allowed(request: Request, allowed: str) -> JSONResponse:
    """`allowed`: as the framework has it, which knows the methods of the first route of a path only."""
    for path, operations in request.app.openapi()["paths"].items():
        if compile_path(path)[0].match(request.url.path):
            allowed = ", ".join(sorted(map(str.upper, operations)))
    sentence = f"{request.method} is not allowed at {shown_name(request.url.path)}; expected {allowed}"
    answer = problem(request.scope["path"], HTTPStatus.METHOD_NOT_ALLOWED, sentence, ErrorCode.METHOD_NOT_ALLOWED)
    answer.headers["Allow"] = allowed
    return answer


async def _defect(request: Request, _: Exception) -> JSONResponse:
    """Our own bug. The guard, to which it is raised again after this, logs it."""
    return problem(request.scope["path"], ShoalError.http_status, BUG, ErrorCode.BUG)
