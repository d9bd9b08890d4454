"""What goes over REST: the bodies that are accepted. pydantic only, so that the command can use it without a server.

Unknown keys are refused, types are not guessed ("3" is not a number), defaults are filled in. The sentences for what is
wrong are made by `shoal_protos.validation`. What is answered is in `answers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from shoal_protos.acts import GRACE_SECONDS, Act, DrainWorker, OperatorRequest, Scale
from shoal_protos.memory_estimate import MOST_LANES
from shoal_protos.shape import DIMENSIONS, MOST_PROCESSES, ONE, Shape, broken_shape
from shoal_protos.validation import MOST_READ, Allowed, Unshown, raise_all, wrong_value

from shoal_controller.api.strict import surrogate_faults
from shoal_controller.core.machine.job_size import JobSize, broken_spares
from shoal_controller.core.machine.spec import NO_LAUNCHER, JobSpec, LauncherKind, WorkerBounds, traits_of
from shoal_controller.launchers.kubernetes.job_defaults import section_of
from shoal_controller.launchers.kubernetes.section import KubernetesSection
from shoal_controller.launchers.launcher import SET_BY_SHOAL
from shoal_controller.launchers.registry import LAUNCHERS

MOST_WORKERS = 4096
LEAST_SECONDS = 0.01
LONGEST_SECONDS = 7 * 24 * 3600.0
HIDDEN = "***"
"""In place of a value that the caller may not read."""

Workers = Annotated[int, Field(ge=1, le=MOST_WORKERS)]
HOW_MANY = Allowed(f"a whole number from 1 to {MOST_WORKERS}")
Spares = Annotated[int, Field(ge=0, le=MOST_WORKERS)]
HOW_MANY_SPARES = Allowed(f"a whole number from 0 to {MOST_WORKERS}")
Seconds = Annotated[float, Field(ge=LEAST_SECONDS, le=LONGEST_SECONDS, allow_inf_nan=False)]


class Body(BaseModel):
    """What all bodies have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _nothing_but_text(cls, given: object) -> object:
        """JSON can escape half of a surrogate pair, which can neither be stored nor sent; pydantic lets it pass."""
        raise_all(islice(surrogate_faults(given), MOST_READ))
        return given


class WorkersBody(Body):
    """How many workers a job has: `min` ≤ `wanted` ≤ `max`."""

    wanted: Annotated[Workers | None, HOW_MANY] = None
    """Number of workers. Default: the number of CUDA devices on the controller's machine, else 2."""
    min: Annotated[Workers | None, HOW_MANY] = None
    """Fewest workers to train with. Default: `elasticity.min_gpus` of the training config, else 1."""
    max: Annotated[Workers | None, HOW_MANY] = None
    """Most workers to scale to. Default: `elasticity.max_gpus` of the training config, else the number of lanes."""
    spares: Annotated[Spares, HOW_MANY_SPARES] = 0
    """Workers beyond `wanted` that mirror state and train as soon as another one is lost. Default: 0."""
    spares_train: bool | None = None
    """Whether spares train meanwhile. Default: if the job has at least four lanes for each of its workers."""


CellSize = Annotated[int, Field(ge=1, le=MOST_PROCESSES), Allowed(f"a whole number from 1 to {MOST_PROCESSES}")]


class CellBody(Body):
    """What the cells of a job are: how many processes train a lane together. The number of cells is elastic."""

    tensor: CellSize = 1
    """Processes of a cell that divide the layers among them (tensor parallelism)."""
    pipeline: CellSize = 1
    """Stages of a cell's pipeline."""
    context: CellSize = 1
    """Processes of a cell that divide the sequences among them."""
    expert: CellSize = 1
    """Processes of a cell that divide the experts among them."""
    tight: Annotated[
        list[Literal["pipeline", "expert", "context", "tensor"]],
        Field(max_length=len(DIMENSIONS)),
        Allowed(f"a list of {', '.join(DIMENSIONS)}"),
    ] = []
    """Dimensions within which the processes of a cell share a host."""

    @property
    def shape(self) -> Shape:
        """The shape that these are of."""
        return Shape(self.tensor, self.pipeline, self.context, self.expert, tuple(self.tight))


