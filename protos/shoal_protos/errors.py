"""The errors of Shoal: the class says who is to blame and which HTTP and gRPC status it is.

    ShoalError                      anything that Shoal itself raises on purpose
    ├── UserError        400        config, request, script or file that cannot work as given
    │   ├── NotFound     404        a job, worker or checkpoint that does not exist
    │   ├── Conflict     409        right in form, impossible in the present state
    │   └── Refused      403        a caller that may not
    ├── PeerError        502        another process broke the contract or went away
    ├── NoController                no controller answers a client of REST
    ├── StoreError       503        the store refused, failed or is held by another controller
    └── JobFailed        500        training cannot go on; the sentence says why

A sentence names the thing, what was found, what was expected and what to do; a code says the same to a program.
Standard library only.
"""

from __future__ import annotations

from typing import Self

from shoal_protos.error_codes import ErrorCode


class ShoalError(Exception):
    """Base of all: `str(error)` is the one sentence that a user reads."""

    http_status = 500
    grpc_status = "INTERNAL"
    problem_code = ErrorCode.BUG

    def coded(self, code: ErrorCode) -> Self:
        """The error, with a nearer code than its class has."""
        self.problem_code = code
        return self


class UserError(ShoalError):
    """What the user gave cannot work; nothing was changed."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    problem_code = ErrorCode.INVALID_REQUEST


class NotFound(UserError):
    """The named thing does not exist."""

    http_status = 404
    grpc_status = "NOT_FOUND"
    problem_code = ErrorCode.NOT_FOUND


class Conflict(UserError):
    """The request is impossible in the present state."""

    http_status = 409
    grpc_status = "FAILED_PRECONDITION"
    problem_code = ErrorCode.CONFLICT


class Refused(UserError):
    """The caller may not do this."""

    http_status = 403
    grpc_status = "PERMISSION_DENIED"
    problem_code = ErrorCode.FORBIDDEN


class PeerError(ShoalError):
    """Another process broke the contract or went away."""

    http_status = 502
    grpc_status = "UNAVAILABLE"
    problem_code = ErrorCode.CLUSTER_UNAVAILABLE


class NoController(ShoalError):
    """No controller answers at the address."""

    def __init__(self, sentence: str, may_be_done: bool = False) -> None:
        super().__init__(sentence)
        self.may_be_done = may_be_done
        """Whether the request was sent and may have been carried out: look before you send it again."""


class StoreError(ShoalError):
    """The store refused, failed, or is held by another controller."""

    http_status = 503
    grpc_status = "UNAVAILABLE"
    problem_code = ErrorCode.STORE_UNAVAILABLE


class JobFailed(ShoalError):
    """Training cannot go on."""

    http_status = 500
    grpc_status = "ABORTED"
    problem_code = ErrorCode.JOB_FAILED
