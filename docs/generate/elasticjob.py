"""Writes the custom resource elasticjobs.shoal.dev: `python docs/generate/elasticjob.py` (`make docs`).

Its `spec` has the keys of a job's specification but for the name, which is the resource's, as Kubernetes writes them
(`ResourceBody`), with their limits. Rules that say more are CEL, each with its sentence. The API server refuses rules
that could become expensive, so every text, list and map has a greatest length. What the schema has not an API server
drops before any rule sees it, so a key as REST and training configs write it, `max_restarts`, is in the schema, too,
with a rule that refuses it by the right name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic.alias_generators import to_snake
from shoal_controller.elastic_jobs.resource_forms import ResourceBody
from shoal_controller.launchers.kubernetes.resource_kind import FULL_NAME, GROUP, KIND, PLURAL, VERSION
from shoal_protos.shape import DIMENSIONS

FILE = Path(__file__).resolve().parents[2] / "helm" / "shoal" / "crd" / "elasticjobs.yaml"
OPENING = "# Written by `make docs` from docs/generate/elasticjob.py; do not edit.\n"

LONGEST_NAME = 52
"""With `-w` and five digits it is still a label of the DNS, which a pod's name must be."""
LONGEST_TEXT = 16_384
MOST_ENTRIES = 1000

Schema = dict[str, Any]


def rule(expression: str, message: str, path: str = "") -> Schema:
    found = {"rule": expression, "message": message}
    return {**found, "fieldPath": path} if path else found


NAME_RULE = rule(
    f"self.metadata.name.size() <= {LONGEST_NAME} && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')",
    f"metadata.name must be a DNS label of at most {LONGEST_NAME} characters: small letters, digits and '-', a letter "
    "or digit first and last; its pods are named after it",
)
WORKERS_RULES = [
    rule(
        "!has(self.wanted) || !has(self.min) || self.min <= self.wanted",
        "spec.workers.wanted must be at least spec.workers.min",
        ".wanted",
    ),
    rule(
        "!has(self.wanted) || !has(self.max) || self.wanted <= self.max",
        "spec.workers.wanted must be at most spec.workers.max",
        ".wanted",
    ),
    rule(
        "!has(self.max) || !has(self.min) || self.min <= self.max",
        "spec.workers.min must be at most spec.workers.max",
        ".min",
    ),
]
IN_A_CELL = f"(has(self.cell) ? {' * '.join(f'self.cell.{dimension}' for dimension in DIMENSIONS)} : 1)"
IN_A_POD = "(has(self.kubernetes.processesPerPod) ? self.kubernetes.processesPerPod : 1)"
WHOLES = {
    IN_A_CELL: "the processes of a cell (spec.cell)",
    IN_A_POD: "the processes of a pod (spec.kubernetes.processesPerPod)",
}
SPEC_RULES = [
    rule(
        f"!has(self.lanes) || !has(self.workers.{name}) || self.workers.{name} <= self.lanes * {IN_A_CELL}",
        f"spec.workers.{name} must be at most spec.lanes, times the processes of a cell: every worker or cell trains "
        "at least one lane",
        f".workers.{name}",
    )
    for name in ("min", "wanted", "max")
]
SPEC_RULES += [
    rule(
        "!has(self.lanes) || !has(self.workers.wanted) || !has(self.workers.spares) || "
        "self.workers.wanted + self.workers.spares <= self.lanes || self.workers.spares == 0",
        "spec.workers.wanted and spares together must be at most spec.lanes: a spare trains when a worker is lost",
        ".workers.spares",
    )
]
SPEC_RULES += [
    rule(
        f"!has(self.workers.{name}) || self.workers.{name} % {processes} == 0",
        f"spec.workers.{name} must be a multiple of {whole}",
        f".workers.{name}",
    )
    for processes, whole in WHOLES.items()
    for name in ("min", "max")
]
SPEC_RULES += [
    rule(
        f"!has(self.workers.wanted) || self.workers.wanted >= {processes}",
        f"spec.workers.wanted must be at least {whole}",
        ".workers.wanted",
    )
    for processes, whole in WHOLES.items()
]
SPEC_RULES += [
    rule(
        f"has(self.{name}) == has(oldSelf.{name}) && (!has(self.{name}) || self.{name} == oldSelf.{name})",
        f"spec.{name} cannot be changed; delete the resource and create it anew",
    )
    for name in ("lanes", "cell")
]
FIELD_RULES = {
    name: rule("self == oldSelf", f"spec.{name} cannot be changed; delete the resource and create it anew")
    for name in ("launcher", "command")
}