class JobBody(Body):
    """A job specification: the body of `POST /v1/jobs`, and `job.yaml`."""

    job: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"),
        Allowed("at most 63 letters, digits, `.`, `_` and `-`, a letter or digit first"),
    ]
    """Name of the job: at most 63 letters, digits, `.`, `_` and `-`, a letter or digit first."""
    workers: WorkersBody = WorkersBody()
    """Numbers of workers."""
    launcher: LauncherKind = NO_LAUNCHER
    """Launcher that starts the workers. Default: `none`; they join by themselves (`shoal worker`)."""
    command: Annotated[list[str], Field(max_length=1000)] = []
    """Program and arguments that a launched worker runs."""
    env: Annotated[dict[str, str], Field(max_length=1000), Unshown()] = {}
    """Environment variables of launched workers, added to the controller's."""
    heartbeat_seconds: Seconds = 1.0
    """Heartbeat interval. Default: 1."""
    suspect_after: Annotated[int, Field(ge=1, le=1000)] = 3
    """Missed heartbeats after which a worker is asked directly, and then evicted. Default: 3."""
    reconnect_seconds: Seconds = 10.0
    """Time that silent workers have to reconnect after a controller's start. Default: 10."""
    progress_seconds: Seconds = 10.0
    """Time without a vote (at least ten median steps) after which a broken link is looked for. Default: 10."""
    stall_seconds: Seconds = 1800.0
    """Limit of waits that have no other limit. Default: 1800."""
    max_restarts: Annotated[int, Field(ge=0, le=1_000_000)] = 3
    """Failed generations that a job survives without a committed step beyond the failure; ten times as many if a signal
    killed the worker. Default: 3."""
    resume: bool | int | str | None = None
    """Checkpoint to resume from: `"latest"`, a step, a path, or false. Default: the training config's."""
    lanes: Annotated[int, Field(ge=1, le=MOST_LANES)] | None = None
    """Number of lanes that the training config must have. Default: any."""
    cell: CellBody | None = None
    """Shape of the job's cells; workers whose config has another one are refused. Default: as the first worker's config
    says."""
    kubernetes: KubernetesSection | None = None
    """Settings of the pods of launcher `kubernetes`."""

    @field_validator("resume", mode="before")
    @classmethod
    def _a_checkpoint_or_none(cls, resume: object) -> object:
        step = isinstance(resume, int) and not isinstance(resume, bool) and resume >= 0
        if resume is None or resume is False or step or (isinstance(resume, str) and resume):
            return resume
        raise ValueError(wrong_value("resume", resume, '"latest", a step, a path, or false'))

    @field_validator("command")
    @classmethod
    def _a_command_for_the_system(cls, command: list[str]) -> list[str]:
        raise_all(fault for index, word in enumerate(command) for fault in _text_faults(f"`command[{index}]`", word))
        return command

    @field_validator("env")
    @classmethod
    def _an_env_for_the_system(cls, env: dict[str, str]) -> dict[str, str]:
        raise_all(fault for name, value in env.items() for fault in _variable_faults(name, value))
        return env

    @model_validator(mode="after")
    def _what_fits_together(self) -> Self:
        raise_all((*self._size_faults(), *self._launcher_faults(), *self._section_faults()))
        return self

    def _size_faults(self) -> Iterator[str]:
        cell = self.shape or ONE
        if why := broken_shape(cell):
            yield f"`cell` cannot be so: {why}"
            return
        useful = cell.most_members(self.lanes) if self.lanes is not None else None
        least, most = self.workers.min or self._whole, self.workers.max or useful
        whose = "workers.max" if self.workers.max else "lanes"
        wanted = self.workers.wanted
        if most is not None and least > most:
            yield f"`workers.min` is {least}; expected {self._whole} to {most} (`{whose}`)"
        elif wanted is not None and (wanted < least or (most is not None and wanted > most)):
            upper = f"{most} (`{whose}`)" if most is not None else "the job's lanes"
            named = [key for key, processes in self._wholes.items() if processes > 1]
            lower = "`workers.min`" if self.workers.min or not named else " and ".join(f"`{key}`" for key in named)
            yield f"`workers.wanted` is {wanted}; expected {least} ({lower}) to {upper}"
        if useful is not None and self.workers.max is not None and self.workers.max > useful:
            each = "worker" if cell == ONE else f"cell of {cell.processes} processes"
            hint = ", or `cell` where several workers train a lane together" if self.cell is None else ""
            yield (
                f"`workers.max` is {self.workers.max}, but `lanes` is {self.lanes} and every {each} trains at least "
                f"one lane; expected {least} to {useful}{hint}"
            )
        size = JobSize(
            self.job, wanted or least, WorkerBounds(least, most), self.lanes, cell,
            self._wholes["kubernetes.processesPerPod"], self.workers.spares,
        )  # fmt: skip
        if why := broken_spares(size):
            yield f"`workers.spares` is {self.workers.spares}: {why.removesuffix('.')}"
        for key, processes in self._wholes.items():
            for name, bound in (("min", self.workers.min), ("max", self.workers.max)):
                if bound is not None and bound % processes:
                    whole = "a cell" if key == "cell" else "a pod"
                    yield (
                        f"`workers.{name}` is {bound}, but {whole} has {processes} processes (`{key}`); expected a "
                        f"multiple of {processes}"
                    )

    @property
    def shape(self) -> Shape | None:
        """Of its cells, where it says one."""
        return self.cell.shape if self.cell is not None else None

    @property
    def _wholes(self) -> dict[str, int]:
        """Processes of what the bounds count in whole ones, by the key that says so: cells and pods."""
        in_a_pod = self.kubernetes.processes_per_pod if self.kubernetes is not None else 1
        return {"cell": (self.shape or ONE).processes, "kubernetes.processesPerPod": in_a_pod}

    @property
    def _whole(self) -> int:
        """The fewest workers that are whole cells in whole pods."""
        return math.lcm(*self._wholes.values())

    def _launcher_faults(self) -> Iterator[str]:
        starts = traits_of(self.launcher).starts
        if starts and not self.command:
            yield (
                f"`command` is missing; launcher {self.launcher} needs the command of each worker, such as "
                "[python, train.py]"
            )
        if not starts and (self.command or self.env):
            given = "command" if self.command else "env"
            yield f"`{given}` is given, but `launcher` is {self.launcher} and starts nothing; set `launcher` to local"

    def _section_faults(self) -> Iterator[str]:
        """What the job's launcher needs, and sections that only another one takes."""
        for kind, launcher in LAUNCHERS.items():
            section = getattr(self, kind, None)
            if kind == self.launcher:
                yield from launcher.faults(self.job, section)
            elif section is not None:
                yield f"`{kind}` is given, but `launcher` is {self.launcher}; leave the section out"

    def spec(self, default_wanted: int) -> JobSpec:
        """The specification with its defaults filled in."""
        cell, whole = self.shape or ONE, self._whole
        most = self.workers.max or (cell.most_members(self.lanes) if self.lanes is not None else None)
        by_default = min(default_wanted, most or default_wanted)
        wanted = self.workers.wanted or max(self.workers.min or whole, by_default - by_default % whole)
        section = self.kubernetes.model_dump_json(exclude_unset=True, by_alias=True) if self.kubernetes else ""
        return JobSpec(
            job=self.job, wanted=wanted, wanted_by_default=self.workers.wanted is None,
            min_workers=self.workers.min, max_workers=self.workers.max,
            launcher=self.launcher, command=tuple(self.command), env=dict(self.env), lanes=self.lanes,
            heartbeat_seconds=self.heartbeat_seconds, suspect_after=self.suspect_after,
            reconnect_seconds=self.reconnect_seconds, progress_seconds=self.progress_seconds,
            stall_seconds=self.stall_seconds, max_restarts=self.max_restarts, resume=self.resume,
            kubernetes=section, cell=self.shape, started_together=self._wholes["kubernetes.processesPerPod"],
            spares=self.workers.spares, spares_train=self.workers.spares_train,
        )  # fmt: skip


