"""What an administrator has set for the pods of all jobs: the defaults of their section `kubernetes`.

A key that a job's own section has replaces the default, lists too; of `env` each variable does, and with a default's
volume go its mounts. A job keeps the
defaults that it was made with (`JobSpec.kubernetes_defaults`): workers that start later are like those that are there,
and other defaults change no resource. `shell.py` asks `filled`, `pod_manifest.py` puts both together. Pure.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel
from shoal_protos.errors import UserError
from shoal_protos.text import shown
from shoal_protos.validation import all_of, every_sentence, sentence

from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.launchers.kubernetes.section import Json, KubernetesSection, Many

NAME = "SHOAL_KUBERNETES_DEFAULTS"
ROOT_VARIABLE = "SHOAL_CHECKPOINT_ROOT"
"""Below which a worker whose config names no path saves, in a folder of its job's name."""
NO_SECTION = "`kubernetes` is missing; launcher kubernetes needs a section with an image"
NO_IMAGE = "`kubernetes.image` is missing; name the image of the workers"


class DefaultsBody(BaseModel):
    """SHOAL_KUBERNETES_DEFAULTS."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, alias_generator=to_camel
    )

    image: str = ""
    """Image of the workers."""
    image_pull_secrets: list[str | dict[str, str]] = []
    """Secrets that it is pulled with: names, or `{name: NAME}`."""
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
            body = DefaultsBody.model_validate_json(text)
            given = body.model_dump(exclude={"checkpoint_root"}, by_alias=True)
            found = {key: value for key, value in given.items() if value}
            KubernetesSection.model_validate(found)
        except ValidationError as error:
            raise UserError(every_sentence(error.errors(include_url=False), NAME, DefaultsBody)) from None
        if body.checkpoint_root:
            root = body.checkpoint_root.rstrip("/") or "/"
            if root.endswith(":"):
                raise UserError(
                    f"`checkpointRoot` is {shown(body.checkpoint_root)} in {NAME}; expected a folder or URL"
                )
            found["env"] = [{"name": ROOT_VARIABLE, "value": root}]
        return cls(json.dumps(found) if found else "")

    def filled(self, spec: JobSpec) -> JobSpec:
        """Return the job with these defaults. Raises `UserError` where it lacks what they do not have either."""
        if spec.launcher != "kubernetes":
            return spec
        filled = replace(spec, kubernetes_defaults=self.section)
        try:
            section = section_of(filled)
        except ValidationError as error:
            faults = [sentence(one, spec.job, KubernetesSection, "kubernetes") for one in error.errors()]
            raise UserError(f"with the administrator's defaults, {all_of(faults, 'the job')}") from None
        if not section.image:
            raise UserError(NO_IMAGE if spec.kubernetes else NO_SECTION)
        return filled


def section_of(spec: JobSpec) -> KubernetesSection:
    """Return a job's section with the defaults that it was made with. Both were checked then."""
    given: Json = json.loads(spec.kubernetes or "{}")
    defaults: Json = json.loads(spec.kubernetes_defaults or "{}")
    own = given.get("env", [])
    named = {variable["name"] for variable in own}
    env = [*(variable for variable in defaults.get("env", []) if variable["name"] not in named), *own]
    if "volumeMounts" in defaults:
        defaults = defaults | {"volumeMounts": _mounts_left(defaults, given)}
    return KubernetesSection.model_validate({**defaults, **given, **({"env": env} if env else {})})


def _mounts_left(defaults: Json, given: Json) -> list[Json]:
    """Return the defaults' mounts, without those of their volumes that are gone as the job has its own."""
    before, after = ([one.get("name") for one in part.get("volumes", [])] for part in (defaults, defaults | given))
    mounts = defaults.get("volumeMounts", [])
    return [one for one in mounts if one.get("name") not in before or one.get("name") in after]
