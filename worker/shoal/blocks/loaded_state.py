"""The state that the user's optimizer has already when training begins: made when constructed, loaded by the script, or
imported with the model.

And what state an optimizer makes at all, found by one update of a twin of it. Called by the held blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn

from shoal.core.layout import Bucket, Layout, Slot, Stretch
from shoal.core.misses import USED_ALWAYS, Missed, Misses
from shoal.optim.several import member_of, members_of, own_state_of
from shoal.optim.state_form import carried, is_packed
from shoal.optim.twin import StepEffects, probing_twin_of, without_hooks_on_all

State = dict[str, Tensor]  # each (elements,), or () where all its blocks share one number
"""Optimizer state of a stretch of blocks, by the optimizer's own keys; and its master weights where it has such."""
MASTER = "master"
"""The key of master weights."""
WEIGHTS = "weights"
"""The key of parameters, where a block's are with its state and nowhere else."""
AVERAGE = "average of weights"
"""The key of a block's average, once there is any: in the wide dtype of its bucket, beside the optimizer's state."""


def counts_in_gaps(key: str, keys: Iterable[str]) -> bool:
    """Whether state of that key counts where no parameter lies too: where elements share values, and gaps have a part
    in them. `keys`: of all state there. An average is of weights, which mean nothing there.
    """
    return key != AVERAGE and is_packed(keys)


class GivenStates(Protocol):
    """Optimizer states of all parameters that are trained, by name, that are not in memory."""

    def kept(self, name: str) -> tuple[int, Mapping[str, bool]]:
        """What is kept of a parameter: a number that is the same for those of which all is alike, and by key whether it
        is one number for the whole parameter.
        """
        ...

    def state_part(self, name: str, key: str, first: int, last: int) -> Tensor:  # (last - first,), or ()
        """Elements of a parameter's state, flat, or its one number."""
        ...


Shared = dict[str, Tensor]  # each ()
"""The numbers that all elements of a parameter share, by the optimizer's keys."""