def body_of(spec: JobSpec, shows_values: bool) -> dict[str, object]:
    """The body that asks for this very job: the inverse of `JobBody.spec`. `shows_values`: else the values of
    variables, which may be secrets, are left out.
    """
    section = section_of(spec) if spec.kubernetes or spec.kubernetes_defaults else None
    wanted = None if spec.wanted_by_default else spec.wanted
    workers = WorkersBody.model_construct(
        wanted=wanted, min=spec.min_workers, max=spec.max_workers, spares=spec.spares, spares_train=spec.spares_train
    )
    body = JobBody.model_construct(
        job=spec.job, workers=workers,
        launcher=spec.launcher, command=list(spec.command), env=dict(spec.env), lanes=spec.lanes,
        heartbeat_seconds=spec.heartbeat_seconds, suspect_after=spec.suspect_after,
        reconnect_seconds=spec.reconnect_seconds, progress_seconds=spec.progress_seconds,
        stall_seconds=spec.stall_seconds, max_restarts=spec.max_restarts, resume=spec.resume, kubernetes=section,
        cell=CellBody(**asdict(spec.cell) | {"tight": list(spec.cell.tight)}) if spec.cell is not None else None,
    ).model_dump(mode="json", by_alias=True)  # fmt: skip
    if not shows_values:
        body["env"] = dict.fromkeys(spec.env, HIDDEN)
        body["kubernetes"] = _without_values(body["kubernetes"])
    return body


