"""What an API server's ValidatingAdmissionPolicies say to a request, as warnings: as much as the chart uses. Pure.

A policy is asked once for each object of its `paramKind` in the request's namespace. Actions other than `Warn` are not
known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cel

Json = Mapping[str, Any]
NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""A label that every namespace has."""


@dataclass(frozen=True, slots=True)
class Request:
    """What policies are matched with."""

    operation: str
    group: str
    resource: str
    name: str
    namespace: str


def warnings_of(
    policies: Mapping[str, Json], bindings: Iterable[Json], request: Request, of_kind: Callable[[str], Sequence[Json]]
) -> Iterator[str]:
    """`of_kind`: all objects of a kind in the request's namespace."""
    for binding in bindings:
        assert binding["spec"]["validationActions"] == ["Warn"] and binding["spec"]["paramRef"]["selector"] == {}
        name = binding["spec"]["policyName"]
        policy = policies.get(name)
        if policy is None or not _matches(policy["spec"]["matchConstraints"], request):
            continue
        opening = (
            f"Validation failed for ValidatingAdmissionPolicy '{name}' with binding '{binding['metadata']['name']}'"
        )
        for one in of_kind(policy["spec"]["paramKind"]["kind"]):
            for rule in policy["spec"]["validations"]:
                if not cel.evaluate(rule["expression"], {"params": one}):
                    yield f"{opening}: {cel.evaluate(rule['messageExpression'], {'params': one})}"


def _matches(constraints: Json, request: Request) -> bool:
    if constraints["namespaceSelector"]["matchLabels"] != {NAMESPACE_NAME: request.namespace}:
        return False
    return any(
        request.operation in rule["operations"] and request.group in rule["apiGroups"]
        and request.resource in rule["resources"] and request.name in rule["resourceNames"]
        for rule in constraints["resourceRules"]
    )  # fmt: skip
