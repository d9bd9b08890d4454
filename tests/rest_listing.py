"""REST as a text for review: every route, and every key of what goes in and comes out.

`python tests/rest_listing.py > tests/unit/frozen/rest.txt` after a change that is meant.
"""

from __future__ import annotations

from typing import Any

from shoal_controller.api.routes import router


def listing() -> str:
    """Routes in their order, then the models by name."""
    models: dict[str, dict[str, Any]] = {}
    lines = []
    for method, path, operation in _operations(models):
        body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
        answers = [
            f"{status} {_kind(answer['content']['application/json']['schema'])}"
            for status, answer in operation["responses"].items()
            if status.isdigit()
        ]
        query = [p["name"] for p in operation.get("parameters", ()) if p["in"] == "query"]
        asked = f"{path}?{'&'.join(query)}" if query else path
        lines.append(f"{method} {asked}{' ' + _kind(body) if body else ''} -> {', '.join(answers)}")
    for name, schema in sorted(models.items()):
        lines += ["", name]
        for key, value in schema.get("properties", {}).items():
            needed = " (required)" if key in schema.get("required", ()) else ""
            default = f" = {value['default']!r}" if "default" in value else ""
            lines.append(f"  {key}: {_kind(value)}{default}{needed}")
            lines += [f"    {allowed}" for allowed in value.get("enum", ())]
        if "enum" in schema:
            lines.append(f"  {', '.join(schema['enum'])}")
    return "\n".join(lines) + "\n"


def _operations(models: dict[str, dict[str, Any]]) -> list[tuple[str, str, dict[str, Any]]]:
    from fastapi import FastAPI

    app = FastAPI(separate_input_output_schemas=False)
    app.include_router(router)
    document = app.openapi()
    models |= {name: schema for name, schema in document["components"]["schemas"].items() if "Validation" not in name}
    return [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


def _kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " | ".join(map(_kind, schema["anyOf"]))
    limits = ("minimum", "maximum", "exclusiveMinimum", "maxItems", "pattern")
    bounds = "".join(f" {name} {schema[name]}" for name in limits if name in schema)
    inner = f"[{_kind(schema['items'])}]" if "items" in schema else ""
    return f"{schema.get('type', 'any')}{inner}{bounds}"


if __name__ == "__main__":
    print(listing(), end="")
