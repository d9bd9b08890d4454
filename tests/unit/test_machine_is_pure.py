"""The machine is a function: the same job, event and time give the same answer, and what was given stays as it was."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from machine_driver import stored, through_the_store
from shoal_controller.core.machine import machine
from shoal_controller.core.machine.events import Event
from shoal_controller.core.machine.job import Job
from shoal_controller.core.machine.stored_form import changed_records, durable_from, state_of
from simulation.seeds import rage_and_calm
from simulation.simulation import Simulation
from simulation.watch import Watch

pytestmark = pytest.mark.xdist_group("recorded lives")

Asked = tuple[Job, str, Sequence[Event], float, Job]
"""The job before, its text, the batch, the time, and the job after."""


class Recorder(Watch):
    """Takes down every batch of a simulation, with the job before and after it."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self.batches: list[Asked] = []

    def stepped(self, before: Job, events: Sequence[Event], after: Job) -> None:
        self.batches.append((before, repr(before), events, self.simulation.host.now, after))
        super().stepped(before, events, after)


@pytest.fixture(scope="module")
def recorded() -> list[Asked]:
    """What the machine was asked in a few simulated lives."""
    batches: list[Asked] = []
    for seed in (2, 11, 24):
        simulation = Simulation(seed)
        simulation.watch = recorder = Recorder(simulation)
        rage_and_calm(simulation)
        batches += recorder.batches
    return batches[::3]


def test_the_same_question_gets_the_same_answer(recorded: list[Asked]) -> None:
    for before, _, events, now, after in recorded:
        again, effects = machine.step(before, events, now)
        assert again == after
        assert (again, effects) == machine.step(before, events, now)


def test_what_was_given_stays_as_it_was(recorded: list[Asked]) -> None:
    assert [events for before, text, events, *_ in recorded if repr(before) != text] == []


def test_what_is_durable_survives_the_store(recorded: list[Asked]) -> None:
    durables = {id(after.durable): after.durable for *_, after in recorded}.values()
    assert len(durables) > 50
    for durable in durables:
        assert through_the_store(durable) == durable
        assert stored(through_the_store(durable)) == stored(durable)


def test_what_a_change_writes_makes_of_what_was_stored_what_is_durable_now(
    recorded: list[Asked],
) -> None:
    durables = list({id(after.durable): after.durable for *_, after in recorded}.values())
    texts: dict[str, str] = {}
    before = None
    for durable in durables:
        changed = changed_records(before, durable)
        texts = {name: text for name, text in {**texts, **changed}.items() if text is not None}
        assert texts == stored(durable)[1]
        assert durable_from(state_of(durable), texts) == durable
        before = durable


def test_a_field_that_an_older_controller_did_not_write_has_its_default(
    recorded: list[Asked],
) -> None:
    durable = recorded[-1][-1].durable
    state, records = stored(durable)
    fields = json.loads(state)
    del fields["spawn_after"]
    assert durable_from(fields, records).spawn_after == 0.0


def test_a_view_can_be_made_of_every_job(recorded: list[Asked]) -> None:
    for *_, now, after in recorded:
        view = machine.view(after, now)
        ranks = [worker.rank for worker in view.workers if worker.rank is not None]
        assert sorted(ranks) == sorted(set(ranks))
        assert view.unmirrored_blocks >= 0
