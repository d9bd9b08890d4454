"""What becomes of requests to a cluster's API server, by kinds that can be counted. Knows no client and no job."""

from __future__ import annotations

from collections.abc import Callable, Mapping

VERBS: Mapping[str, str] = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
"""By the method; a list is `list`, a watch `watch`."""
ALL_VERBS = (*VERBS.values(), "list", "watch")
SILENT = "silent"
"""The server has given no answer."""
OUTCOMES = ("done", "conflict", "throttled", "refused", "error", SILENT)

Asked = Callable[[str, str, bool], None]
"""Called with the verb of each request, its outcome, and whether it is tried again."""


def nobody_counts(verb: str, outcome: str, again: bool) -> None:
    """Where no metrics are shown."""


def verb_of(method: str, query: Mapping[str, str]) -> str:
    if "watch" in query:
        return "watch"
    return "list" if "limit" in query else VERBS[method]


def outcome_of(status: int) -> str:
    """By the HTTP status."""
    if status < 400:
        return "done"
    return {409: "conflict", 429: "throttled"}.get(status, "error" if status >= 500 else "refused")
