"""The codes of errors: what a program looks at where a person reads the sentence. They are public and stay as they are.

`errors.py` gives every class one; whoever raises an error says a nearer one where there is one. REST has it in every
problem, and docs/rest.md is made from this list. Standard library only.
"""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """Each with what it means and, for a program, what to do."""

    def __new__(cls, value: str, meaning: str) -> ErrorCode:
        code = str.__new__(cls, value)
        code._value_ = value
        code.meaning = meaning
        return code

    meaning: str

    INVALID_REQUEST = "invalid_request", "The path, the query, a header or the body is not as the API has it."
    BODY_TOO_LARGE = "body_too_large", "The body is larger than any that is accepted."
    PATH_UNKNOWN = "path_unknown", "There is nothing at this path."
    METHOD_NOT_ALLOWED = "method_not_allowed", "The path has other methods; `Allow` lists them."

    UNAUTHORIZED = "unauthorized", "No token, an unknown one, or one that has expired."
    TOO_MANY_FAILURES = (
        "too_many_failures",
        "The token is wrong, and too many wrong ones of its address wait. Wait `Retry-After`.",
    )
    ROLE_TOO_LOW = "role_too_low", "The token's role does not include this."
    HOST_REFUSED = "host_refused", "A controller without a token answers to this machine only."
    PAGE_REFUSED = "page_refused", "The request comes from a web page of another site."
    LAUNCHER_NOT_ALLOWED = "launcher_not_allowed", "This controller may not use the launcher that the spec names."
    FORBIDDEN = "forbidden", "The caller may not do this."

    JOB_UNKNOWN = "job_unknown", "There is no job of this name."
    WORKER_UNKNOWN = "worker_unknown", "The job has no worker of this name."
    TOKEN_UNKNOWN = "token_unknown", "There is no token of this name."
    NOT_FOUND = "not_found", "What the request names does not exist."

    JOB_EXISTS = "job_exists", "There is a job of this name that is not over."
    JOB_OVER = "job_over", "The job is over: it cannot be changed any more."
    JOB_UNSERVED = "job_unserved", "The job is left as it is: its records cannot be read, or it failed by a bug."
    JOB_OF_A_RESOURCE = "job_of_a_resource", "The job belongs to an ElasticJob: change that."
    TOO_MANY_JOBS = "too_many_jobs", "There is no room for another job; delete some."
    SIZE_IMPOSSIBLE = "size_impossible", "The job cannot have so many or so few workers."
    ALREADY_PAUSED = "already_paused", "The job is paused already."
    NOT_PAUSED = "not_paused", "The job is not paused."
    NOT_TRAINING = "not_training", "No world of the job trains, so nothing can be saved."
    NO_CHECKPOINT_PATH = "no_checkpoint_path", "The job's config names no folder for checkpoints."
    WORKER_DRAINING = "worker_draining", "The worker is being drained already."
    WORKER_GONE = "worker_gone", "The worker has left, or is dead."
    WORKER_ALIVE = "worker_alive", "The worker was heard of lately: it is not lost."
    LAST_WORKER = "last_worker", "The worker is the last one that has the job's state."
    TOKEN_EXISTS = "token_exists", "There is a token of this name already."
    TOKEN_CHANGED = "token_changed", "The token was changed by somebody else meanwhile; read it again."
    TOO_MANY_TOKENS = "too_many_tokens", "There is no room for another token; revoke some."
    NO_TOKENS_HERE = "no_tokens_here", "The controller was started without SHOAL_TOKEN."
    CONFLICT = "conflict", "Right in form, but impossible in the present state."

    VERSION_MISMATCH = "version_mismatch", "The job was changed since: `ETag` has its version now. Read it again."
    KEY_REUSED = "key_reused", "The Idempotency-Key has come with another request before."

    TOO_MANY_READERS = "too_many_readers", "As many streams of events are open as can be served."
    NOT_LEADING = "not_leading", "No controller leads at present. Wait `Retry-After`, try again."
    STORE_UNAVAILABLE = "store_unavailable", "The store does not answer, or the controller stops. Try again later."
    OUTCOME_UNKNOWN = "outcome_unknown", "It may have been done, or still be: look before you try again."
    CLUSTER_UNAVAILABLE = "cluster_unavailable", "The cluster's API server has refused, or does not answer."
    JOB_FAILED = "job_failed", "Training cannot go on."
    BUG = "bug", "A bug in Shoal; the controller's log has it."
