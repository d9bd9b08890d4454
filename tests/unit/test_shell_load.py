"""The shell with many workers: bounded batches, heartbeats that are no news, steps that are not written at once."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from asynchronous import asynchronous
from rule import Edit, holds, rule
from shoal_controller.core.machine.effects import Note, Persist
from shoal_controller.core.machine.events import MOST_AT_ONCE, Disconnected, MessageReceived, Probed, Tick
from shoal_controller.core.machine.job import Job
from shoal_controller.store.store import Put
from shoal_protos.acts import Save, Scale
from shoal_protos.errors import StoreError
from shoal_protos.messages import Heartbeat, MemberState, Status, Telemetry
from small_machine import SPEC, SmallMachine, running


@rule(
    "A batch is bounded, and other jobs have their turn between two",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.events",
            "    size = min(next(requests, len(line)), MOST_AT_ONCE) or 1\n",
            "    size = next(requests, len(line)) or 1\n",
        ),
        Edit(
            "shoal_controller.jobs.runner",
            "            await asyncio.sleep(0)  # a line that is not empty is no wait: other jobs come before "
            "its next batch\n",
            "",
        ),
    ],
)
@asynchronous
async def test_a_crowd_is_heard_in_batches_between_which_others_have_their_turn_and_time_comes_last(tmp_path):
    async with running(tmp_path) as world:
        await world.shell.create(SPEC)
        await world.shell.create(replace(SPEC, job="other"))
        await world.shell.submit("train", Save())
        world.machine.batches.clear()
        crowd = [Probed(f"w{number}", "", refused=False) for number in range(9 * MOST_AT_ONCE)]
        submitted = [asyncio.ensure_future(world.shell.submit("train", event)) for event in crowd]
        world.shell._runners["train"].tick()
        await asyncio.sleep(0)
        await world.shell.submit("other", Save())
        assert len(world.machine.batches["train"]) < 9, "whoever comes to another job waits for one batch, not for all"
        await asyncio.gather(*submitted)
        batches = world.machine.batches["train"]
        assert [len(batch) for batch in batches[:9]] == [MOST_AT_ONCE] * 9
        assert "Tick" not in {event for batch in batches[:9] for event in batch}


def beat(connection, step=0):
    return MessageReceived(connection, Heartbeat(Status(1, 1, MemberState.TRAINING, 1, step, 1), Telemetry()))


@asynchronous
async def test_what_is_no_news_is_heard_before_the_next_tick_the_latest_of_each_stream_and_all_at_once(tmp_path):
    received, ticked = [], asyncio.Event()
    machine = SmallMachine(
        {
            MessageReceived: lambda _, event: received.append((event.connection, event.message.status.step)) or (),
            Tick: lambda *_: (received and ticked.set()) or (),
        }
    )
    async with running(tmp_path, machine) as world:
        await world.shell.create(SPEC)
        world.machine.batches.clear()
        for step in (1, 2):
            for connection in range(5):
                world.shell.hear("train", beat(connection, step))
        await ticked.wait()
        assert received == [(connection, 2) for connection in range(5)]
        spoken = [batch for batch in world.machine.batches["train"] if "MessageReceived" in batch]
        assert spoken == [("MessageReceived",) * 5]
        before = world.machine.batches["train"].index(spoken[0])
        assert "Tick" in world.machine.batches["train"][before + 1]


@rule(
    "A heartbeat with nothing new in it waits for the next tick, which hears it first; with anything new it does "
    "not wait, nor do those that were said before it",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal_controller.jobs.dialogue",
            "        self.routine = isinstance(message, Heartbeat) and message.status.position == self._position\n",
            "        self.routine = isinstance(message, Heartbeat)\n",
        ),
        Edit("shoal_controller.jobs.runner", "            self._inbox.keep(event)\n", "            pass\n"),
    ],
)
@asynchronous
async def test_what_is_news_takes_with_it_what_was_said_before_it(tmp_path):
    order = []
    machine = SmallMachine(
        {MessageReceived: lambda *_: order.append("beat") or (), Save: lambda *_: order.append("save") or ()}
    )
    async with running(tmp_path, machine) as world:
        await world.shell.create(SPEC)
        world.shell.hear("train", beat(1))
        await world.shell.submit("train", Save())
        assert order == ["beat", "save"]


class Trainer(SmallMachine):
    """Its job is a step further with each probe, which is no reason to write."""

    def step(self, job, events, now):
        job, effects = super().step(job, events, now)
        passed = sum(isinstance(event, Probed) for event in events)
        return replace(job, durable=replace(job.durable, step=job.durable.step + passed)), effects


@asynchronous
async def test_steps_that_were_shown_and_not_written_are_written_by_a_controller_that_ends_in_good_order(tmp_path):
    async with running(tmp_path, Trainer()) as world:
        await world.shell.create(SPEC)
        for _ in range(3):
            await world.shell.submit("train", Probed("w0", "", refused=False))
        assert world.shell._runners["train"].repository.durable.step == 0
    async with running(tmp_path) as world:
        assert world.shell._runners["train"].repository.durable.step == 3


@asynchronous
async def test_a_controller_that_was_overtaken_writes_no_last_steps(tmp_path):
    async with running(tmp_path, Trainer()) as world:
        await world.shell.create(SPEC)
        await world.shell.submit("train", Probed("w0", "", refused=False))
        head = await world.store.get("/jobs/train")
        await world.store.transact([], [Put("/jobs/train", head.value)])
        with pytest.raises(StoreError):
            await world.shell.submit("train", Scale(5))
        await world.shell.stop()
        assert (await world.store.get("/jobs/train")).value == head.value


@holds("In a calm job (a world trains")
@asynchronous
async def test_a_calm_job_is_ticked_four_times_a_heartbeat_and_any_other_one_each_time(tmp_path, monkeypatch):
    ticks, now, calm = [], [10.0], [True]
    machine = SmallMachine({Tick: lambda *_: ticks.append(now[0]) or ()})
    async with running(tmp_path, machine) as world:
        await world.shell.create(SPEC)
        monkeypatch.setattr(Job, "is_calm", property(lambda _: calm[0]))
        runner = world.shell._runners["train"]
        runner._life, runner._ticked_at = replace(runner._life, clock=lambda: now[0]), now[0]
        await world.shell.submit("train", Save())
        ticks.clear()
        for at, calm[0] in ((10.1, True), (10.24, True), (10.26, True), (10.3, True), (10.4, False), (10.45, False)):
            now[0] = at
            runner.tick()
            await world.shell.submit("train", Save())
        assert sorted(set(ticks)) == [10.26, 10.4, 10.45]


@holds("… one that waits has its next tick")
@asynchronous
async def test_a_job_that_rests_is_ticked_when_its_rest_is_over_and_after_a_clock_that_went_back(tmp_path, monkeypatch):
    ticks, now, until = [], [10.0], [12.0]
    monkeypatch.setattr("shoal_controller.jobs.runner.rests_until", lambda _: until[0])
    machine = SmallMachine({Tick: lambda *_: ticks.append(now[0]) or ()})
    async with running(tmp_path, machine) as world:
        await world.shell.create(SPEC)
        runner = world.shell._runners["train"]
        runner._life, runner._ticked_at = replace(runner._life, clock=lambda: now[0]), now[0]
        await world.shell.submit("train", Save())
        ticks.clear()
        for at in (10.1, 11.9, 12.0, 9.0):
            now[0] = at
            runner.tick()
            await world.shell.submit("train", Save())
        assert sorted(set(ticks)) == [9.0, 12.0]


@asynchronous
async def test_that_a_stream_has_ended_is_written_with_what_comes_of_it_or_with_a_tick(tmp_path):
    async with running(tmp_path) as world:
        await world.shell.create(SPEC)
        world.machine.answers[Disconnected] = [Note("one", "cut")]
        world.machine.answers[Save] = [Note("two", "lost"), Persist()]
        before = (await world.store.get("/jobs/train")).modified
        await asyncio.gather(*(world.shell.submit("train", event) for event in (Disconnected(1, "cut"), Save())))
        assert (await world.store.get("/jobs/train")).modified == before + 1
        await world.shell.submit("train", Disconnected(2, "cut"))
        async with aclosing(world.shell.follow("train", 0, 60)) as events:
            assert [(await anext(events)).message for _ in range(3)] == ["cut", "lost", "cut"]
