"""From a resource to the specification of its job, and what of a changed resource its job can follow. Pure.

A resource's `spec` is a job's body without the name, which is the resource's. The cluster's rules (CEL) have refused
most of what is wrong before it comes here; what an older definition lets through is refused here in the same words as
over REST.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from pydantic import ValidationError
from shoal_protos.acts import Scale
from shoal_protos.errors import UserError
from shoal_protos.validation import every_sentence

from shoal_controller.api.models import JobBody
from shoal_controller.core.machine.spec import JobSpec, JobView
from shoal_controller.launchers.kubernetes.resource_kind import FULL_NAME, uid_of

OWN_FIELDS = ("wanted", "wanted_by_default", "run", "resource", "request_key", "request_digest")
"""Of a job's specification: those that change in its life, or are not the user's."""
SIZE = ("min_workers", "max_workers")
"""Those that a running job follows (`size_change`), with `wanted`."""
COMPUTED_BY = ("env", "kubernetes.env", "kubernetes.image", "kubernetes.pod_template")
"""Keys that decide what a worker computes: another value for those that start later would be another computation."""


def job_spec_of(item: Mapping[str, Any]) -> JobSpec:
    """The job that a resource asks for. Raises `UserError`."""
    name = str(item["metadata"]["name"])
    given = {"launcher": "kubernetes", **(item.get("spec") or {}), "job": name}
    try:
        body = JobBody.model_validate(given)
    except ValidationError as error:
        sentence = every_sentence(error.errors(include_url=False), f"the spec of {FULL_NAME}/{name}", JobBody, given)
        raise UserError(sentence) from None
    if body.launcher != "kubernetes":
        raise UserError(f"`launcher` is {body.launcher}; expected kubernetes, which starts the workers of a resource")
    spec = body.spec(default_wanted=body.workers.min or 1)
    return replace(spec, wanted_by_default=False, resource=uid_of(item))


def size_change(view: JobView, asked: JobSpec) -> Scale | None:
    """What to ask of a job so that it has its resource's size; None: it has it."""
    least = asked.min_workers or view.default_bounds.least
    most = asked.max_workers or view.default_bounds.most
    change = Scale(
        workers=asked.wanted if asked.wanted != view.wanted else None,
        least=least if least != view.min_workers else None,
        most=(most or 0) if (most or view.lanes) != view.max_workers else None,
    )
    return change if change != Scale() else None


def why_not_followed(job: JobSpec, asked: JobSpec) -> str:
    """A sentence on what of a resource has changed that a job that is made cannot follow; empty: nothing."""
    changed = changed_keys(job, asked)
    if not changed:
        return ""
    named = ", ".join(f"spec.{name}" for name in changed)
    computed = [name for name in changed if name in COMPUTED_BY]
    why = "a job that is made already cannot follow that"
    if computed:
        why = "workers that start later would compute something else than those that are there, and the result differ"
    return f"{named} changed: {why}; put back what was there, or delete the resource and create it anew"


def changed_keys(job: JobSpec, asked: JobSpec) -> list[str]:
    """Keys of the resource that are not as they were when its job began, but for its size."""
    names = [field.name for field in fields(JobSpec) if field.name not in (*OWN_FIELDS, *SIZE, "kubernetes")]
    changed = [name for name in names if getattr(job, name) != getattr(asked, name)]
    before, after = (json.loads(spec.kubernetes or "{}") for spec in (job, asked))
    inner = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    return [*changed, *(f"kubernetes.{key}" for key in inner)]
