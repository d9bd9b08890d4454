"""On what a change depends: the version that the job must still have (`If-Match`), or that the request is a new one.

`api/routes.py` reads them from a request, `runner.py` and `shell.py` hold a job against them at the moment at
which nothing else changes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

from shoal_protos.error_codes import ErrorCode
from shoal_protos.errors import Conflict, UserError

from shoal_controller.core.machine.spec import JobSpec, JobView


class VersionMismatch(UserError):
    """The job has been changed since the caller has looked at it. Nothing was done."""

    http_status = HTTPStatus.PRECONDITION_FAILED
    grpc_status = "FAILED_PRECONDITION"
    problem_code = ErrorCode.VERSION_MISMATCH

    def __init__(self, sentence: str, version: str) -> None:
        super().__init__(sentence)
        self.version = version
        """The one that it has now."""


class KeyReused(Conflict):
    """The key of an earlier request comes with another one. Nothing was done."""

    http_status = HTTPStatus.UNPROCESSABLE_ENTITY
    problem_code = ErrorCode.KEY_REUSED


@dataclass(frozen=True, slots=True)
class OnlyIf:
    """The versions of a job of which one must be its own."""

    versions: tuple[str, ...]

    def check(self, job: str, version: str) -> None:
        """Raises `VersionMismatch`."""
        if version not in self.versions:
            raise VersionMismatch(
                f"job {job} was changed: its version is {version}, not {' or '.join(self.versions) or 'that'}. Look at "
                "it again, then send what you still want with If-Match of that version",
                version,
            )


def version_of(view: JobView) -> str:
    """A job's version, as people see it: of which run, and how often that was changed."""
    return f"{view.run or 'none'}-{view.version}"


def is_repeated(spec: JobSpec, known: JobSpec) -> bool:
    """Whether the request for `spec` is the very one that made `known`. Raises `KeyReused`."""
    if not spec.request_key or spec.request_key != known.request_key:
        return False
    if spec.request_digest != known.request_digest:
        raise KeyReused(
            f"the Idempotency-Key {spec.request_key} has come before, with another request, which made job "
            f"{known.job}; send a new key with every new request"
        )
    return True
