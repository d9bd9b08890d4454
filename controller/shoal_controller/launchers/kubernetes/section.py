"""The settings of pods: section `kubernetes` of a job, and what the controller's own settings tell the launcher.

Its keys are written as Kubernetes writes them, in resources, over REST and in the store: `nodeSelector`. A section
refuses unknown keys by name. What Kubernetes itself describes (tolerations, volumes, …) is passed on as it
is, and the API server checks it; what a pod of ours must have (`pod_manifest.py`) cannot be set here. `PodOptions` and
`ClusterOptions` are plain data. Imports pydantic, but no client of a cluster.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.alias_generators import to_camel

from shoal_controller.launchers.launcher import SET_IN_PODS, JoinTokens

POD_NAME = r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?"
"""Names of jobs after which pods can be named: with `-w` and five digits they are DNS labels."""

LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
OBJECT_NAME = r"(?=.{1,253}\Z)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
CLAIM_SOURCES = ("resourceClaimTemplateName", "resourceClaimName")

Json = dict[str, Any]
Many = Annotated[list[Json], Field(max_length=100)]

LONGEST_GRACE_SECONDS = 7 * 24 * 3600
LEAST_GRACE_SECONDS = 10
"""A worker gets 5 s less than its pod."""

MOST_IN_A_POD = 128

QUANTITY = r"^[0-9]+(\.[0-9]+)?([eE][0-9]+|[munkKMGTPE]i?)?$"


Amount = str | int | Annotated[float, Field(allow_inf_nan=False)]


class KubernetesResources(BaseModel):
    """What a pod asks for, and may use at most."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    requests: dict[str, Amount] = {}
    limits: dict[str, Amount] = {}


class KubernetesSection(BaseModel):
    """Settings of the pods of launcher `kubernetes`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, alias_generator=to_camel)

    image: Annotated[str, Field(max_length=1000)] = ""
    """Image of the workers. Default: the administrator's."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When the image is pulled. Default: the cluster's."""
    image_pull_secrets: Annotated[list[str], Field(max_length=20)] = []
    """Secrets that the image is pulled with: names, or `{name: NAME}` as a pod has them."""
    resources: KubernetesResources = KubernetesResources()
    """`requests` and `limits` of a pod, such as `{"limits": {"nvidia.com/gpu": 1}}`."""
    resource_claims: Annotated[list[Json], Field(max_length=32)] = []
    """Devices of a pod by dynamic resource allocation, as a pod has them: `name`, and `resourceClaimTemplateName` (a
    claim of its own for each pod) or `resourceClaimName` (one that all share). The workers' container gets them all."""
    processes_per_pod: Annotated[int, Field(ge=1, le=MOST_IN_A_POD)] = 1
    """Workers of a pod, which share its host; each is a process that sees one of the pod's devices. Default: 1."""
    node_selector: dict[str, str] = {}
    """Labels that a worker's node must have."""
    tolerations: Many = []
    """Taints that a worker's node may have."""
    affinity: Json = {}
    """Affinity of the pods."""
    topology_spread_constraints: Many = []
    """How the pods are spread."""
    volumes: Many = []
    """Volumes of a pod."""
    volume_mounts: Many = []
    """Where a worker finds them."""
    shm_size: Annotated[str, Field(pattern=QUANTITY)] | None = None
    """Size of `/dev/shm`, such as `8Gi`. Default: the cluster's, 64 MiB as a rule."""
    env: Many = []
    """Variables as Kubernetes has them, for those from secrets and config maps; others belong into the job's `env`."""
    service_account: str | None = None
    """Service account of the pods; its token is not mounted. Default: the namespace's."""
    priority_class: str | None = None
    """Priority class of the pods."""
    scheduler: str | None = None
    """Scheduler of the pods."""
    grace_seconds: Annotated[int, Field(ge=LEAST_GRACE_SECONDS, le=LONGEST_GRACE_SECONDS)] = 60
    """Grace period of a pod. Its worker's blocks are copied elsewhere within 5 s less. Default: 60."""
    run_as_user: Annotated[int, Field(ge=1)] | None = None
    """User of the workers, never root. Default: the image's, which must name one by its number."""
    fs_group: Annotated[int, Field(ge=1)] | None = None
    """Group that volumes belong to."""
    labels: dict[str, str] = {}
    """Labels of the pods besides Shoal's."""
    annotations: dict[str, str] = {}
    """Annotations of the pods."""
    gang: Literal["none", "kueue", "volcano"] = "none"
    """What starts the first `min` workers together or not at all. Default: `none`; they start as they come."""
    queue: str | None = None
    """Queue of Kueue, needed with `gang: kueue`, or of Volcano. Default with `gang: volcano`: its queue `default`."""
    pod_template: Json = {}
    """Patch of the pod for whatever is not here, as `metadata` and `spec`; containers are found by name."""

    @field_validator("image_pull_secrets", mode="before")
    @classmethod
    def _secrets_by_name(cls, given: object) -> object:
        if not isinstance(given, list):
            return given
        return [one["name"] if isinstance(one, dict) and one.keys() == {"name"} else one for one in given]

    @field_validator("env")
    @classmethod
    def _variables_that_are_not_shoals(cls, env: list[Json]) -> list[Json]:
        for index, variable in enumerate(env):
            name = variable.get("name")
            if not isinstance(name, str) or not name:
                raise ValueError(f"`kubernetes.env[{index}]` has no name; expected {{name: …, valueFrom: …}}")
            if name in SET_IN_PODS:
                raise ValueError(f"`kubernetes.env` sets {name}, which is set by Shoal itself; leave it out")
        return env

    @field_validator("resource_claims")
    @classmethod
    def _claims_of_a_pod(cls, claims: list[Json]) -> list[Json]:
        names: set[str] = set()
        for index, claim in enumerate(claims):
            if sentence := _wrong_claim(claim, names):
                raise ValueError(f"`kubernetes.resourceClaims[{index}]` {sentence}")
            names.add(claim["name"])
        return claims

    @field_validator("labels", "annotations")
    @classmethod
    def _names_that_are_not_shoals(cls, given: dict[str, str]) -> dict[str, str]:
        if own := [name for name in given if name.startswith(("shoal.dev/", "app.kubernetes.io/"))]:
            raise ValueError(f"`kubernetes` sets {', '.join(own)}, which is set by Shoal itself; leave it out")
        return given

    @field_validator("pod_template")
    @classmethod
    def _a_patch_of_a_pod(cls, patch: Json) -> Json:
        if unknown := [key for key in patch if key not in ("metadata", "spec")]:
            raise ValueError(f"`kubernetes.podTemplate` has the key {unknown[0]}; expected metadata or spec")
        for key, part in patch.items():
            if not isinstance(part, dict):
                raise ValueError(f"`kubernetes.podTemplate.{key}` is {part!r}; expected an object")
        if sentence := _misshapen(patch):
            raise ValueError(f"`kubernetes.podTemplate.{sentence}")
        return patch

    @model_validator(mode="after")
    def _a_queue_for_a_gang(self) -> Self:
        if self.gang == "kueue" and not self.queue:
            raise ValueError("`kubernetes.queue` is missing; `gang: kueue` needs the name of a queue of Kueue")
        return self


