"""An operator's acts: none is without what carries it out, tells it beforehand, and asks for it."""

from __future__ import annotations

from shoal_controller.core.machine.phases.operator_requests import HANDLERS
from shoal_controller.core.overview.previews import preview
from shoal_protos.acts import Act, ActCalls


def test_every_act_is_carried_out_is_told_beforehand_and_is_a_call_of_the_clients() -> None:
    asked = {act.asks for act in Act}
    assert set(HANDLERS) == asked == set(preview.registry) - {object}
    assert {act.operation for act in Act} <= set(dir(ActCalls))
    assert all(act.asks.__doc__ and Act(act.value) is act for act in Act)
