"""Writes docs/rest.md from the API's own schema and the list of codes: `python docs/generate/rest.py` (`make docs`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from fastapi import FastAPI
from shoal_controller.api.routes import router
from shoal_protos.error_codes import ErrorCode

PAGE = Path(__file__).resolve().parents[1] / "rest.md"

OPENING = """\
# REST

<!-- Written by `make docs` from the code; do not edit. -->

Use the API of a controller, under `/v1`. A running controller serves its schema as
`/openapi.json`, from which clients can be generated; [`shoal.client`](client.md) is one for Python. Changes
answer 202 with the job as it is then. Requests need a token: [security](security.md).

## Requests
"""
LISTS = """
## Lists

Lists are `{"jobs": […], "next": null}` and the like. `limit` bounds an answer. If more entries follow, pass `next` as
`after` for the next page:

```bash
curl -H "Authorization: Bearer $SHOAL_TOKEN" 'http://127.0.0.1:7070/v1/jobs?limit=50'
curl -H "Authorization: Bearer $SHOAL_TOKEN" 'http://127.0.0.1:7070/v1/jobs?limit=50&after=job-50'
```

Jobs and tokens are listed by name, workers by number, checkpoints from the newest, events by revision. A page begins
after a position in that order: entries that are added or removed meanwhile cause no repetition and no gap.

## Events as they happen

With `Accept: text/event-stream`, the events of a job, or of all jobs (`GET /v1/events`), come as server-sent events,
with a comment every 10 s. `kind` (once for each) and `worker` select events. To continue after a reconnection, send
the `id` of the last event as `Last-Event-ID`.

- In a job's stream, the `id` is the event's revision, and all its events are available.
- In the stream of all jobs, only the controller that sent an `id` knows it, and it keeps the newest 2,000 events in
  memory. If it cannot continue from there (another controller leads by now, or the event is too old), the stream begins
  with an event named `anew`: read all jobs again. Without `Accept`, `GET /v1/events` lists the events in memory, and
  `anew` is a key of the answer.

```bash
curl -N -H "Authorization: Bearer $SHOAL_TOKEN" -H 'Accept: text/event-stream' \\
  'http://127.0.0.1:7070/v1/events?kind=lost&kind=open&kind=failed'
```

## Versions of a job

A job's `version`, which is also the `ETag` of every answer with a job, changes with every request that changes the job:
its size, a pause, a drain, its end. Steps, losses, and workers that join or die do not change it. To make a change only
if the job has not changed since, send the version as `If-Match`:

```bash
curl -X POST -H 'If-Match: "9f3c61d0a4b27e58-3"' -H 'Content-Type: application/json' -d '{"workers": 4}' \\
  http://127.0.0.1:7070/v1/jobs/demo/scale
```

If the job has another version by then, the change is not made, and the answer is 412 with the present version as its
`ETag`.
Because the answer itself changes with every step, it is `no-store`, and `If-None-Match` has no meaning.

## Retrying a request

A request whose answer was lost may have been carried out. `POST /v1/jobs` with an `Idempotency-Key` (any 1 to 255
visible ASCII characters, new for every new request) can be sent again, also to another controller after a take-over: it
returns the job that the first request created, and creates no second one. With another request the same key is refused
(422). The key is kept as long as that run of the job. Other changes are safe to send again, or are refused the second
time; with `If-Match` they are made once.

## Problems

Errors are `application/problem+json` (RFC 9457): `detail` is one sentence for people, which may change; `code` is for
programs, and does not change. `type` is `urn:shoal:outcome-unknown` for `outcome_unknown`. If a body or a query has
several faults, `detail` lists all of them, one per line. Unknown keys and parameters are refused, with the nearest
known one.

| code | meaning |
|---|---|
"""


def page() -> str:
    """The whole page."""
    codes = [f"| `{code}` | {code.meaning} |" for code in ErrorCode]
    return "\n".join([OPENING, *routes(), LISTS + "\n".join(codes), ""])


def routes() -> Iterator[str]:
    """Every request, with the name that a generated client gives it."""
    yield "| request | name | effect |"
    yield "|---|---|---|"
    app = FastAPI(generate_unique_id_function=lambda route: route.name)
    app.include_router(router)
    for path, methods in app.openapi()["paths"].items():
        for method, operation in methods.items():
            text = " ".join(operation["description"].split())
            yield f"| `{method.upper()} {path}` | `{operation['operationId']}` | {text} |"
    yield "| `GET /healthz`, `GET /readyz` | `get_health`, `get_readiness` | Check that it runs, that it is ready. |"
    yield "| `GET /metrics` | `get_metrics` | Show metrics. |"


def main(arguments: list[str]) -> int:
    if arguments:
        sys.stderr.write("usage: python docs/generate/rest.py\n")
        return 2
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
