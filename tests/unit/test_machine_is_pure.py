"""The machine is a function: the same job, event and time give the same answer, and what was given stays as it was."""

from __future__ import annotations

import json

import pytest
from shoal_controller.core.machine import machine
from shoal_controller.core.machine.durable import from_json, to_json
from shoal_controller.core.machine.events import Event
from shoal_controller.core.machine.job import Job
from simulation.seeds import rage_and_calm
from simulation.simulation import Simulation
from simulation.watch import Watch


class Recorder(Watch):
    """Takes down every event of a simulation, with the job before and after it."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self.events: list[tuple[Job, str, Event, float, Job]] = []

    def stepped(self, before: Job, event: Event, after: Job) -> None:
        self.events.append((before, repr(before), event, self.simulation.clock.now, after))
        super().stepped(before, event, after)


@pytest.fixture(scope="module")
def recorded() -> list[tuple[Job, str, Event, float, Job]]:
    """What the machine was asked in a few simulated lives."""
    events = []
    for seed in (2, 11, 24):
        simulation = Simulation(seed)
        simulation.watch = recorder = Recorder(simulation)
        rage_and_calm(simulation)
        events += recorder.events
    return events[::3]


def test_the_same_question_gets_the_same_answer(recorded: list[tuple[Job, str, Event, float, Job]]) -> None:
    for before, _, event, now, after in recorded:
        again, effects = machine.step(before, event, now)
        assert again == after
        assert (again, effects) == machine.step(before, event, now)


def test_what_was_given_stays_as_it_was(recorded: list[tuple[Job, str, Event, float, Job]]) -> None:
    assert [event for before, text, event, *_ in recorded if repr(before) != text] == []


def test_what_is_durable_survives_its_text(recorded: list[tuple[Job, str, Event, float, Job]]) -> None:
    durables = {id(after.durable): after.durable for *_, after in recorded}.values()
    assert len(durables) > 50
    for durable in durables:
        text = to_json(durable)
        assert from_json(text) == durable
        assert to_json(from_json(text)) == text


def test_a_field_that_an_older_controller_did_not_write_has_its_default(
    recorded: list[tuple[Job, str, Event, float, Job]],
) -> None:
    durable = recorded[-1][-1].durable
    fields = json.loads(to_json(durable))
    del fields["backoff_counts"], fields["link_faults"]
    assert from_json(json.dumps(fields)).backoff_counts == {}


def test_a_view_can_be_made_of_every_job(recorded: list[tuple[Job, str, Event, float, Job]]) -> None:
    for *_, now, after in recorded:
        view = machine.view(after, now)
        ranks = [worker.rank for worker in view.workers if worker.rank is not None]
        assert sorted(ranks) == sorted(set(ranks))
        assert view.unmirrored_blocks >= 0