def resource() -> Schema:
    """The whole CustomResourceDefinition."""
    names = {
        "kind": KIND, "listKind": f"{KIND}List", "plural": PLURAL, "singular": KIND.lower(), "shortNames": ["ej"],
        "categories": ["all"],
    }  # fmt: skip
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.workers.wanted",
                "statusReplicasPath": ".status.workers.active",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": columns(),
        "schema": {"openAPIV3Schema": whole()},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": FULL_NAME, "annotations": {"helm.sh/resource-policy": "keep"}},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def columns() -> list[Schema]:
    def column(name: str, path: str, text: str, priority: int = 0, kind: str = "string") -> Schema:
        return {"name": name, "type": kind, "jsonPath": path, "description": text, "priority": priority}

    return [
        column("Phase", ".status.phase", "Phase of the job."),
        column("Workers", ".status.shown.workers", "Active and wanted workers."),
        column("Step", ".status.shown.step", "Committed steps, and the step at which the job ends."),
        column("Left", ".status.shown.left", "Time left at the present speed."),
        column("Last resize", ".status.shown.lastResize", "Reason of the last change of the world, and its age."),
        column("Age", ".metadata.creationTimestamp", "Age of the resource.", kind="date"),
        column("Loss", ".status.shown.loss", "Loss of the last step.", 1),
        column("Goodput", ".status.shown.goodput", "Part of the wanted workers' time that trained.", 1),
        column("Checkpoint", ".status.shown.checkpoint", "Step and age of the last checkpoint.", 1),
    ]


def whole() -> Schema:
    """The schema of a resource."""
    return {
        "description": "A training job whose workers come and go, and whose result stays the same.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec(),
            "status": status(),
        },
        "x-kubernetes-validations": [NAME_RULE],
    }


def spec() -> Schema:
    body = ResourceBody.model_json_schema()
    fields = {name: structural(field, body["$defs"]) for name, field in body["properties"].items() if name != "job"}
    section = fields["kubernetes"]["properties"]
    fields |= refused_spellings(fields, "spec")
    section |= refused_spellings(section, "spec.kubernetes")
    section["imagePullSecrets"]["items"] = {"x-kubernetes-preserve-unknown-fields": True}  # a name, or {name: NAME}
    fields["launcher"] |= {"enum": ["kubernetes"], "default": "kubernetes"}
    fields["launcher"]["description"] = "Launcher that starts the workers: always `kubernetes`."
    fields["command"] |= {"minItems": 1}
    fields["resume"]["x-kubernetes-preserve-unknown-fields"] = True  # true, a number or a text: no one type
    fields["workers"] |= {"default": {}, "x-kubernetes-validations": WORKERS_RULES}
    sizes = fields["workers"]["properties"]
    sizes["min"]["description"] = (
        "Fewest workers to train with. Default: one cell, in whole pods: 1 where neither has more."
    )
    sizes["wanted"]["description"] = (
        "Number of workers; `kubectl scale` and autoscalers set it. Default: `min`, until somebody scales."
    )
    for dimension in DIMENSIONS:
        fields["cell"]["properties"][dimension]["default"] = 1
    for name, found in FIELD_RULES.items():
        fields[name]["x-kubernetes-validations"] = [found]
    return {
        "description": "The job's specification; the job's name is the resource's.",
        "type": "object",
        "required": ["command"],
        "properties": fields,
        "x-kubernetes-validations": SPEC_RULES,
    }


def refused_spellings(fields: Schema, place: str) -> Schema:
    """Fields as Python writes them, each with the rule that names the right one."""
    found: Schema = {}
    for name, field in fields.items():
        if (spelling := to_snake(name)) != name:
            refusal = rule("false", f"{place}.{spelling}: write {name}")
            found[spelling] = {**field, "description": f"Write `{name}`.", "x-kubernetes-validations": [refusal]}
    return found


