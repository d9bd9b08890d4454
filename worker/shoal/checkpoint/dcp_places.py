"""Where in a mapping that somebody saved the model lies, and where the optimizer's states. Pure: names and places only.

Known forms: a state dict at the top, with an optimizer and whatever else beside it (torchtitan); one under a key, as in
`{"model": …, "optimizer": …}` (Shoal, FSDP, Lightning); the same once more within one mapping (`{"app": …}`, PyTorch's
recipe). An optimizer's states are `{"state": {name: {key: …}}}`, or flat: `{"state.<name>.<key>": …}`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from shoal_protos.errors import UserError

from shoal.checkpoint.dcp_index import Index, Place, Shape

MODELS = ("model", "state_dict", "model_state_dict", "module")
"""Keys under which programs keep the model."""
OPTIMIZERS = ("optimizer", "optim")
"""Keys under which they keep the optimizer; others are found by their `param_groups`."""
STATE, GROUPS = "state", "param_groups"


@dataclass(frozen=True, slots=True)
class StoredState:
    """One state of one parameter. `stored`: its name in the index."""

    parameter: str
    key: str
    stored: str
    is_flat: bool


@dataclass(slots=True)
class FolderContents:
    """What lies in a folder, by the index's names."""

    model: dict[str, str] = field(default_factory=dict)
    """Of each tensor of the model."""
    states: list[StoredState] = field(default_factory=list)
    rates: list[str] = field(default_factory=list)
    """Of learning rates, of a group or of a parameter each."""
    left_out: list[str] = field(default_factory=list)
    """What is neither."""


def sort_places(index: Index, where: str) -> FolderContents:
    """Raises `UserError` where two models lie there, or something in the model is no tensor."""
    optimizers = _optimizers(index.places.values())
    prefixes = {name: _prefix(place, optimizers) for name, place in index.places.items()}
    tensors = [name for name in index.tensors if prefixes[name] is None]
    root = _root({index.places[name]: index.tensors[name].shape for name in tensors}, where)
    found, kept = FolderContents(), list[tuple[str, Place]]()
    for name, place in index.places.items():
        prefix = prefixes[name]
        if prefix is not None:
            kept.append((name, place[len(prefix) :]))
        elif not _is_in_model(place, root):
            found.left_out.append(name)
        elif name in index.tensors:
            _add(found.model, ".".join(place[len(root or ()) :]), name, where)
        elif root:
            raise UserError(f'{where} holds "{name}" without a tensor; expected tensors only in a model.')
        else:
            found.left_out.append(name)
    for name, rest in kept:
        _sort_state(found, name, rest)
    return found


def _optimizers(places: Iterable[Place]) -> set[Place]:
    """Of each the place of its mapping."""
    found = set[Place]()
    for place in places:
        found |= {place[:at] for at, key in enumerate(place) if _is(GROUPS, key)}
        found |= {
            place[: at + 1]
            for at, key in enumerate(place[:2])
            if key in OPTIMIZERS and len(place) > at + 1 and _is(STATE, place[at + 1])
        }
    return found


def _is(word: str, key: str) -> bool:
    """Whether a key is that word, or begins with it where the mapping is flat."""
    return key == word or key.startswith(f"{word}.")


def _prefix(place: Place, optimizers: Collection[Place]) -> Place | None:
    """The place of the optimizer's mapping that something lies in. One at the top may have other things beside it."""
    for at in range(len(place) - 1, 0, -1):
        if place[:at] in optimizers:
            return place[:at]
    return () if () in optimizers and (_is(GROUPS, place[0]) or _is(STATE, place[0])) else None


def _root(tensors: Mapping[Place, Shape], where: str) -> Place | None:
    """The place of the model's mapping; () for one at the top, None where mappings at the top are its parts.

    `tensors`: those that are in no optimizer. A lone number at the top (a loss, an epoch) is not taken for a model.
    """
    for key in MODELS:
        if any(place[0] == key and len(place) > 1 for place in tensors):
            return (key,)
    if any(shape and len(place) == 1 for place, shape in tensors.items()):
        return ()
    wrapped = dict[str, str]()
    for key in reversed(MODELS):
        wrapped |= {place[0]: key for place in tensors if len(place) > 2 and place[1] == key}
    if len(wrapped) > 1:
        listed = ", ".join(f'"{outer}.{inner}"' for outer, inner in sorted(wrapped.items()))
        raise UserError(f"{where} holds {len(wrapped)} models, {listed}; expected one. Save the one that is meant.")
    return next(iter(wrapped.items()), None)


def _is_in_model(place: Place, root: Place | None) -> bool:
    if root is None:
        return len(place) == 1 or place[0] not in OPTIMIZERS
    return place[: len(root)] == root and (len(place) > len(root) if root else len(place) == 1)


def _add(model: dict[str, str], name: str, stored: str, where: str) -> None:
    if name in model:
        raise UserError(f'{where} holds the tensor "{name}" twice, as "{model[name]}" and "{stored}".')
    model[name] = stored


def _sort_state(found: FolderContents, name: str, rest: Place) -> None:
    """`rest`: the place within the optimizer's mapping."""
    flat = rest[0].removeprefix(f"{STATE}.")
    if rest[0] == STATE and len(rest) > 2:
        found.states.append(StoredState(rest[1], ".".join(rest[2:]), name, is_flat=False))
    elif flat != rest[0] and "." in flat:
        found.states.append(StoredState(*_parted(flat, found.model), name, is_flat=True))
    elif not _is(GROUPS, rest[0]):
        found.left_out.append(name)
    elif rest[-1] == "lr" or rest[-1].endswith(".lr"):
        found.rates.append(name)


def _parted(flat: str, model: Mapping[str, str]) -> tuple[str, str]:
    """The parameter's name, and the state's key, either of which may have stops in it."""
    at = flat.rfind(".")
    while at > 0:
        if flat[:at] in model:
            return flat[:at], flat[at + 1 :]
        at = flat.rfind(".", 0, at)
    name, _, key = flat.rpartition(".")
    return name, key
