"""The REST routes of tokens, with their bodies and answers: `/v1/tokens`, for admins only (`guard.py`), and the answer
with a job's join token, for whoever may change the job.

A secret is in one answer, that of the request which made it, and nowhere else.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

import structlog
from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field
from shoal_protos.error_codes import ErrorCode
from shoal_protos.errors import Conflict
from shoal_protos.validation import Allowed

from shoal_controller.access.callers import Caller, Role
from shoal_controller.access.token_register import NamedToken, TokenRegister
from shoal_controller.api.answers import Answer
from shoal_controller.api.dependencies import After, Limit, page
from shoal_controller.api.models import LONGEST_SECONDS, Body
from shoal_controller.api.strict import StrictRoute

MOST_DAYS = 3650
DAY_SECONDS = 86_400.0

log = structlog.get_logger("shoal.tokens")

router = APIRouter(prefix="/tokens", tags=["tokens"], route_class=StrictRoute)


class TokenBody(Body):
    """The body of `POST /v1/tokens`."""

    name: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"),
        Allowed("at most 63 letters, digits, `.`, `_` and `-`, a letter or digit first"),
    ]
    """Name of the token, which the event history shows: whose it is."""
    role: Literal["view", "operate", "admin"]
    """What it may do: `view`, `operate` or `admin`; each includes those before it."""
    days: Annotated[int, Field(ge=1, le=MOST_DAYS)] | None = None
    """How long it is valid. Default: until it is revoked."""


class RotateBody(Body):
    """The body of `POST /v1/tokens/{name}/rotate`."""

    keep_seconds: Annotated[float, Field(ge=0, le=LONGEST_SECONDS, allow_inf_nan=False)] = 3600.0
    """How long the secret that is replaced stays valid. Default: 3600."""


class TokenAnswer(Answer):
    """A token, without its secret."""

    name: str
    role: Role
    created: float
    """Seconds since the epoch."""
    created_by: str
    """Name of the token that made it."""
    expires: float | None
    """Seconds since the epoch; None: never."""

    @classmethod
    def of(cls, token: NamedToken) -> Self:
        return cls(
            name=token.name, role=token.role, created=token.created, created_by=token.created_by, expires=token.expires
        )


class NewTokenAnswer(TokenAnswer):
    """A token that was just made; its secret is shown this once."""

    token: str

    @classmethod
    def made(cls, made: tuple[NamedToken, str]) -> Self:
        return cls(**TokenAnswer.of(made[0]).model_dump(), token=made[1])


class TokensAnswer(Answer):
    tokens: list[TokenAnswer]
    next: str | None
    """`after` of the next page; None: there is none."""


class JoinTokenAnswer(Answer):
    """What workers of this run of a job are started with."""

    job: str
    run: str
    token: str


def join_token(request: Request, response: Response, caller: Caller, job: str, run: str) -> JoinTokenAnswer:
    """Raises `Conflict` where workers need no token."""
    tokens = request.app.state.settings.worker_tokens
    if tokens is None:
        raise Conflict("this controller was started without SHOAL_TOKEN: its workers need no token").coded(
            ErrorCode.NO_TOKENS_HERE
        )
    response.headers["Cache-Control"] = "no-store"
    log.info("a join token was shown", job=job, run=run, token=caller.token, address=caller.address)
    return JoinTokenAnswer(job=job, run=run, token=tokens.join(job, run))


def register_of(request: Request) -> TokenRegister:
    """The register that `app.py` was given."""
    register = request.app.state.tokens
    assert isinstance(register, TokenRegister)
    return register


def caller_of(request: Request) -> Caller:
    """Whoever the guard has let in."""
    caller = request.state.caller
    assert isinstance(caller, Caller)
    return caller


Register = Annotated[TokenRegister, Depends(register_of)]
ACaller = Annotated[Caller, Depends(caller_of)]


@router.get("")
async def list_tokens(register: Register, limit: Limit = None, after: After = None) -> TokensAnswer:
    """List the named tokens, without their secrets, by name."""
    begin = None if after is None else (after,)
    found, more = page(register.tokens(), lambda token: (token.name,), begin, limit)
    return TokensAnswer(tokens=[TokenAnswer.of(token) for token in found], next=found[-1].name if more else None)


@router.post("", status_code=201)
async def create_token(body: TokenBody, register: Register, caller: ACaller, response: Response) -> NewTokenAnswer:
    """Create a token; the answer shows its secret, this once."""
    response.headers["Cache-Control"] = "no-store"
    seconds = None if body.days is None else body.days * DAY_SECONDS
    return NewTokenAnswer.made(await register.create(body.name, Role(body.role), caller.token, seconds))


@router.post("/{name}/rotate")
async def rotate_token(
    name: str, register: Register, caller: ACaller, response: Response, body: RotateBody | None = None
) -> NewTokenAnswer:
    """Give a token a new secret; the old one stays valid for a while."""
    response.headers["Cache-Control"] = "no-store"
    return NewTokenAnswer.made(await register.rotate(name, caller.token, (body or RotateBody()).keep_seconds))


@router.delete("/{name}")
async def revoke_token(name: str, register: Register, caller: ACaller) -> TokenAnswer:
    """Revoke a token: from now on it opens nothing."""
    return TokenAnswer.of(await register.revoke(name, caller.token))