def structural(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    """A field of pydantic's schema as the API server takes it: in place, without null, of one type and bounded."""
    if "$ref" in field:
        described = {key: value for key, value in field.items() if key == "description"}
        return structural(definitions[field["$ref"].rpartition("/")[2]], definitions) | described
    if "anyOf" in field:
        kinds = [kind for kind in field["anyOf"] if kind != {"type": "null"}]
        described = {key: value for key, value in field.items() if key == "description"}
        found = structural(kinds[0], definitions) if len(kinds) == 1 else {}
        if {"string", "integer"} <= {kind.get("type") for kind in kinds} <= {"string", "integer", "number"}:
            found = {"x-kubernetes-int-or-string": True}
        return found | ({"description": " ".join(described["description"].split())} if described else {})
    dropped = ("title", "default", "properties", "items", "additionalProperties", "exclusiveMinimum")
    found = {key: value for key, value in field.items() if key not in dropped}
    if "description" in found:
        found["description"] = " ".join(found["description"].split())
    if "exclusiveMinimum" in field:
        found |= {"minimum": field["exclusiveMinimum"], "exclusiveMinimum": True}
    return found | _contents(field, definitions)


def _contents(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    """What a field holds, and how much of it."""
    kind = field.get("type")
    if kind == "string" and "enum" not in field:
        return {"maxLength": field.get("maxLength", LONGEST_TEXT)}
    if kind == "array":
        items = structural(field.get("items", {}), definitions)
        return {"items": items or _free(), "maxItems": field.get("maxItems", MOST_ENTRIES)}
    if kind == "object" and "properties" in field:
        return {"properties": {name: structural(part, definitions) for name, part in field["properties"].items()}}
    if kind == "object":
        values = field.get("additionalProperties")
        if not isinstance(values, dict) or not values:
            return _free()
        most = field.get("maxProperties", MOST_ENTRIES)
        return {"additionalProperties": structural(values, definitions), "maxProperties": most}
    return {}


def _free() -> Schema:
    return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def status() -> Schema:
    """What the controller writes; nobody else does."""

    def text(about: str, longest: int = 1024) -> Schema:
        return {"type": "string", "description": about, "maxLength": longest}

    def number(about: str) -> Schema:
        return {"type": "integer", "format": "int64", "description": about}

    counts = {name: number(f"Workers: {name}.") for name in ("active", "wanted", "min", "max", "spares")}
    cells = {
        "full": number("Cells that train."),
        "wanted": number("Cells that the wanted workers make."),
        "processes": number("Processes of a cell."),
    }
    shown = {
        "workers": text("Active and wanted workers: `3/4`.", 64),
        "step": text("Committed steps of those wanted: `12,000/50,000`.", 64),
        "left": text("Time left: `1h20m`.", 64),
        "lastResize": text("Reason and age of the last change of the world: `kill 4m`.", 64),
        "loss": text("Loss of the last step.", 64),
        "goodput": text("Part of the wanted workers' time that trained.", 64),
        "checkpoint": text("Step and age of the last checkpoint.", 64),
    }
    fields = {
        "observedGeneration": number("Generation of the resource that the controller has taken in."),
        "events": number("Number of the job's last event that was passed on to Kubernetes."),
        "run": text("Which run of the job this is.", 64),
        "phase": text("Phase of the job; `refused` where no job was made.", 64),
        "reason": text("Why the job is in its phase."),
        "generation": number("Number of the world."),
        "step": number("Committed steps."),
        "maxSteps": number("Step at which the job ends."),
        "selector": text("Selector of the job's pods, for autoscalers."),
        "workers": {"type": "object", "description": "Numbers of workers.", "properties": counts},
        "cells": {
            "type": "object",
            "description": "Numbers of cells, where they have several processes.",
            "properties": cells,
        },
        "shown": {"type": "object", "description": "The columns of `kubectl get`.", "properties": shown},
        "conditions": conditions(),
    }
    return {"description": "Written by the controller.", "type": "object", "properties": fields}


def conditions() -> Schema:
    """`metav1.Condition`."""
    fields: Schema = {
        "type": {"type": "string", "maxLength": 316},
        "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
        "reason": {"type": "string", "maxLength": 1024},
        "message": {"type": "string", "maxLength": 32_768},
        "lastTransitionTime": {"type": "string", "format": "date-time", "maxLength": 64},
        "observedGeneration": {"type": "integer", "format": "int64"},
    }
    required = ["type", "status", "reason", "message", "lastTransitionTime"]
    return {
        "description": "Accepted, Running, Degraded, Redundant, Checkpointed, Complete, Failed.",
        "type": "array",
        "maxItems": 16,
        "items": {"type": "object", "required": required, "properties": fields},
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
    }


def page() -> str:
    """The file."""

    class Plain(yaml.SafeDumper):
        """Without anchors: the same part is written where it is used."""

        def ignore_aliases(self, _: object) -> bool:
            return True

    return OPENING + yaml.dump(resource(), Dumper=Plain, sort_keys=False, width=110)


if __name__ == "__main__":
    FILE.write_text(page())