class LoadedState:
    """`tensors`: the user's parameter objects by name, under which their state is found. `only_counts`: whether the
    numbers of its state count steps and are no others: then parameters of a bucket may differ in them.
    """

    def __init__(
        self,
        layout: Layout,
        optimizer: torch.optim.Optimizer,
        tensors: Mapping[str, Tensor],  # each of its parameter's shape and dtype
        effects: StepEffects,
    ) -> None:
        self._layout, self._user, self._tensor_of, self._effects = layout, optimizer, tensors, effects
        self.only_counts = effects.only_counts
        self._given: GivenStates | None = None
        self._known: dict[int, Shared | None] = {}
        """Of it, by the number of those that are alike."""
        self._dtypes: dict[int, dict[str, torch.dtype]] = {}
        """By bucket and key: of the state that the optimizer makes itself."""
        for bucket in layout.trained.buckets:
            self._refuse_own(bucket)

    def take(self, given: GivenStates) -> None:
        """State comes from there. Raises `UserError` where it cannot be this optimizer's."""
        for bucket in self._layout.trained.buckets:
            self._refuse_packed(bucket)
            made = probe_state(self._user, bucket, 2, self._layout.device)
            kinds = {key: value.dim() == 0 for key, value in made.items()}
            _check_given(given, bucket, kinds, type(member_of(self._user, bucket.group)[0]), self.only_counts)
            self._dtypes[bucket.index] = {key: value.dtype for key, value in made.items()}
        self._given, self._known = given, {}

    def misses(self) -> Misses:
        """What parameters have missed by then: what others of their bucket have counted, and they have not. Of those of
        other stages and places other members know it.
        """
        layout = self._layout.trained
        found = [USED_ALWAYS] * len(layout.groups)
        for bucket, numbers in zip(layout.buckets, layout.parameter_numbers[layout.part.coordinate], strict=True):
            found[numbers.start : numbers.stop] = self._missed(bucket)
        return Misses(tuple(found))

    def _missed(self, bucket: Bucket) -> Iterator[Missed]:
        numbers = [self._shared(bucket, slot) for slot in bucket.slots]
        most, updates = _greatest(numbers), 0
        if self.only_counts and any(own is not None for own in numbers):
            once = probe_state(self._user, bucket, 2, self._layout.device)
            updates = max((int(most[key] - once[key].cpu()) + 1 for key in most.keys() & once), default=1)
        for own in numbers:
            less = [int(most[key] - value) for key, value in (own or {}).items() if self.only_counts]
            yield Missed(updates, is_new=True) if own is None else Missed(max(less, default=0))

    def _shared(self, bucket: Bucket, slot: Slot) -> Shared | None:
        """None: the parameter has no state."""
        name = slot.parameter.name
        if self._given is not None:
            alike, keys = self._given.kept(name)
            if alike not in self._known:
                parts = ((key, self._given.state_part(name, key, 0, 1)) for key, is_number in keys.items() if is_number)
                dtypes = self._dtypes[bucket.index]
                self._known[alike] = {key: part.reshape(()).to(dtypes[key]) for key, part in parts} if keys else None
            return self._known[alike]
        user = carried(own_state_of(self._user, self._tensor_of[name]))
        numbers = {key: value for key, value in user.items() if not value.dim()}
        if slot.parameter.shape == ():
            one_element = probe_state(self._user, bucket, 1, self._layout.device)
            numbers = {key: numbers[key] for key in numbers.keys() & one_element if not one_element[key].dim()}
        found = {key: self._first_value(bucket, key) if value.is_meta else value for key, value in numbers.items()}
        return {key: value.cpu() for key, value in found.items()} if user else None

    def of(self, stretch: Stretch) -> State:  # each (elements,), or ()
        """Copies; empty where the user's object has none (Adagrad makes it when constructed)."""
        state: State = {}
        bucket = self._layout.buckets[stretch.bucket]
        if self._given is not None and not bucket.is_frozen:
            return self._given_of(self._given, stretch)
        if bucket.is_frozen or not any(member.state for member in members_of(self._user)):
            return state
        self._refuse_own(bucket)
        start, stop = self._layout.elements(stretch)
        one_element = probe_state(self._user, bucket, 1, self._layout.device)
        shared = {key for key, value in one_element.items() if value.dim() == 0}
        for slot in bucket.slots:
            user = own_state_of(self._user, self._tensor_of[slot.parameter.name])
            first, last = max(start, slot.start), min(stop, slot.start + slot.parameter.elements)
            for key, value in carried(user).items():
                if value.is_meta:
                    value = self._first_value(bucket, key).expand(value.shape)
                if value.dim() == 0 and (slot.parameter.shape != () or key in shared):
                    is_most = key not in state or not self.only_counts or bool(value > state[key])
                    state[key] = value.clone() if is_most else state[key]
                    continue
                flat = state.setdefault(key, torch.zeros(stop - start, dtype=value.dtype, device=value.device))
                if first < last:
                    flat[first - start : last - start] = value.reshape(-1)[first - slot.start : last - slot.start]
        return state

    def _refuse_own(self, bucket: Bucket) -> None:
        names = (slot.parameter.name for slot in bucket.slots)
        if self._is_packed(bucket) and any(own_state_of(self._user, self._tensor_of[name]) for name in names):
            self._refuse_packed(bucket)

    def _is_packed(self, bucket: Bucket) -> bool:
        form = self._effects.forms.get((bucket.group, bucket.wide_dtype))
        return form is not None and form.is_packed

    def _refuse_packed(self, bucket: Bucket) -> None:
        if self._is_packed(bucket):
            raise UserError(
                f"optimizer {type(member_of(self._user, bucket.group)[0]).__name__} keeps values that some elements "
                "share, and what it is given to begin with was made of each parameter by itself, not of blocks. Begin "
                "without it (import with --model-only), or resume by `shoal.checkpoint.resume`."
            )

    def _given_of(self, given: GivenStates, stretch: Stretch) -> State:  # each (elements,), or ()
        bucket, (start, stop) = self._layout.buckets[stretch.bucket], self._layout.elements(stretch)
        state: State = _greatest([self._shared(bucket, slot) for slot in bucket.slots])
        for slot in bucket.slots:
            name = slot.parameter.name
            first, last = max(start, slot.start), min(stop, slot.start + slot.parameter.elements)
            for key in (key for key, is_number in given.kept(name)[1].items() if not is_number):
                dtype = self._dtypes[stretch.bucket][key]
                flat = state.setdefault(key, torch.zeros(stop - start, dtype=dtype))
                if first < last:
                    flat[first - start : last - start] = given.state_part(
                        name, key, first - slot.start, last - slot.start
                    )
        return state

    def _first_value(self, bucket: Bucket, key: str) -> Tensor:  # ()
        """What the optimizer's constructor puts into a state, where the parameters had no values then.

        Raises `UserError` for state that no constructor makes.
        """
        user, one = member_of(self._user, bucket.group)[0], nn.Parameter(torch.zeros(1))
        kind = type(user)
        try:
            made = kind([one], **user.defaults).state[one][key]
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f'optimizer {kind.__name__} has a state "{key}" of parameters without values (they were built within '
                "shoal.deferred()). Load optimizer states by `shoal.checkpoint.resume`, not into this object."
            ) from error
        assert isinstance(made, Tensor)
        return made.reshape(-1)[0]


