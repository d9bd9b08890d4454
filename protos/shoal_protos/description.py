"""What must be equal in all workers of a job, and the first difference between two of them in one sentence.

A worker states it in its hello; the job takes the first one it hears and refuses others. The model's parameters, which
may be thousands, a hello only names by a digest; their text is asked for where it is not known. Pure: standard library
only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from enum import StrEnum

from shoal_protos.corruption import OnCorruption
from shoal_protos.plan import DEFAULT_MIRROR_PARTNERS, OMITTED
from shoal_protos.runs import Runs
from shoal_protos.shape import ONE, Shape

HIGHEST_STAGE = 3


class OnSlow(StrEnum):
    """`shoal.on_slow`: what follows where a worker takes longer for a lane than the others."""

    SHARE = "share"
    NAME = "name"
    REPLACE = "replace"


ROUNDS_FROM_STAGE = 2
"""From this stage of ZeRO on, lanes are shared out and added up in rounds."""
ANSWER = "Start it with the job's script and config."
GIVEN_FIELDS = ("lanes", "mirrors", "max_steps")
"""What must agree whatever the model is, besides the optimizer."""
MODEL_FIELDS = ("block_elements", "blocks", "state_bytes", "homes", "models")
"""What follows from the model: where parameters are not known to agree, the first one that differs says more."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the model, in the layout's order. Frozen ones have no blocks and are listed too."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int
    """Index of its optimizer group; -1: frozen."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a job is made of, as far as the controller and other workers need it."""

    lanes: int
    blocks: int
    block_elements: int
    state_bytes: int
    """Bytes of one block's state: what a fill sends. The optimizer's, master weights, and where they are sharded the
    parameters."""
    mirrors: int
    """Copies wanted beside the owner's; `EVERYONE` in stage 0."""
    fill_bytes_per_step: int
    """0: the planner decides."""
    max_steps: int
    """The step at which the job ends; 0: where its scripts do."""
    parameters: tuple[Parameter, ...]
    """Empty where only their digest is given."""
    optimizer: str
    """Class name."""
    config: Mapping[str, str]
    """Every training key that must agree, dotted, with its value as text (`zero_optimization.stage` → `1`)."""
    numerics: Mapping[str, str]
    """Numeric identity: versions, device, CPU capability, threads, flags, `MKL_`, `DNNL_`, `ATEN_` variables."""
    mixed_numerics: bool
    can_checkpoint: bool
    keep: int = 0
    """How many of the newest checkpoints stay."""
    keep_every: int = 0
    """Checkpoints of every so many steps stay; 0: none for that."""
    samples_per_step: int = 0
    """The global batch."""
    mirror_partners: int = DEFAULT_MIRROR_PARTNERS
    """Among how many others the mirrors of one owner's blocks are spread."""
    on_corruption: OnCorruption = OnCorruption.RESTORE
    on_slow: OnSlow = OnSlow.SHARE
    """What the first worker says holds: it changes no bit."""
    checkpoint_places: tuple[str, ...] = ()
    """Where the job's checkpoints lie: the URL of `checkpoint.path`, and of a path that the config's `resume` names."""
    checkpoint_marks: tuple[str, ...] = ()
    """Names of files that it sees at `checkpoint.path`: by them workers know that they see the same place."""
    parameters_digest: str = ""
    """Of the parameters; empty: not given, or there are none."""
    peers: int = 0
    """Number of the form in which workers exchange state; 0: from before it had one."""
    stage: int = 0
    """ZeRO's: 1 shards optimizer state, 2 gradients too, 3 parameters too."""
    min_workers: int = 0
    """Fewest workers that the config is for (`elasticity`); 0: it does not say. What the first worker says holds."""
    max_workers: int = 0
    """Most workers, likewise."""
    cell: Shape = field(default=ONE, metadata=OMITTED)
    """What a cell of the job is: how many processes train a lane together."""
    homes: tuple[Runs, ...] = field(default=(), metadata=OMITTED)
    """By coordinate, the blocks that only its members own and mirror; empty where a cell is one process."""
    models: tuple[Runs, ...] = field(default=(), metadata=OMITTED)
    """By coordinate, the blocks whose parameters its model has: its home, and those that it has in common with others,
    wherever they are at home. Empty where a cell is one process."""

    @property
    def most_members(self) -> int:
        """So many workers can train at once."""
        return self.cell.most_members(self.lanes)

    @property
    def adds_by_rounds(self) -> bool:
        """Whether a lane's gradient goes to the owners at once, who add up round by round."""
        return self.stage >= ROUNDS_FROM_STAGE

    @property
    def shards_parameters(self) -> bool:
        """Whether a block's parameters are with its owner and mirrors only: a part of its state, handed to nobody."""
        return self.stage >= 3

    @property
    def saves_to(self) -> str:
        """Where checkpoints are saved, resolved; empty: nowhere."""
        return self.checkpoint_places[0] if self.can_checkpoint and self.checkpoint_places else ""

    @property
    def is_brief(self) -> bool:
        """Whether it names parameters without telling them."""
        return bool(self.parameters_digest) and not self.parameters


