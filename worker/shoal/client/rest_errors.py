"""What the client raises: a problem that the controller answered, or that none answers."""

from __future__ import annotations

import httpx
from shoal_protos.errors import ShoalError
from shoal_protos.release import RELEASE
from shoal_protos.text import of_shoal


class NoController(ShoalError):
    """No controller answers at the address."""

    def __init__(self, sentence: str, may_be_done: bool = False) -> None:
        super().__init__(sentence)
        self.may_be_done = may_be_done
        """Whether the request was sent and may have been carried out: look before you send it again."""


class RestProblem(ShoalError):
    """The controller's answer to what it has not done (RFC 9457). `str(error)` is its sentence."""

    def __init__(self, sentence: str, code: str, status: int, version: str = "") -> None:
        super().__init__(sentence)
        self.code = code
        """What a program goes by, such as `job_unknown`: docs/rest.md, "Problems"."""
        self.status = status
        """The HTTP status."""
        self.version = version
        """With code `version_mismatch`: the version that the job has now."""

    @property
    def may_be_done(self) -> bool:
        """Whether the request may have been carried out: look before you send it again."""
        return self.code == "outcome_unknown"


def problem_in(answer: httpx.Response) -> RestProblem | NoController:
    """The error that an answer means. One that is no problem comes from something else than a controller."""
    try:
        problem = answer.json()
        sentence, code = str(problem["detail"]), str(problem["code"])
    except (ValueError, KeyError, TypeError):
        return NoController(
            f"{answer.request.url} answered with status {answer.status_code} and no reason; is it a Shoal controller? "
            f"This is {of_shoal(RELEASE)}"
        )
    version = answer.headers.get("etag", "").strip('"')
    return RestProblem(sentence, code, answer.status_code, version)
