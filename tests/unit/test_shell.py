"""The shell: effects in order and durable before said, jobs restored after a restart, another controller noticed."""

import asyncio
import json
from collections import Counter
from contextlib import aclosing
from dataclasses import asdict, replace

import pytest
from asynchronous import asynchronous
from rule import holds
from shoal_controller.core.machine.effects import Close, Note, Persist, Send
from shoal_controller.core.machine.events import MOST_AT_ONCE, Exited, Probed, Tick
from shoal_controller.core.machine.spec import JobSpec, Phase
from shoal_controller.jobs.records import JobEvent, event_key
from shoal_controller.leadership.controller_state import ControllerState
from shoal_controller.store.store import Put
from shoal_protos.acts import Cancel, Pause, Resume, Save, Scale
from shoal_protos.errors import Conflict, NotFound, StoreError
from shoal_protos.messages import Ping, Refusal, Welcome
from small_machine import SPEC, SmallMachine, running

NOTHING = JobEvent(0, "", 0, "", "")


@asynchronous
async def test_effects_are_carried_out_in_order_and_after_what_must_be_durable(tmp_path):
    async with running(tmp_path) as world:
        await world.shell.create(SPEC)
        state_when_sent = []

        async def durable_revision():
            return (await world.store.get("/jobs/train")).modified

        world.machine.answers[Save] = [
            Note("one", "first"), Persist(), Send(1, Ping(1)), Send(1, Ping(2)), Close(1),
            Note("two", "second"),
        ]  # fmt: skip
        before = await durable_revision()
        send = world.written.send
        world.written.send = lambda *given: (
            state_when_sent.append(asyncio.ensure_future(durable_revision())),
            send(*given),
        )
        await world.shell.submit("train", Save())
        assert world.written.log == [
            ("send", 1, Ping(1)), ("send", 1, Ping(2)), ("close", 1),
        ]  # fmt: skip
        assert all(revision > before for revision in await asyncio.gather(*state_when_sent))
        assert [event.message for event in await world.shell.events("train")] == ["first", "second"]


@holds("A number, a plan or a world is")
@asynchronous
async def test_nothing_goes_out_when_what_must_be_durable_is_not(tmp_path):
    async with running(tmp_path) as world:
        await world.shell.create(SPEC)
        world.machine.answers[Save] = [Persist(), Send(1, Ping(1))]
        fenced = await world.store.transact([], [Put("/jobs/train", b"another's")])
        assert fenced.succeeded
        with pytest.raises(StoreError, match="written by another controller"):
            await world.shell.submit("train", Save())
        assert world.written.log == []


@asynchronous
async def test_another_controllers_write_stops_the_whole_shell(tmp_path):
    async with running(tmp_path) as world:
        await world.shell.create(SPEC)
        await world.shell.create(JobSpec("other", wanted=1))
        await world.store.transact([], [Put("/jobs/train", b"another's")])
        with pytest.raises(StoreError):
            await world.shell.submit("train", Scale(2))
        why = await asyncio.wait_for(asyncio.shield(world.shell.stopped), 100)
        assert str(why).startswith("job train was written by another controller; this one decides nothing more")
        with pytest.raises(StoreError, match="this controller has stopped: job train was written by another"):
            await world.shell.submit("other", Scale(2))


@asynchronous
async def test_a_refused_wish_raises_its_sentence_and_changes_nothing(tmp_path):
    async with running(tmp_path) as world:
        await world.shell.create(SPEC)
        with pytest.raises(Conflict, match="workers is 9; expected 1 to 8"):
            await world.shell.submit("train", Scale(9))
        await world.shell.submit("train", Scale(4))
        assert world.shell.view("train").wanted == 4
        assert [event.message for event in await world.shell.events("train")] == ["scaled to 4"]


@holds("Every run of a job has a uid; a")
@asynchronous
async def test_a_run_has_a_name_of_its_own_that_a_restart_keeps_and_a_new_run_of_the_job_does_not_have(tmp_path):
    async with running(tmp_path) as world:
        await world.shell.create(SPEC)
        first = world.shell._runners["train"].spec.run
        assert len(first) == 16
    async with running(tmp_path) as world:
        runner = world.shell._runners["train"]
        assert runner.spec.run == runner._job.spec.run == first
        await world.shell.delete("train")
        await world.shell.create(SPEC)
        assert world.shell._runners["train"].spec.run not in ("", first)