def with_digest(description: Description) -> Description:
    """One that tells its parameters, with their digest."""
    parameters = description.parameters
    return replace(description, parameters_digest=parameters_digest(parameters) if parameters else "")


def brief(description: Description) -> Description:
    """The same without the text of its parameters."""
    return replace(with_digest(description), parameters=())


def parameters_digest(parameters: Sequence[Parameter]) -> str:
    """SHA-256 of names, shapes, dtypes and groups, in their order."""
    return hashlib.sha256(json.dumps([astuple(parameter) for parameter in parameters]).encode()).hexdigest()


def first_difference(worker: str, theirs: Description, jobs: Description) -> str | None:
    """The sentence that refuses `worker`, or None where it may join. A brief one says nothing of its parameters: where
    they are not the job's, the text that is asked for decides about all that follows from them.
    """
    untold = theirs.is_brief and theirs.parameters_digest != jobs.parameters_digest
    return (
        shapes_differ(worker, theirs.cell, jobs.cell)  # another model follows from it
        or (None if theirs.is_brief else _parameters_differ(worker, theirs, jobs))
        or _fields_differ(worker, theirs, jobs, ("optimizer",))  # what its groups are given follows from it
        or _texts_differ(worker, "another config", theirs.config, jobs.config)
        or _fields_differ(worker, theirs, jobs, GIVEN_FIELDS if untold else (*GIVEN_FIELDS, *MODEL_FIELDS))
        or (None if jobs.mixed_numerics else numerics_differ(worker, theirs, jobs))
    )


def numerics_differ(worker: str, theirs: Description, jobs: Description) -> str | None:
    """The first difference between two numeric identities, by name; such workers give other bits."""
    kinds = [{"device": one.numerics.get("device", "not set")} for one in (theirs, jobs)]  # what else differs follows
    return _texts_differ(worker, "another numeric identity", *kinds) or _texts_differ(
        worker, "another numeric identity", theirs.numerics, jobs.numerics
    )


def shapes_differ(worker: str, theirs: Shape, jobs: Shape) -> str | None:
    """The sentence that refuses a worker whose cells are not the job's, or None where they are."""
    if theirs == jobs:
        return None
    return f"worker {worker} joined with cells of another shape: {theirs}; the job's is {jobs}. {ANSWER}"


def _parameters_differ(worker: str, theirs: Description, jobs: Description) -> str | None:
    opening = f"worker {worker} joined with another model: "
    for mine, wanted in zip(theirs.parameters, jobs.parameters, strict=False):
        if mine.name != wanted.name:
            return f'{opening}parameter "{mine.name}" is where the job\'s has "{wanted.name}". {ANSWER}'
        for trait in ("shape", "dtype"):
            if getattr(mine, trait) != getattr(wanted, trait):
                found, expected = getattr(mine, trait), getattr(wanted, trait)
                return f'{opening}parameter "{mine.name}" has {trait} {found}, the job\'s has {expected}. {ANSWER}'
        if mine.group != wanted.group:
            group = [f"optimizer group {g}" if g >= 0 else "no optimizer group" for g in (mine.group, wanted.group)]
            return f'{opening}parameter "{mine.name}" is in {group[0]}, the job\'s in {group[1]}. {ANSWER}'
    if len(theirs.parameters) != len(jobs.parameters):
        longer = max(theirs.parameters, jobs.parameters, key=len)
        extra = longer[min(len(theirs.parameters), len(jobs.parameters))].name
        found, expected = len(theirs.parameters), len(jobs.parameters)
        whose = "only it has" if longer is theirs.parameters else "it lacks"
        return f'{opening}it has {found} parameters, the job\'s has {expected}; {whose} "{extra}". {ANSWER}'
    return None


def _texts_differ(worker: str, difference: str, theirs: Mapping[str, str], jobs: Mapping[str, str]) -> str | None:
    """Keys of the config come before what is named in words, which follows from them: buffers have their precision."""
    for key in sorted(theirs.keys() | jobs.keys(), key=lambda key: (" " in key, key)):
        found, expected = theirs.get(key, "not set"), jobs.get(key, "not set")
        if found != expected:
            return f"worker {worker} joined with {difference}: {key} is {found}, the job's is {expected}. {ANSWER}"
    return None


def _fields_differ(worker: str, theirs: Description, jobs: Description, fields: Iterable[str]) -> str | None:
    for name in fields:
        found, expected = getattr(theirs, name), getattr(jobs, name)
        if found != expected:
            return f"worker {worker} joined with another job: {name} is {found}, the job's is {expected}. {ANSWER}"
    return None
