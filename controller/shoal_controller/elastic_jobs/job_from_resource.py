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
from shoal_protos.errors import UserError
from shoal_protos.validation import first_sentence

from shoal_controller.api.models import JobBody
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.elastic_jobs.resource_kind import FULL_NAME, uid_of

OWN_FIELDS = ("wanted", "wanted_by_default", "run", "resource")
"""Of a job's specification: those that change in its life, or are not the user's."""
KEYS = {"min_workers": "workers.min", "max_workers": "workers.max"}
"""Keys of a resource that a job's specification calls otherwise."""


def job_spec_of(item: Mapping[str, Any]) -> JobSpec:
    """The job that a resource asks for. Raises `UserError`."""
    name = str(item["metadata"]["name"])
    given = {"launcher": "kubernetes", **(item.get("spec") or {}), "job": name}
    try:
        body = JobBody.model_validate(given)
    except ValidationError as error:
        sentence = first_sentence(error.errors(include_url=False), f"the spec of {FULL_NAME}/{name}", JobBody)
        raise UserError(sentence) from None
    if body.launcher != "kubernetes":
        raise UserError(f"`launcher` is {body.launcher}; expected kubernetes, which starts the workers of a resource")
    spec = body.spec(default_wanted=body.workers.min)
    return replace(spec, wanted_by_default=False, resource=uid_of(item))


def changed_keys(job: JobSpec, asked: JobSpec) -> list[str]:
    """Keys of the resource that are not as they were when its job began, but for the number of workers."""
    names = [field.name for field in fields(JobSpec) if field.name not in (*OWN_FIELDS, "kubernetes")]
    changed = [KEYS.get(name, name) for name in names if getattr(job, name) != getattr(asked, name)]
    before, after = (json.loads(spec.kubernetes or "{}") for spec in (job, asked))
    inner = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    return [f"spec.{name}" for name in (*changed, *(f"kubernetes.{key}" for key in inner))]