@asynchronous
async def test_a_run_hears_nothing_of_an_earlier_runs_workers_which_have_the_names_of_its_own(tmp_path):
    async with running(tmp_path) as world:
        controller = ControllerState()
        controller.shell = world.shell
        first = await world.shell.create(SPEC)
        await world.shell.submit("train", Cancel())
        second = await world.shell.create(SPEC)
        with pytest.raises(NotFound, match=f"run {first.run} of job train is over, and replaced by another one"):
            await controller.report("train", first.run, Exited("w0", 0, "its process 7 ended with status 0"))
        assert "Exited" not in world.events()
        for run in (second.run, ""):
            await controller.report("train", run, Exited("w0", 0, "its process 8 ended with status 0"))
        assert world.events().count("Exited") == 2


@holds("For a worker that is")
@asynchronous
async def test_a_store_has_an_id_of_its_own_that_every_welcome_and_refusal_tells(tmp_path):
    clusters = []
    for folder in ("a", "a", "b"):
        machine = SmallMachine({Save: [Send(1, Refusal("no")), Send(1, Welcome("w0", 1.0, 10.0, 1800.0))]})
        async with running(tmp_path / folder, machine) as world:
            if not world.shell.jobs():
                await world.shell.create(SPEC)
            await world.shell.submit("train", Save())
            refusal, welcome = (message for kind, _, message in world.written.log if kind == "send")
            assert refusal.cluster == welcome.cluster != ""
            clusters.append(welcome.cluster)
    assert clusters[0] == clusters[1] != clusters[2]


@asynchronous
async def test_jobs_go_on_after_a_restart_where_they_were(tmp_path):
    async with running(tmp_path) as world:
        await world.shell.create(SPEC)
        await world.shell.submit("train", Scale(5))
        await world.shell.create(JobSpec("other", wanted=1))
        await world.shell.delete("other")
    async with running(tmp_path) as world:
        assert [(view.job, view.wanted, view.phase) for view in world.shell.jobs()] == [
            ("other", 1, "cancelled"), ("train", 5, "waiting"),
        ]  # fmt: skip
        assert replace(world.shell._runners["train"].spec, run="") == SPEC
        await world.shell.submit("train", Scale(6))
        assert world.events() == ("Started", "Scale")
        assert [event.message for event in await world.shell.events("train")] == ["scaled to 5", "scaled to 6"]


@asynchronous
async def test_two_lives_of_one_controller_do_not_fence_each_other(tmp_path):
    for workers in (4, 5):
        async with running(tmp_path) as world:
            if workers == 4:
                await world.shell.create(SPEC)
            await world.shell.submit("train", Scale(workers))
            assert not world.shell.stopped.done()


@asynchronous
async def test_events_are_numbered_without_gap_over_restarts_and_runs(tmp_path):
    async with running(tmp_path) as world:
        await world.shell.create(SPEC)
        await world.shell.submit("train", Scale(5))
        await world.shell.delete("train")
        await world.shell.create(SPEC)
        await world.shell.submit("train", Scale(7))
    async with running(tmp_path) as world:
        await world.shell.submit("train", Scale(8))
        events = await world.shell.events("train")
        assert [(event.revision, event.kind) for event in events] == [
            (1, "scale"), (2, "cancelled"), (3, "scale"), (4, "scale"),
        ]  # fmt: skip
        assert events[0].data == {"workers": 5} and events[0].generation == 0
        assert [event.revision for event in await world.shell.events("train", after=2)] == [3, 4]


DAMAGED = [
    b"", b"[]", b"{}", b"null", b"\xff", b'{"time": 1}', b"[" * 100_000,
    *(
        json.dumps({**asdict(NOTHING), "kind": "scale", "revision": 1, name: value}).encode()
        for name, value in [
            ("time", None), ("time", "now"), ("time", -1), ("time", 1e300), ("time", float("nan")), ("kind", 3),
            ("generation", "1"), ("generation", 2**70), ("worker", None), ("message", []), ("message", "\ud800"),
            ("data", []), ("data", {"x": float("inf")}), ("revision", 7), ("colour", "blue"),
        ]
    ),
]  # fmt: skip


