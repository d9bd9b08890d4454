"""Makes first values: runs the calls that fill some tensors of a model, on tensors that stand in for these.

Random numbers come from a seed of the job's and the module's name, so it does not matter what else is made, when, and
how often.
"""

from __future__ import annotations

import torch
from shoal_protos.errors import UserError
from torch import Tensor

from shoal.data.seeds import RandomState, seed_from
from shoal.first_values.inits import Call, Inits, Touches
from shoal.first_values.places import TensorPlace, TensorPlaces, standing_in


def make(
    places: TensorPlaces, inits: Inits, components: set[int], seed: int
) -> dict[TensorPlace, Tensor]:  # each of its form
    """The values of what is blank in these components, as far as it is written to.

    Raises `UserError` where the script's code fails.
    """
    calls = inits.calls_of(components)
    wanted = [place for place in places.all if inits.component(place) in components]
    around = {part for call in calls for part in call.module.modules()}
    tensors = {place: place.stand_in("meta") for place in places.of(around)}
    tensors |= {place: place.stand_in("cpu") for place in wanted}
    random, touches = RandomState.save(), Touches(tensors)
    written = {place for place in wanted if place.constant is not None}
    try:
        with standing_in(tensors), torch.no_grad():
            for call in calls:
                touches.begin()
                _run(call, seed, touches)
                touches.look_for_others([place for place in places.of(call.module.modules()) if place in tensors])
                _refuse_others(call, touches.written)
                written |= touches.written
            found = {place: _value(place) for place in wanted if place.is_blank and place in written}
    finally:
        random.restore()
    return found


def _run(call: Call, seed: int, touches: Touches) -> None:
    seed_from(f"{seed} {call.purpose} {call.name}")
    try:
        with touches:
            call.run()
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"module {call.title} of a model built within shoal.deferred() could not be initialised: {error!r}. "
            "An init is asked for every module, as by model.apply(init), and may use what is in that module."
        ) from error


def _refuse_others(call: Call, written: set[TensorPlace]) -> None:
    others = written - call.touched
    if others:
        raise UserError(
            f"the init of module {call.title} of a model built within shoal.deferred() wrote to "
            f'"{min(place.name for place in others)}", and did not when it was tried on tensors without values. What '
            "it writes to may not depend on values."
        )


def _value(place: TensorPlace) -> Tensor:  # of the place's form
    value, form = place.now, place.form
    kind = (value.shape, value.dtype) if value is not None else (None, None)
    if value is None or kind != (form.shape, form.dtype):
        raise UserError(
            f'the init of module "{place.name.rpartition(".")[0]}" ({type(place.module).__name__}) made '
            f'"{place.own}" of shape {kind[0] and tuple(kind[0])} and {kind[1]}; it was built with '
            f"{tuple(form.shape)} and {form.dtype}."
        )
    return value.detach()
