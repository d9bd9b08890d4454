"""What an administrator has set for the pods of all jobs: the defaults of their section `kubernetes`.

A key that a job's own section has replaces the default, lists too; of `env` each variable does. A job keeps the
defaults that it was made with (`JobSpec.kubernetes_defaults`): workers that start later are like those that are there,
and other defaults change no resource. `shell.py` asks `filled`, `pod_manifest.py` puts both together. Pure.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from shoal_protos.errors import UserError
from shoal_protos.validation import every_sentence

from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.launchers.kubernetes.section import KubernetesSection, Many

ROOT_VARIABLE = "SHOAL_CHECKPOINT_ROOT"
"""Below which a worker whose config names no path saves, in a folder of its job's name."""
NO_SECTION = "`kubernetes` is missing; launcher kubernetes needs a section with an image"
NO_IMAGE = "`kubernetes.image` is missing; name the image of the workers"


class DefaultsBody(BaseModel):
    """SHOAL_KUBERNETES_DEFAULTS."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    image: str = ""
    """Image of the workers."""
    image_pull_secrets: list[str] = []
    """Names of the secrets that it is pulled with."""
    node_selector: dict[str, str] = {}
    """Labels that a worker's node must have."""
    tolerations: Many = []
    """Taints that a worker's node may have."""
    volumes: Many = []
    """Volumes of a pod."""
    volume_mounts: Many = []
    """Where a worker finds them."""
    checkpoint_root: str = ""
    """Folder or URL below which jobs save whose config names no path."""


@dataclass(frozen=True, slots=True)
class JobDefaults:
    """The defaults of one controller."""

    section: str = ""
    """As JSON; empty: none."""

    @classmethod
    def of(cls, text: str) -> Self:
        """Those of JSON, empty for none. Raises `UserError`."""
        if not text:
            return cls()
        try:
            given = json.loads(text)
        except ValueError as error:
            raise UserError(f"SHOAL_KUBERNETES_DEFAULTS is not JSON: {error}") from None
        try:
            body = DefaultsBody.model_validate(given)
        except ValidationError as error:
            faults = error.errors(include_url=False)
            raise UserError(every_sentence(faults, "SHOAL_KUBERNETES_DEFAULTS", DefaultsBody, given)) from None
        found = {key: value for key, value in body.model_dump(exclude={"checkpoint_root"}).items() if value}
        if body.checkpoint_root:
            found["env"] = [{"name": ROOT_VARIABLE, "value": body.checkpoint_root.rstrip("/")}]
        return cls(json.dumps(found) if found else "")

    def filled(self, spec: JobSpec) -> JobSpec:
        """Return the job with these defaults. Raises `UserError` where it lacks what they do not have either."""
        if spec.launcher != "kubernetes":
            return spec
        filled = replace(spec, kubernetes_defaults=self.section)
        if not section_of(filled).image:
            raise UserError(NO_IMAGE if spec.kubernetes else NO_SECTION)
        return filled


def section_of(spec: JobSpec) -> KubernetesSection:
    """Return a job's section with the defaults that it was made with. Both were checked then."""
    given: dict[str, Any] = json.loads(spec.kubernetes or "{}")
    defaults: dict[str, Any] = json.loads(spec.kubernetes_defaults or "{}")
    own = given.get("env", [])
    named = {variable["name"] for variable in own}
    env = [*(variable for variable in defaults.get("env", []) if variable["name"] not in named), *own]
    return KubernetesSection.model_validate({**defaults, **given, **({"env": env} if env else {})})