@holds("A record that cannot be")
@pytest.mark.parametrize("value", DAMAGED, ids=range(len(DAMAGED)))
@asynchronous
async def test_an_event_that_cannot_be_read_says_so_in_its_place(tmp_path, value):
    async with running(tmp_path) as world:
        await world.shell.create(SPEC)
        for workers in (1, 2):
            await world.shell.submit("train", Scale(workers))
        await world.store.transact([], [Put(event_key("train", 1), value)])
        damaged, right = await world.shell.events("train")
        assert (damaged.revision, damaged.kind) == (1, "unreadable_event")
        assert damaged.message.startswith("event 1 cannot be read: its record in the store is damaged (")
        assert (right.revision, right.message) == (2, "scaled to 2")
        async with aclosing(world.shell.follow("train", 0, 60)) as events:
            assert [(await anext(events)).revision for _ in range(2)] == [1, 2]


@asynchronous
async def test_a_follower_hears_every_event_once_also_those_before_it_came(tmp_path):
    async with running(tmp_path) as world:
        await world.shell.create(SPEC)
        await world.shell.submit("train", Scale(1))

        async def follow():
            return [event.message async for event in world.shell.follow("train", 0, 60) if event is not None]

        following = asyncio.ensure_future(follow())
        for workers in range(2, 6):
            await world.shell.submit("train", Scale(workers))
        await world.shell.delete("train")
        await asyncio.sleep(0.05)
    messages = await following
    assert messages == [*(f"scaled to {workers}" for workers in range(1, 6)), "cancelled by an operator"]


@asynchronous
async def test_a_follower_of_a_quiet_job_is_told_that_it_is_quiet(tmp_path):
    async with running(tmp_path) as world:
        await world.shell.create(SPEC)
        await world.shell.submit("train", Scale(1))
        async with aclosing(world.shell.follow("train", 0, 0.01)) as events:
            assert (await anext(events)).message == "scaled to 1"
            assert await anext(events) is None
            await world.shell.submit("train", Scale(2))
            assert "scaled to 2" in [(await anext(events) or NOTHING).message for _ in range(2)]


@asynchronous
async def test_a_note_carries_the_generation_of_the_durable_state_and_asks_for_no_view(tmp_path):
    """A view of a thousand workers for each of a thousand notes took seconds."""
    async with running(tmp_path) as world:
        await world.shell.create(SPEC)
        world.machine.answers[Save] = [Note("one", "first")]
        world.machine.shown["generation"] = 7
        await world.shell.submit("train", Save())
        assert (await world.shell.events("train"))[-1].generation == 0, "no world is stored"


@asynchronous
async def test_many_notes_of_one_step_are_all_written_in_order(tmp_path):
    async with running(tmp_path) as world:
        await world.shell.create(SPEC)
        world.machine.answers[Save] = [Persist(), *(Note("lost", f"w{number}") for number in range(333))]
        await world.shell.submit("train", Save())
        assert [event.message for event in await world.shell.events("train")] == [f"w{number}" for number in range(333)]


# ---- time


@asynchronous
async def test_every_job_is_ticked_and_hears_the_injected_time(tmp_path):
    ticks = {"train": asyncio.Event(), "other": asyncio.Event()}
    machine = SmallMachine({Tick: lambda job, _: ticks[job.spec.job].set() or ()})
    async with running(tmp_path, machine, clock=lambda: 4242.0) as world:
        await world.shell.create(SPEC)
        await world.shell.create(JobSpec("other", wanted=1))
        await asyncio.wait_for(asyncio.gather(*(tick.wait() for tick in ticks.values())), 100)
        assert set(machine.times) == {4242.0}