def _wrong_claim(claim: Json, taken: set[str]) -> str:
    """Return what is wrong with one of a pod's claims; empty: nothing. `taken`: the names of those before it."""
    name, sources = claim.get("name"), [key for key in CLAIM_SOURCES if claim.get(key) is not None]
    if not isinstance(name, str) or not re.fullmatch(LABEL, name):
        return f"has the name {name!r}; expected at most 63 small letters, digits and `-`, such as `gpu`"
    if name in taken:
        return f"has the name {name!r}, as another one before it; give each claim a name of its own"
    if unknown := [key for key in claim if key not in ("name", *CLAIM_SOURCES)]:
        return f"({name}) has the key {unknown[0]}; expected name and {' or '.join(CLAIM_SOURCES)}"
    if len(sources) != 1:
        found = "both" if sources else "neither"
        return f"({name}) has {found} of {' and '.join(CLAIM_SOURCES)}; expected one of them"
    source = claim[sources[0]]
    if not isinstance(source, str) or not re.fullmatch(OBJECT_NAME, source):
        return f"({name}) has {sources[0]} {source!r}; expected the name of an object of the job's namespace"
    return ""


def _misshapen(patch: Json) -> str:
    """What of a patch is not of the shape that a pod is put together from; empty: nothing. The rest the API server
    checks. ● Where it is found only when a pod is made, no pod is made and nobody is told.
    """
    body = patch.get("spec", {})
    found = {f"metadata.{key}": patch.get("metadata", {}).get(key) for key in ("labels", "annotations")}
    found["spec.securityContext"] = body.get("securityContext")
    for kind in ("containers", "initContainers"):
        containers = body.get(kind, [])
        if not isinstance(containers, list):
            return f"spec.{kind}` is {containers!r}; expected a list of containers"
        for index, container in enumerate(containers):
            name = container.get("name") if isinstance(container, dict) else None
            if not isinstance(name, str) or not name:
                return f"spec.{kind}[{index}]` has no name; expected an object with the name of a container"
            found[f"spec.{kind}[{index}].securityContext"] = container.get("securityContext")
            variables = container.get("env") or []
            if not isinstance(variables, list) or not all(isinstance(one, dict) for one in variables):
                return f"spec.{kind}[{index}].env` is {variables!r}; expected a list of variables"
    wrong = [key for key, value in found.items() if value is not None and not isinstance(value, dict)]
    return f"{wrong[0]}` is {found[wrong[0]]!r}; expected an object" if wrong else ""


def pod_faults(job: str, _: KubernetesSection | None) -> Iterator[str]:
    """Yield a sentence for each reason why a job's name makes no pods."""
    if not re.fullmatch(POD_NAME, job):
        yield (
            f"`job` is {job!r}; pods are named after their job: expected at most 52 small letters, digits and `-`, a "
            "letter or digit first and last"
        )


@dataclass(frozen=True, slots=True)
class PodOptions:
    """What all jobs' pods get."""

    controllers: Callable[[], Sequence[str]]
    """`HOST:PORT` of the controllers, as pods reach them."""
    tokens: JoinTokens | None = None
    """What makes the join tokens; None: workers need none."""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Which cluster it is, and what is looked at there."""

    kubeconfig: str = ""
    """Empty: the cluster that this process runs in."""
    namespace: str = ""
    """Empty: this process's own, or the kubeconfig's."""
    nodes: bool = True
    """Whether nodes may be read. Without them no taint, cordon or vanished node is seen."""
    taints: tuple[str, ...] = ()
    """Taints of nodes that are to go, besides those that are known."""
