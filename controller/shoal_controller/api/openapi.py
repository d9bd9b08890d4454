"""The OpenAPI document, where the framework does not know it: what every route answers when something is wrong.

Every error is a problem (`problems.py`), also where the framework would answer another way, and those that pass say
when to try again. `app.py` installs it; tests hold every answer against it.
"""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from shoal_controller.api.answers import Problem
from shoal_controller.api.guard import OPEN_PATHS
from shoal_controller.api.problems import HEADERS, PROBLEM_TYPE

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


def install(app: FastAPI) -> None:
    """Have the app give this document."""
    app.openapi = partial(_document, app)  # type: ignore[method-assign]


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
