"""The REST API as one ASGI app, with the OpenAPI document that describes it.

What is not below `/v1` is here: the page at `/` (`page/site.py`), `/healthz` (the process answers), `/readyz` (it
serves requests, as leader or follower; with `?store`, its store can be written) and `/metrics`. `_document` adds to
`/openapi.json` what the framework does not know: every error is a problem (`problems.py`), and those that pass say
when to retry. Tests compare every answer with the document. `server.py` serves the app.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.openapi.utils import get_openapi
from starlette.types import ASGIApp

from shoal_controller.access.proxies import NO_PROXIES, Proxies
from shoal_controller.access.token_register import TokenRegister
from shoal_controller.access.worker_tokens import WorkerTokens
from shoal_controller.api import problems
from shoal_controller.api.answers import HealthAnswer, Problem
from shoal_controller.api.forwarding import Forwarding
from shoal_controller.api.guard import OPEN_PATHS, Guard
from shoal_controller.api.neighbours import Neighbours
from shoal_controller.api.page_routes import RecentOverview
from shoal_controller.api.problems import HEADERS, PROBLEM_TYPE
from shoal_controller.api.routes import router
from shoal_controller.core.machine.spec import LAUNCHER_TRAITS
from shoal_controller.leadership.controller_state import ControllerState
from shoal_controller.page.site import Site

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

METRICS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
"""What the OpenAPI document says of them."""


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """What the API must know besides the shell."""

    default_workers: int
    """Wanted where a job does not say."""
    here_only: bool = True
    """The port is reached from this machine only."""
    launchers: frozenset[str] = frozenset(LAUNCHER_TRAITS)
    """Launchers that jobs may use."""
    worker_tokens: WorkerTokens | None = None
    """What makes the join tokens; None: workers need none."""
    folder: Path | None = None
    """Where the logs of local workers are; None: none are shown."""
    page: bool = False
    """Whether the page is served."""
    log_folder: Path | None = None
    """Where else logs of local workers are, in a folder of each job's name; None: nowhere else."""
    proxies: Proxies = NO_PROXIES
    """Proxies before the port."""


def build_app(
    controller: ControllerState,
    scrape: Callable[[], Awaitable[bytes]],
    settings: ApiSettings,
    tokens: TokenRegister,
    neighbours: Neighbours,
) -> ASGIApp:
    """The whole API, guarded. What a follower is asked goes to its neighbours."""
    app = FastAPI(
        title="Shoal",
        version=version("shoal"),
        docs_url=None,  # Why: the framework's pages run a script of another site, which could read the page's token.
        redoc_url=None,
        redirect_slashes=False,  # a path has one spelling; a redirect would be no problem+json
        generate_unique_id_function=lambda route: route.name,
        separate_input_output_schemas=False,
    )
    app.state.controller = controller
    app.state.settings = settings
    app.state.tokens = tokens
    app.state.followers = Counter[str]()
    app.state.overview = RecentOverview()
    app.state.site = site = Site() if settings.page else None
    problems.install(app)
    app.openapi = partial(_document, app)  # type: ignore[method-assign]
    app.include_router(router)

    @app.get("/healthz", tags=["controller"])
    async def get_health() -> HealthAnswer:
        """The process answers; `trouble` says what it waits for."""
        return HealthAnswer(status="ok", trouble=controller.trouble, term=controller.term)

    @app.get("/readyz", tags=["controller"])
    async def get_readiness(store: str | None = None) -> HealthAnswer:
        """This controller serves requests. With `?store`, only while its store can be used."""
        controller.check()  # what keeps it from that is the problem's detail
        if store is not None:
            await controller.check_store()
        return HealthAnswer(status="ready", trouble=controller.trouble, term=controller.term)

    @app.get("/metrics", tags=["controller"], response_class=Response, responses=METRICS)
    async def get_metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(await scrape(), media_type=METRICS_TYPE)

    if site is not None:
        _serve(app, site)
    answering = Forwarding(app, controller, neighbours)
    return Guard(answering, tokens, settings.here_only, controller, settings.proxies)


def _serve(app: FastAPI, site: Site) -> None:
    """Show the page. Its files are no part of the API, and no requests of theirs are in the document."""

    async def get_page(request: Request) -> Response:
        answer = site.answer(request.url.path, request.headers)
        if answer is None:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        return answer

    for path in ("/", "/page/{name:path}"):
        app.add_api_route(path, get_page, methods=["GET", "HEAD"], include_in_schema=False)


Json = dict[str, Any]

BEARER = "token"
BEARER_SCHEME = {
    "type": "http",
    "scheme": "bearer",
    "description": "SHOAL_TOKEN, or a token of `shoal token create`: role view reads, operate changes jobs, admin "
    "makes tokens. A controller that was started without SHOAL_TOKEN asks for none.",
}

WITH_VERSION = ("JobAnswer", "JobBody")
VERSION = "The job's version, to be sent as `If-Match` with a change."

OF_THE_FRAMEWORK = ("HTTPValidationError", "ValidationError")
"""Models that no answer has."""


def _document(app: FastAPI) -> Json:
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop(f"{HTTPStatus.UNPROCESSABLE_ENTITY}", None)
                _name_versions(operation["responses"])
                operation["responses"] |= _errors()
        models = document["components"]["schemas"]
        for name in OF_THE_FRAMEWORK:
            models.pop(name, None)
        problem = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
        models |= problem.pop("$defs", {}) | {Problem.__name__: problem}
        document["components"]["securitySchemes"] = {BEARER: BEARER_SCHEME}
        for path, operations in document["paths"].items():
            for operation in operations.values():
                operation["security"] = [] if path in OPEN_PATHS else [{BEARER: []}]
        app.openapi_schema = document
    return app.openapi_schema


def _errors() -> Json:
    whole = {
        "4XX": _problem("What is wrong with the request.", {}),
        "5XX": _problem("What is wrong here.", {}),
    }
    headers = {**HEADERS, HTTPStatus.PRECONDITION_FAILED: {"ETag": ""}}
    return whole | {f"{status}": _problem(HTTPStatus(status).phrase, named) for status, named in headers.items()}


def _name_versions(answers: Json) -> None:
    """An answer with a job has its version in a header."""
    for answer in answers.values():
        schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
        if schema.get("$ref", "").rpartition("/")[2] in WITH_VERSION:
            answer["headers"] = {"ETag": {"required": True, "schema": {"type": "string"}, "description": VERSION}}


def _problem(description: str, headers: Any) -> Json:
    schema = {"$ref": f"#/components/schemas/{Problem.__name__}"}
    return {
        "description": description,
        "headers": {name: {"required": True, "schema": {"type": "string"}} for name in headers},
        "content": {PROBLEM_TYPE: {"schema": schema}},
    }
