"""What an API server's ValidatingAdmissionPolicies say to a request: as much as the chart uses. Pure.

A policy with a `paramKind` warns, and is asked once for each object of that kind in the request's namespace. One
without denies, and is asked once, about the object as it is and as it was.
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
    for named, policy in _matching(policies, bindings, request, "Warn"):
        for one in of_kind(policy["paramKind"]["kind"]):
            for message in _broken(policy, {"params": one}):
                yield f"Validation failed for {named}: {message}"


def denials_of(
    policies: Mapping[str, Json], bindings: Iterable[Json], request: Request, new: Json, old: Json
) -> Iterator[str]:
    """`new`: the object as the request would have it."""
    for named, policy in _matching(policies, bindings, request, "Deny"):
        for message in _broken(policy, {"object": new, "oldObject": old}):
            yield f"{named} denied request: {message}"


def _matching(
    policies: Mapping[str, Json], bindings: Iterable[Json], request: Request, action: str
) -> Iterator[tuple[str, Json]]:
    """The policies that are asked, each with how it is named."""
    for binding in bindings:
        name = binding["spec"]["policyName"]
        policy = policies.get(name)
        if binding["spec"]["validationActions"] != [action] or policy is None:
            continue
        if _matches(policy["spec"]["matchConstraints"], request):
            yield f"ValidatingAdmissionPolicy '{name}' with binding '{binding['metadata']['name']}'", policy["spec"]


def _broken(policy: Json, known: dict[str, Any]) -> Iterator[str]:
    for rule in policy["validations"]:
        if not cel.evaluate(rule["expression"], known):
            yield cel.evaluate(rule["messageExpression"], known)


def _matches(constraints: Json, request: Request) -> bool:
    if constraints["namespaceSelector"]["matchLabels"] != {NAMESPACE_NAME: request.namespace}:
        return False
    return any(
        request.operation in rule["operations"] and request.group in rule["apiGroups"]
        and request.resource in rule["resources"] and request.name in rule["resourceNames"]
        for rule in constraints["resourceRules"]
    )  # fmt: skip