def _without_values(part: Any) -> Any:
    """Whatever has a name and a value, as a variable of a pod, keeps its name."""
    if isinstance(part, list):
        return [_without_values(one) for one in part]
    if not isinstance(part, dict):
        return part
    hidden = {"value": HIDDEN} if "name" in part and "value" in part else {}
    return {name: _without_values(one) for name, one in part.items()} | hidden


class ScaleBody(Body):
    """The body of `POST /v1/jobs/{job}/scale`: one of its keys at least."""

    workers: Annotated[Workers | None, HOW_MANY] = None
    """New number of workers. Default: as it is."""
    min: Annotated[Workers | None, HOW_MANY] = None
    """New fewest workers to train with. Default: as it is."""
    max: Annotated[Workers | None, HOW_MANY] = None
    """New most workers to scale to. Default: as it is."""
    spares: Annotated[Spares | None, HOW_MANY_SPARES] = None
    """New number of spares. Default: as it is."""

    @model_validator(mode="after")
    def _something_to_change(self) -> Self:
        if self.workers is None and self.min is None and self.max is None and self.spares is None:
            raise ValueError(
                f"`workers`, `min`, `max` and `spares` are missing; expected one of them at least, {HOW_MANY.text}"
            )
        return self


class DrainBody(Body):
    """The body of `POST /v1/jobs/{job}/workers/{worker}/drain`."""

    grace_seconds: Annotated[float, Field(ge=0, le=LONGEST_SECONDS, allow_inf_nan=False)] = GRACE_SECONDS
    """Time in which the worker's blocks may be copied elsewhere. Default: 30."""
    why: Annotated[str, Field(max_length=200)] = ""
    """Reason for the drain, shown in the job's history. Default: none."""


def _asked_scale(body: ScaleBody) -> Scale:
    return Scale(body.workers, body.min, body.max, body.spares)


def _asked_drain(worker: str, body: DrainBody | None = None) -> DrainWorker:
    return DrainWorker(worker, **dict(body or DrainBody()))


WITH_BODIES: dict[Act, tuple[type[Body], Callable[..., OperatorRequest]]] = {
    Act.SCALE: (ScaleBody, _asked_scale), Act.DRAIN: (DrainBody, _asked_drain),
}  # fmt: skip
"""The acts that have a body, and what makes the request of it and of what the path names."""


def _variable_faults(name: str, value: str) -> Iterator[str]:
    """What a process cannot have in its environment."""
    if not name or "=" in name:
        shown = name.partition("=")[0]
        yield (
            f"`env` has a variable named {shown + '=…' if name else name!r}; expected a name that is not empty and has "
            "no ="
        )
    elif name in SET_BY_SHOAL:
        yield f"`env.{name}` is set by Shoal itself; leave it out"
    elif faults := list(_text_faults("a name in `env`", name)):
        yield from faults
    else:
        yield from _text_faults(f"`env.{name}`", value)


def _text_faults(key: str, text: str) -> Iterator[str]:
    """What a process cannot be started with."""
    if "\0" in text:
        yield f"{key} has a NUL character, which cannot be passed to a process"
