"""What an API server does with a custom resource by its definition: defaults, pruning, schema and rules (CEL),
generation, `/status`, `/scale`. Used by `api_server.py`, and by the tests of the definition itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import cel
import jsonschema
import yaml

Json = dict[str, Any]
FILE = Path(__file__).resolve().parents[1] / "helm" / "shoal" / "crd" / "elasticjobs.yaml"


def definition() -> Json:
    """That of ElasticJobs, as the chart has it."""
    found: Json = yaml.safe_load(FILE.read_text())
    return found


class Invalid(Exception):
    """422, with the sentences of all that is wrong."""


class CustomResources:
    """One kind, by its definition."""

    def __init__(self, crd: Json) -> None:
        (version,) = crd["spec"]["versions"]
        self.schema: Json = version["schema"]["openAPIV3Schema"]
        self.scale: Json = version["subresources"].get("scale") or {}
        self.has_status = "status" in version["subresources"]

    def created(self, item: Json) -> Json:
        """As it is stored first. Raises `Invalid`."""
        found = self._admitted({key: value for key, value in item.items() if key != "status"}, None)
        found["metadata"]["generation"] = 1
        return found

    def changed(self, new: Json, old: Json) -> Json:
        """What of a change of the whole is stored: never its status; its generation counts changes of its spec."""
        kept = {"status": old["status"]} if "status" in old else {}
        found = self._admitted({key: value for key, value in new.items() if key != "status"} | kept, old)
        found["metadata"]["generation"] = old["metadata"]["generation"] + (found["spec"] != old["spec"])
        return found

    def with_status(self, new: Json, old: Json) -> Json:
        """What of a change of `/status` is stored: nothing else."""
        status = pruned(self.schema["properties"]["status"], new.get("status") or {})
        self._check(self.schema["properties"]["status"], status)
        return {**old, "status": status}

    def unknown(self, item: Json) -> list[str]:
        """Fields that the definition has not, as `fieldValidation=Strict` names them."""
        return list(unknown_fields(self.schema, item))

    # ---- scale

    def scale_of(self, item: Json) -> Json:
        return {
            "apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": deepcopy(item["metadata"]),
            "spec": {"replicas": at(item, self.scale["specReplicasPath"]) or 0},
            "status": {
                "replicas": at(item, self.scale["statusReplicasPath"]) or 0,
                "selector": at(item, self.scale["labelSelectorPath"]) or "",
            },
        }  # fmt: skip

    def scaled(self, old: Json, replicas: int) -> Json:
        new = deepcopy(old)
        *outer, last = self.scale["specReplicasPath"].strip(".").split(".")
        place = new
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = replicas
        return self.changed(new, old)

    # ---- inside

    def _admitted(self, item: Json, old: Json | None) -> Json:
        found = pruned(self.schema, item)
        found["spec"] = with_defaults(self.schema["properties"]["spec"], found.get("spec") or {})
        if old is None or found["spec"] != old["spec"]:
            self._check(self.schema, found)
            if wrong := list(refusals(self.schema, found, old)):
                raise Invalid("; ".join(wrong))
        return found

    def _check(self, schema: Json, value: Json) -> None:
        wrong = [
            f"{'.'.join(map(str, error.path))}: {error.message}"
            for error in jsonschema.Draft4Validator(schema).iter_errors(value)
        ]  # the draft that Kubernetes' schemas are of
        if wrong:
            raise Invalid("; ".join(wrong))


def at(item: Json, path: str) -> Any:
    found: Any = item
    for key in path.strip(".").split("."):
        found = (found or {}).get(key)
    return found


def with_defaults(schema: Json, value: Json) -> Json:
    found = dict(value)
    for name, part in schema.get("properties", {}).items():
        if name not in found and "default" in part:
            found[name] = part["default"]
        if isinstance(found.get(name), dict):
            found[name] = with_defaults(part, found[name])
    return found


def refusals(schema: Json, new: Any, old: Any = None) -> Iterator[str]:
    """The sentences of all rules that are broken. Rules on changes are run where there is an old value."""
    for rule in schema.get("x-kubernetes-validations", []):
        if "oldSelf" not in rule["rule"]:
            if not cel.evaluate(rule["rule"], {"self": new}):
                yield rule["message"]
        elif old is not None and not cel.evaluate(rule["rule"], {"self": new, "oldSelf": old}):
            yield rule["message"]
    for name, part in schema.get("properties", {}).items():
        if isinstance(new, dict) and name in new:
            yield from refusals(part, new[name], old.get(name) if isinstance(old, dict) else None)


def pruned(schema: Json, value: Any) -> Any:
    """Without what the schema has not."""
    if isinstance(value, list):
        return [pruned(schema.get("items", {}), one) for one in value]
    if not isinstance(value, dict) or "properties" not in schema or is_free(schema):
        return deepcopy(value)
    return {key: pruned(schema["properties"][key], one) for key, one in value.items() if key in schema["properties"]}


def unknown_fields(schema: Json, value: Any, place: str = "") -> Iterator[str]:
    if isinstance(value, list):
        for one in value:
            yield from unknown_fields(schema.get("items", {}), one, place)
    elif isinstance(value, dict) and "properties" in schema and not is_free(schema):
        for key, one in value.items():
            if key not in schema["properties"]:
                yield f"{place}.{key}".strip(".")
            else:
                yield from unknown_fields(schema["properties"][key], one, f"{place}.{key}")


def is_free(schema: Json) -> bool:
    return bool(schema.get("x-kubernetes-preserve-unknown-fields"))