def _greatest(
    numbers: Iterable[Shared | None],  # each ()
) -> Shared:
    """By key: those of a parameter that has missed the fewest updates."""
    found: Shared = {}
    for one in numbers:
        for key, value in (one or {}).items():
            found[key] = value.clone() if key not in found or bool(value > found[key]) else found[key]
    return found


def _check_given(
    given: GivenStates, bucket: Bucket, made: Mapping[str, bool], kind: type[torch.optim.Optimizer], only_counts: bool
) -> None:
    """`made`: what the optimizer keeps of a parameter of that bucket, and whether it is one number. `only_counts`: one
    that was never used may have nothing, and the numbers of two may differ.
    """
    known = {slot.parameter.name: given.kept(slot.parameter.name) for slot in bucket.slots}
    first = next(iter(known))
    for name, (alike, keys) in known.items():
        if keys != made and (keys or not only_counts):
            raise UserError(
                f'the checkpoint has {_listed(keys)} as optimizer state of parameter "{name}"; '
                f"{kind.__name__} keeps {_listed(made)}. Use the optimizer that made it, or import the model alone "
                "(--model-only)."
            )
        if alike != known[first][0] and not only_counts:
            raise UserError(
                f'the numbers that the optimizer keeps of parameters "{first}" and "{name}" (its steps, say) differ in '
                "the checkpoint, and the job keeps one for both. Put them into two optimizer groups, or import the "
                "model alone (--model-only)."
            )


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(sorted(keys)) or "nothing"


def probe_state(
    optimizer: torch.optim.Optimizer, bucket: Bucket, elements: int, device: torch.device
) -> State:  # each (elements,), or ()
    """The state that one update makes of so many zeros of that bucket; none where the optimizer's step fails."""
    member, group = member_of(optimizer, bucket.group)
    twin, zeros = probing_twin_of(member), torch.zeros(elements, dtype=bucket.wide_dtype, device=device)
    zeros.grad = torch.zeros_like(zeros)
    twin.param_groups[group]["params"] = [zeros]
    try:
        with without_hooks_on_all():
            twin.step()
    except Exception:  # one that could not be tried, and was taken at the script's word
        return {}
    return carried(twin.state[zeros])


def probe_state_bytes(
    layout: Layout, optimizer: torch.optim.Optimizer, with_weights: bool = False, averages: bool = False
) -> int:
    """Bytes of optimizer state of one block (the most of any bucket), found by one update of a block of zeros.

    `with_weights`: and of its parameters, which masters tell where there are such; `averages`: and of their average.
    """
    return max(
        sum(value.nbytes for value in _made_by(optimizer, bucket, layout.device).values())
        + ((with_weights or bucket.has_masters) + averages) * bucket.wide_dtype.itemsize * bucket.block_elements
        for bucket in layout.buckets
    )


def _made_by(
    optimizer: torch.optim.Optimizer, bucket: Bucket, device: torch.device
) -> State:  # each (elements of a block,), or ()
    return {} if bucket.is_frozen else probe_state(optimizer, bucket, bucket.block_elements, device)
