"""Random numbers of a micro-batch: the same on every worker, and independent of what ran before in the process.

Every generator that a dataset or a model may use (torch on the CPU and on accelerators, `random`, numpy's own) is
seeded from (seed, step, lane, micro-batch) by a hash, so that neighbours have nothing in common. The loop gets its
batch under that seed.

A loop's body that draws on one worker only (an evaluation on rank 0) would shift the model's random numbers there; so
`ForwardSeed` seeds anew when the first forward of a micro-batch begins, and when the first one without gradients does.
Later forwards go on from there. It hooks every part of the module, because scripts call parts too, from the yield to
the first forward, so that a forward itself runs without hooks. Called by the engine; evaluation.py removes it
meanwhile, and loop_guards.py has it refuse forwards before the loop.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, cast
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy
import torch
from shoal_protos.errors import UserError
from torch import nn

from shoal.process.compiler import is_in_compiled_module, uncompiled
from shoal.process.device import accelerators_random_state, restore_accelerators_random_state, seed_accelerators

WORDS = struct.Struct("<3QI4x")
"""For torch, accelerators and `random`, and a short one for numpy, which takes six times as long with a longer one."""


def seed_everything(seed: int, step: int, lane: int, micro: int, *, purpose: str = "") -> None:
    """Seed all generators for one micro-batch, or for one purpose in it."""
    seed_from(f"{seed} {step} {lane} {micro} {purpose}".rstrip())


def seed_from(place: str) -> None:
    """Seed all generators by a text that names what they are for."""
    digest = hashlib.blake2b(place.encode(), digest_size=32, person=b"shoal.seeds").digest()
    *words, short = WORDS.unpack(digest)
    torch.default_generator.manual_seed(words[0])
    seed_accelerators(words[1])
    random.seed(words[2])
    numpy.random.seed(short)


@dataclass(frozen=True, slots=True)
class RandomState:
    """Where all generators of this process stand."""

    cpu: torch.Tensor
    accelerators: tuple[torch.Tensor, ...]
    """One a device; empty where none is in use."""
    python: tuple[Any, ...]
    numpy: Any

    @classmethod
    def save(cls) -> RandomState:
        return cls(torch.get_rng_state(), accelerators_random_state(), random.getstate(), numpy.random.get_state())

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.accelerators:
            restore_accelerators_random_state(self.accelerators)
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)

    def is_here(self) -> bool:
        """Whether all generators stand there still."""
        now = RandomState.save()
        tensors = zip((self.cpu, *self.accelerators), (now.cpu, *now.accelerators), strict=True)
        is_numpys = all(map(numpy.array_equal, self.numpy, now.numpy))
        return all(torch.equal(*pair) for pair in tensors) and self.python == now.python and is_numpys


Hooks = OrderedDict[str, Any]

HOOK = "shoal.forward_seed"
"""Its name among a module's hooks."""

_PRE_HOOKS = attrgetter("_forward_pre_hooks")
_OWNERS: WeakKeyDictionary[nn.Module, ReferenceType[ForwardSeed]] = WeakKeyDictionary()


class ForwardSeed:
    """Seeding before the forwards of one engine's module and its parts."""

    def __init__(self, module: nn.Module, seed: int) -> None:
        self._seed = seed
        self._place = (0, 0, 0)
        self._parts = list(module.modules())
        self._entrances = {module, getattr(module, "_orig_mod", module)}
        self._waiting: list[nn.Module] = []
        """The parts that have the hook now."""
        self._seeded_without_gradients = False
        self._refusal = ""
        self.begun = False
        """Whether a forward of the micro-batch at hand has begun, as far as hooks tell."""
        for part in self._parts:
            _OWNERS[part] = ref(self)

    def arm(self, step: int, lane: int, micro: int) -> None:
        """The loop gets this micro-batch."""
        self._place, self._seeded_without_gradients, self.begun = (step, lane, micro), False, False
        self._wait_at(self._parts)

    def refuse(self, why: str) -> None:
        """There is no micro-batch yet: until `disarm` a forward raises `UserError` with this sentence."""
        self._refusal = why
        self._wait_at(self._parts)

    def disarm(self) -> None:
        """The micro-batch is over."""
        self._refusal = ""
        self._wait_at([])

    @contextmanager
    def away(self) -> Iterator[None]:
        """A context in which forwards do not belong to the micro-batch."""
        waiting = self._waiting
        self._wait_at([])
        try:
            yield
        finally:
            self._wait_at(waiting)

    def _wait_at(self, parts: list[nn.Module]) -> None:
        hooks: Hooks
        for hooks in map(_PRE_HOOKS, self._waiting):
            hooks.pop(HOOK, None)
        self._waiting = parts
        for hooks in map(_PRE_HOOKS, parts):
            hooks[HOOK] = begin_forward
            if len(hooks) > 1:
                hooks.move_to_end(HOOK, last=False)  # hooks of the script may draw

    def begin(self, part: nn.Module) -> None:
        """A forward of `part` begins. Without gradients the first one with them is still to come: it is waited for
        where it most likely begins.
        """
        if self._refusal:
            raise UserError(self._refusal)
        if torch.is_grad_enabled():
            self._wait_at([])
            self.begun = True
            seed_everything(self._seed, *self._place, purpose="forward")
        elif not self._seeded_without_gradients:
            if _is_compiled(part):
                self._wait_at([other for other in self._parts if other in self._entrances or other is part])
            self._seeded_without_gradients = True
            seed_everything(self._seed, *self._place, purpose="forward without gradients")


@partial(
    uncompiled,
    reason="shoal seeds the random numbers before a forward: compile the module rather than a function that calls it, "
    "or leave fullgraph out",
)
def begin_forward(part: nn.Module, _: object) -> None:
    """The hook, which compilers call and do not trace. A function, because modules are copied and pickled with their
    hooks.
    """
    owner = _OWNERS[part]() if part in _OWNERS else None
    if owner is None:
        cast("Hooks", part._forward_pre_hooks).pop(HOOK, None)  # a copy, made while the hook was there
    else:
        owner.begin(part)


def _is_compiled(part: nn.Module) -> bool:
    """Whether this call enters a compiled module; the compiler looks at the hooks of all parts then."""
    return part._compiled_call_impl is not None or is_in_compiled_module()