@asynchronous
async def test_a_job_that_is_over_is_ticked_more_seldom(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal_controller.jobs.shell.TICK_SECONDS", 0.002)
    ticks, enough = Counter(), asyncio.Event()

    def tick(job, _):
        ticks[job.spec.job] += 1
        if ticks["train"] >= 60:
            enough.set()
        return ()

    async with running(tmp_path, SmallMachine({Tick: tick})) as world:
        await world.shell.create(JobSpec("other", wanted=1))
        await world.shell.delete("other")
        ticks.clear()
        await world.shell.create(SPEC)
        await asyncio.wait_for(enough.wait(), 100)
        assert 0 < ticks["other"] <= ticks["train"] / 3


@asynchronous
async def test_a_job_that_nobody_looks_at_is_over_once_it_has_ended(tmp_path):
    async with running(tmp_path, SmallMachine()) as world:
        await world.shell.create(SPEC)
        runner = world.shell._runners["train"]
        assert not runner.view().phase.is_over
        await world.shell.submit("train", Cancel())
        assert runner.is_over


@asynchronous
async def test_a_tick_never_overtakes_what_was_heard_before_it(tmp_path):
    order = []
    machine = SmallMachine({Tick: lambda *_: order.append("tick") or (), Save: lambda *_: order.append("save") or ()})
    async with running(tmp_path, machine) as world:
        await world.shell.create(SPEC)
        runner = world.shell._runners["train"]
        await world.shell.submit("train", Save())
        order.clear()
        saves = [asyncio.ensure_future(world.shell.submit("train", Save())) for _ in range(5)]
        await asyncio.sleep(0)
        runner.tick()
        runner.tick()
        await asyncio.gather(*saves, world.shell.submit("train", Save()))
        assert order == ["save"] * 6 + ["tick"]


@holds("Silence is counted in the")
@asynchronous
async def test_a_tick_that_comes_late_is_handled_after_all_that_was_heard_meanwhile(tmp_path):
    order, ticked = [], asyncio.Event()
    machine = SmallMachine(
        {Tick: lambda *_: ticked.set() or order.append("tick") or (), Save: lambda *_: order.append("save") or ()}
    )
    async with running(tmp_path, machine) as world:
        await world.shell.create(SPEC)
        await world.shell.submit("train", Save())
        order.clear()
        ticked.clear()
        saves = [asyncio.ensure_future(world.shell.submit("train", Save())) for _ in range(5)]
        world.shell._runners["train"].tick()  # it stands in line before them: the loop has not come to them yet
        await asyncio.gather(*saves, ticked.wait())
        assert order[:6] == ["save"] * 5 + ["tick"]


@holds("Silence is counted in the")
@asynchronous
async def test_what_lies_in_the_inbox_is_one_batch_but_for_an_operators_request(tmp_path):
    async with running(tmp_path) as world:
        await world.shell.create(SPEC)
        await world.shell.submit("train", Save())
        world.machine.batches.clear()
        runner = world.shell._runners["train"]
        before = [Probed(f"w{number}", "", refused=False) for number in range(3)]
        submitted = [asyncio.ensure_future(runner.submit(event)) for event in (*before, Scale(2), *before)]
        runner.tick()
        await asyncio.gather(*submitted)
        assert world.machine.batches["train"][:3] == [("Probed",) * 3, ("Scale",), (*("Probed",) * 3, "Tick")]


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


@asynchronous
async def test_a_request_that_is_refused_takes_nothing_of_what_others_say_with_it(tmp_path):
    async with running(tmp_path) as world:
        await world.shell.create(SPEC)
        runner = world.shell._runners["train"]
        events = (Probed("w0", "", refused=False), Scale(99), Probed("w1", "", refused=False), Scale(5))
        outcomes = await asyncio.gather(*(runner.submit(event) for event in events), return_exceptions=True)
        assert [type(outcome).__name__ for outcome in outcomes] == ["NoneType", "Conflict", "NoneType", "NoneType"]
        assert world.shell.view("train").wanted == 5


# ---- names


@asynchronous
async def test_a_job_that_lives_cannot_be_created_again(tmp_path):
    async with running(tmp_path) as world:
        await world.shell.create(SPEC)
        with pytest.raises(Conflict, match=r"job train exists and is waiting; end it first .`shoal cancel train`. or "):
            await world.shell.create(SPEC)


@asynchronous
async def test_of_two_that_create_one_job_at_once_one_is_refused(tmp_path):
    async with running(tmp_path) as world:
        outcomes = await asyncio.gather(world.shell.create(SPEC), world.shell.create(SPEC), return_exceptions=True)
        assert [type(outcome).__name__ for outcome in outcomes] == ["JobView", "Conflict"]


@holds("A finished job is forgotten")
@asynchronous
async def test_a_job_that_is_deleted_twice_is_forgotten_with_its_events_and_logs(tmp_path):
    async with running(tmp_path) as world:
        await world.shell.create(SPEC)
        assert (await world.shell.delete("train")).phase is Phase.CANCELLED
        assert len(await world.shell.events("train")) == 1
        assert (await world.shell.delete("train")).phase is Phase.CANCELLED
        assert ("forget", "train") in world.written.log
        with pytest.raises(NotFound):
            await world.shell.delete("train")
        assert not [entry.key for entry in (await world.store.list("/")).entries if "train" in entry.key]
        await world.shell.create(SPEC)
        assert world.shell.view("train").phase is Phase.WAITING


@holds("A finished job is forgotten")
@asynchronous
async def test_a_job_is_forgotten_a_while_after_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal_controller.jobs.shell.FORGET_LOOK_SECONDS", 0.01)
    now = [1_000.0]
    machine = SmallMachine(shown={"ended_at": 1_000.0})
    async with running(tmp_path, machine, lambda: now[0]) as world:
        await world.shell.create(SPEC)
        await world.shell.delete("train")
        await world.shell.create(JobSpec("other", wanted=1))
        now[0] += 7 * 86_400 - 1
        assert [view.job for view in world.shell.jobs()] == ["other", "train"]
        now[0] += 2
        await world.written.until("forget", "train")


@asynchronous
async def test_an_unknown_job_is_said_with_the_jobs_that_there_are(tmp_path):
    async with running(tmp_path) as world:
        with pytest.raises(NotFound, match="there is no job nope; there are none yet"):
            world.shell.view("nope")
        await world.shell.create(SPEC)
        with pytest.raises(NotFound, match="there is no job nope; the only one is train"):
            await world.shell.submit("nope", Pause())
        for number in range(7):
            await world.shell.create(JobSpec(f"j{number}", wanted=1))
        with pytest.raises(NotFound, match="there are j0, j1, j2, j3, j4 and 3 more"):
            await world.shell.events("nope")


@asynchronous
async def test_jobs_that_are_over_make_room_for_new_ones_the_oldest_first(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal_controller.jobs.shell.MOST_JOBS", 3)
    async with running(tmp_path) as world:
        for job in ("a", "b", "c"):
            await world.shell.create(JobSpec(job, wanted=1))
        with pytest.raises(Conflict, match="3 jobs are not over, and more are not served; delete some first"):
            await world.shell.create(SPEC)
        for _ in range(70):
            await world.shell.submit("c", Scale(2))
        await world.shell.delete("c")
        await world.shell.delete("a")
        await world.shell.create(SPEC)
        assert [view.job for view in world.shell.jobs()] == ["a", "b", "train"]
        assert (await world.store.list("/events/c/")).entries == ()
        await world.shell.submit("b", Scale(3))
    async with running(tmp_path) as world:
        assert [view.job for view in world.shell.jobs()] == ["a", "b", "train"]


# ---- ending


@asynchronous
async def test_whoever_waits_when_the_shell_stops_is_told_so(tmp_path):
    async with running(tmp_path) as world:
        await world.shell.create(SPEC)
        waiting = [asyncio.ensure_future(world.shell.submit("train", Resume())) for _ in range(50)]
        await asyncio.sleep(0)
        await world.shell.stop()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert {str(outcome) for outcome in outcomes} <= {"None", "this controller is stopping; try again"}
        with pytest.raises(StoreError, match="this controller is stopping"):
            await world.shell.submit("train", Resume())


@asynchronous
async def test_a_submitter_that_goes_away_harms_nothing(tmp_path):
    async with running(tmp_path) as world:
        await world.shell.create(SPEC)
        impatient = asyncio.ensure_future(world.shell.submit("train", Scale(7)))
        await asyncio.sleep(0)
        impatient.cancel()
        await world.shell.submit("train", Pause())
        assert world.shell.view("train").wanted == 7
