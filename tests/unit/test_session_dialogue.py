"""What a worker says to its controller and what it makes of the answers, without a thread or a socket."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rule import Edit, holds, rule
from shoal.core.membership import Membership
from shoal.session.dialogue import Abort, Build, Deliver, Dialogue, ProcessInfo
from shoal.session.link import MOST_ASKED, Asked, Ended, Inbox, Opened, Planned, Stopped
from shoal_protos.activity import Activity, StepPhase
from shoal_protos.description import Description, Parameter, brief
from shoal_protos.errors import PeerError
from shoal_protos.gpu import Gpu
from shoal_protos.messages import (
    Ask,
    AskKind,
    Describe,
    Drain,
    Ending,
    Heartbeat,
    Hello,
    Inventory,
    MemberState,
    Open,
    Ping,
    PlanMessage,
    Prepare,
    Ready,
    Refusal,
    Request,
    RequestKind,
    Result,
    Shutdown,
    Status,
    Telemetry,
    Welcome,
)
from shoal_protos.plan import EVERYONE
from shoal_protos.runs import NO_BLOCKS, every
from worlds import BLOCKS, planned, recovery

DESCRIPTION = Description(2, BLOCKS, 4096, 8, EVERYONE, 0, 10, (), "SGD", {}, {}, False, False)
NEW = Status(0, 0, MemberState.WARMING_UP, 0, step=-1, committed_in=0)
WELCOME = Welcome("a", 0.5, 10.0, 1800.0)


def dialogue_of(worker: str = "a") -> Dialogue:
    process = ProcessInfo("job", "host", 1, "rack", "127.0.0.1:1")
    dialogue = Dialogue(Membership(worker, f"{worker}.1"), process, DESCRIPTION, NEW)
    dialogue.say_hello()
    dialogue.on_message(WELCOME)
    dialogue.membership.end_warm_up()
    dialogue.take_outgoing()
    return dialogue


@rule(
    "A hello tells the highest number of a plan that may still begin at its worker: no controller gives that again",
    "A change of the world",
    broken_by=Edit(
        "shoal.core.membership",
        "        plans = (self.next, self.begins, self.deferred, *self.kept.values())\n",
        "        plans = (self.begins, *self.kept.values())\n",
    ),
)
def test_a_hello_tells_the_number_of_a_plan_that_may_still_begin() -> None:
    dialogue = dialogue_of()
    dialogue.membership.on_prepare(1)
    dialogue.membership.on_recovery(recovery(1, "ab"))
    dialogue.membership.begin(recovery(1, "ab"))
    dialogue.membership.on_planned(planned(3, 1, "abC"))
    assert dialogue.say_hello().next_generation == 3
    dialogue.membership.enter_vote(every(BLOCKS))
    dialogue.membership.voted = 3
    dialogue.membership.on_planned(planned(4, 1, "abD"))
    assert dialogue.say_hello().next_generation == 4
    dialogue.membership.on_prepare(5)
    assert dialogue.say_hello().next_generation == 0


@holds("A hello names the model by a digest")
def test_a_hello_names_its_parameters_and_tells_them_when_it_is_asked() -> None:
    whole = replace(DESCRIPTION, parameters=(Parameter("weight", (4096, BLOCKS), "torch.float32", 0),))
    dialogue = Dialogue(Membership("a", "a.1"), ProcessInfo("job", "host", 1, "rack", "127.0.0.1:1"), whole, NEW)
    assert dialogue.say_hello().description == brief(whole)
    dialogue.on_message(Describe())
    hellos = [message for message in dialogue.take_outgoing() if isinstance(message, Hello)]
    assert [hello.description for hello in hellos] == [whole]
    assert not [message for message in dialogue.take_outgoing() if isinstance(message, Hello)], "it is said once"
    assert dialogue.say_hello().description.is_brief, "another stream begins with the name again"


def test_every_hello_after_the_welcome_names_the_run_and_one_of_a_launched_process_from_the_first() -> None:
    dialogue = dialogue_of()
    assert dialogue.say_hello().run == ""
    dialogue.on_message(replace(WELCOME, run="run-1"))
    assert dialogue.say_hello().run == "run-1"
    dialogue.start_over("a.2")
    assert dialogue.say_hello().run == "run-1"
    launched = ProcessInfo("job", "host", 1, "rack", "127.0.0.1:1", run="run-2")
    assert Dialogue(Membership("a", "a.1"), launched, DESCRIPTION, NEW).say_hello().run == "run-2"


REFUSED = Refusal("there is no job job", cluster="other")


@rule(
    "For a worker that is in a world a refusal is final only if it comes from the store that welcomed it, and "
    "only if its run is over or replaced, or another process has its id",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal.session.dialogue",
            "    return refusal.ends_members and bool(cluster) and refusal.cluster == cluster\n",
            "    return refusal.final\n",
        ),
        Edit("shoal.session.dialogue", " and bool(cluster) and refusal.cluster == cluster\n", "\n"),
        Edit(
            "shoal_controller.core.machine.phases.claims",
            "Refusal(sentence, ends_members=bool(event.opening.run))",
            "Refusal(sentence)",
        ),
    ],
)
@pytest.mark.parametrize(
    ("refusal", "ends"),
    [
        (REFUSED, False),  # an empty store, or somebody else's
        (replace(REFUSED, cluster="ours"), False),  # a job that is not served, a wrong token, a newer record
        (replace(REFUSED, ends_members=True), False),  # another run under the name, in another store
        (replace(REFUSED, ends_members=True, cluster=""), False),
        (replace(REFUSED, ends_members=True, cluster="ours"), True),
    ],
)
def test_a_worker_in_a_world_ends_only_where_the_store_that_has_welcomed_it_says_that_its_run_is_over(
    refusal: Refusal, ends: bool
) -> None:
    dialogue = member_of(1, "a")
    dialogue.on_message(replace(WELCOME, cluster="ours"))
    effects = dialogue.on_message(refusal)
    assert bool(effects) is ends and (dialogue.ending is not None) is ends
    assert dialogue.refusal == refusal.sentence
    again = dialogue.say_hello()
    assert again.status.generation == 1, "it says hello again, as a member of its world"


def test_a_worker_in_a_world_that_no_store_has_named_its_id_to_ends_by_no_refusal() -> None:
    dialogue = member_of(1, "a")
    assert dialogue.on_message(replace(REFUSED, ends_members=True, cluster="")) == []


def test_a_joiner_ends_by_a_final_refusal_whoever_gives_it() -> None:
    dialogue = dialogue_of()
    assert dialogue.on_message(replace(REFUSED, final=False)) == []
    assert dialogue.on_message(REFUSED) == [Deliver(Ended(Ending.FAILED, "there is no job job")), Abort()]


@rule(
    "A worker that was launched or welcomed for a job does not end because a controller does not know that job: "
    "its status would be taken for that of a script that cannot run as started",
    "A change of the world",
    broken_by=Edit(
        "shoal.session.dialogue",
        "        return refusal.final and not (refusal.unknown_job and run)\n",
        "        return refusal.final\n",
    ),
)
def test_a_worker_that_was_launched_for_a_job_does_not_believe_that_there_is_none() -> None:
    """It would end with the status of a script that cannot run as started, and the right controller fail the job."""
    launched = ProcessInfo("job", "host", 1, "rack", "127.0.0.1:1", run="run-1")
    dialogue = Dialogue(Membership("a", "a.1"), launched, DESCRIPTION, NEW)
    unknown = Refusal("there is no job job", unknown_job=True)
    assert dialogue.on_message(unknown) == []
    assert dialogue.ending is None
    assert dialogue.on_message(Refusal("another model"))
    by_hand = dialogue_of()
    assert by_hand.on_message(unknown)


def inventory(answers: int) -> Inventory:
    return Inventory(answers, 0, 0, 0, b"", NO_BLOCKS, NO_BLOCKS, NO_BLOCKS)


def member_of(generation: int, workers: str) -> Dialogue:
    """Through a start, as the client drives it."""
    dialogue, plan = dialogue_of(), recovery(generation, workers)
    assert dialogue.on_message(Prepare(generation)) == [Deliver(Stopped(generation)), Abort()]
    dialogue.answer(inventory(generation))
    assert dialogue.on_message(PlanMessage(plan)) == [Build(plan, 0, joiner=False), Deliver(Planned(plan))]
    assert dialogue.report_ready(generation)
    assert dialogue.on_message(Open(generation)) == [Deliver(Opened(generation))]
    dialogue.begin(plan)
    dialogue.update_status(replace(NEW, step=0), Telemetry())
    dialogue.take_outgoing()
    return dialogue


def kinds_sent(dialogue: Dialogue) -> list[str]:
    return [type(message).__name__ for message in dialogue.take_outgoing()]


def inventories_sent(dialogue: Dialogue) -> list[Inventory]:
    """Of all that is due, without where the worker says that it stands."""
    sent = [message for message in dialogue.take_outgoing() if isinstance(message, Inventory)]
    return [replace(one, status=None) for one in sent]


def heartbeat(dialogue: Dialogue) -> Heartbeat:
    """The next thing that is due, which must be a heartbeat."""
    message = dialogue.take_outgoing()[0]
    assert isinstance(message, Heartbeat)
    return message


# ---- a start, a loss


def test_a_worker_answers_prepare_with_an_inventory_as_often_as_it_is_asked() -> None:
    dialogue = dialogue_of()
    dialogue.on_message(Prepare(1))
    assert dialogue.on_message(Prepare(1)) == []
    assert inventories_sent(dialogue) == []
    dialogue.answer(inventory(1))
    assert inventories_sent(dialogue) == [inventory(1)]
    dialogue.on_message(Prepare(1))
    assert inventories_sent(dialogue) == [inventory(1)]


def test_an_answer_says_where_the_worker_stands_so_that_no_heartbeat_has_to() -> None:
    dialogue = dialogue_of()
    dialogue.on_message(Prepare(1))
    dialogue.answer(inventory(1))
    (answer,) = dialogue.take_outgoing()
    assert isinstance(answer, Inventory)
    assert answer.status is not None
    assert answer.status.promised == 1
    dialogue.on_message(PlanMessage(recovery(1, "ab")))
    assert dialogue.report_ready(1)
    assert kinds_sent(dialogue) == ["Ready"]


def test_an_inventory_for_an_older_prepare_is_not_sent() -> None:
    dialogue = dialogue_of()
    dialogue.on_message(Prepare(1))
    dialogue.on_message(Prepare(2))
    dialogue.take_outgoing()
    dialogue.answer(inventory(1))
    assert dialogue.take_outgoing() == []
    dialogue.on_message(Prepare(2))
    assert inventories_sent(dialogue) == []


def test_stopping_is_said_at_once_with_the_number_stopped_for() -> None:
    dialogue = member_of(1, "ab")
    dialogue.on_message(Prepare(2))
    status = heartbeat(dialogue).status
    assert (status.state, status.promised, status.generation) == (MemberState.STOPPED, 2, 1)


def test_ready_is_said_at_once_and_never_for_a_generation_that_was_called_off() -> None:
    dialogue = dialogue_of()
    dialogue.on_message(Prepare(1))
    dialogue.on_message(PlanMessage(recovery(1, "ab")))
    dialogue.take_outgoing()
    assert dialogue.report_ready(1)
    dialogue.on_message(Prepare(2))
    assert Ready not in map(type, dialogue.take_outgoing())
    dialogue.on_message(PlanMessage(recovery(2, "ab")))
    dialogue.report_ready(2)
    ready = next(message for message in dialogue.take_outgoing() if isinstance(message, Ready))
    assert (ready.generation, ready.status.state) == (2, MemberState.READY)


def test_an_open_that_comes_twice_opens_once() -> None:
    dialogue = dialogue_of()
    dialogue.on_message(Prepare(1))
    dialogue.on_message(PlanMessage(recovery(1, "ab")))
    dialogue.report_ready(1)
    assert dialogue.on_message(Open(1)) == [Deliver(Opened(1))]
    assert dialogue.on_message(Open(1)) == []


def test_an_unsound_plan_is_not_carried_out() -> None:
    dialogue = dialogue_of()
    dialogue.on_message(Prepare(1))
    with pytest.raises(PeerError, match="plan 1 is unsound"):
        dialogue.on_message(PlanMessage(replace(recovery(1, "ab"), builder=2)))


# ---- what is said, and when


def test_a_heartbeat_has_the_newest_figures_of_the_gpu_beside_the_last_step() -> None:
    dialogue = dialogue_of()
    dialogue.update_status(replace(NEW, step=1, committed_in=1), Telemetry(loss=1.0))
    for celsius in (60.0, 61.0):
        dialogue.gpu = Gpu("NVIDIA H100", celsius=celsius)
        dialogue.beat()
        assert heartbeat(dialogue).telemetry == Telemetry(loss=1.0, gpu=dialogue.gpu)


def test_a_step_alone_waits_for_the_heartbeat_and_any_other_change_does_not() -> None:
    dialogue = member_of(1, "ab")
    dialogue.update_status(replace(NEW, step=1, committed_in=1), Telemetry())
    assert kinds_sent(dialogue) == ["Heartbeat"]
    dialogue.update_status(replace(NEW, step=2, committed_in=1, boundaries=2), Telemetry(loss=1.0))
    assert not dialogue.due
    dialogue.update_status(replace(NEW, step=2, committed_in=1, holds=every(1)), Telemetry())
    assert kinds_sent(dialogue) == ["Heartbeat"]
    dialogue.update_status(replace(NEW, step=3, committed_in=1, holds=every(1), done=True), Telemetry())
    assert kinds_sent(dialogue) == ["Heartbeat"]


def test_nothing_is_said_of_a_world_before_the_training_thread_has_said_where_it_stands_in_it() -> None:
    dialogue = member_of(1, "ab")
    plan = planned(2, 1, "ab")
    dialogue.update_status(replace(NEW, step=5, boundaries=9), Telemetry())
    dialogue.take_outgoing()
    dialogue.on_message(PlanMessage(plan))
    dialogue.membership.enter_vote(every(BLOCKS))
    assert dialogue.membership.leave_vote([2, 2]) is plan
    dialogue.begin(plan)
    dialogue.beat()
    status = heartbeat(dialogue).status
    assert (status.generation, status.boundaries) == (1, 9)
    dialogue.update_status(replace(NEW, step=5, boundaries=0), Telemetry())
    status = heartbeat(dialogue).status
    assert (status.generation, status.boundaries) == (2, 0)


def test_sequence_numbers_grow_with_every_message_and_over_streams() -> None:
    dialogue = member_of(1, "ab")
    dialogue.beat()
    first = heartbeat(dialogue).status.sequence
    second = dialogue.say_hello().status.sequence
    dialogue.beat()
    assert first < second < heartbeat(dialogue).status.sequence


def test_a_ping_is_answered_with_its_number() -> None:
    dialogue = dialogue_of()
    dialogue.on_message(Ping(7))
    assert heartbeat(dialogue).echo == 7


def test_a_broken_connection_is_said_at_once_and_forgotten_in_the_next_world() -> None:
    dialogue = member_of(1, "ab")
    dialogue.on_broken_peers({"b"})
    assert heartbeat(dialogue).status.broken == ("b",)
    dialogue.on_broken_peers({"b"})
    assert not dialogue.due
    dialogue.on_message(Prepare(2))
    assert heartbeat(dialogue).status.broken == ("b",)
    dialogue.on_message(PlanMessage(recovery(2, "ab")))
    assert heartbeat(dialogue).status.broken == ()


def test_a_new_stream_begins_with_where_the_worker_stands_and_says_again_what_must_be_known() -> None:
    dialogue = member_of(1, "ab")
    dialogue.request_drain()
    dialogue.report(Result(10, "beef"))
    assert kinds_sent(dialogue) == ["Request", "Heartbeat", "Result"]
    hello = dialogue.say_hello()
    assert (hello.status.generation, hello.status.state, hello.status.drain) == (1, MemberState.TRAINING, True)
    assert dialogue.take_outgoing() == [Result(10, "beef", generation=1), Request(RequestKind.DRAIN, generation=1)]


def test_a_prepare_that_is_heard_on_a_new_stream_is_answered_without_the_training_thread() -> None:
    dialogue = member_of(1, "ab")
    dialogue.on_message(Prepare(2))
    dialogue.answer(inventory(2))
    dialogue.take_outgoing()
    assert dialogue.say_hello().status.state is MemberState.STOPPED
    assert dialogue.on_message(Prepare(2)) == []
    assert inventories_sent(dialogue) == [inventory(2)]


def test_the_controller_gives_a_worker_its_id_and_the_pace_of_its_heart() -> None:
    dialogue = dialogue_of("")
    assert (dialogue.membership.worker, dialogue.heartbeat_seconds) == ("a", 0.5)


# ---- requests, endings


def test_the_same_request_is_put_to_the_training_thread_once() -> None:
    dialogue = dialogue_of()
    assert dialogue.on_message(Ask(AskKind.SAVE, 3)) == [Deliver(Asked(AskKind.SAVE, 3))]
    assert dialogue.on_message(Ask(AskKind.SAVE, 3)) == []
    assert dialogue.on_message(Ask(AskKind.SAVE, 4)) == [Deliver(Asked(AskKind.SAVE, 4))]


def test_who_starts_over_is_asked_again_for_what_the_life_before_may_have_forgotten() -> None:
    dialogue = dialogue_of()
    ends = Ask(AskKind.END, 20, 1)
    assert dialogue.on_message(ends) == [Deliver(Asked(AskKind.END, 20))]
    dialogue.start_over("a.2")
    assert dialogue.on_message(ends) == [Deliver(Asked(AskKind.END, 20))]


def test_a_drain_changes_nothing_until_a_plan_leaves_the_worker_out() -> None:
    dialogue = member_of(1, "ab")
    assert dialogue.on_message(Drain(30.0)) == [] and not dialogue.due


def test_a_shutdown_ends_it_with_the_reason() -> None:
    dialogue = member_of(1, "ab")
    assert dialogue.on_message(Shutdown(Ending.FAILED, "why")) == [Deliver(Ended(Ending.FAILED, "why")), Abort()]
    assert dialogue.ending is not None


def test_only_a_final_refusal_ends_it() -> None:
    dialogue = dialogue_of()
    assert dialogue.on_message(Refusal("the controller is starting", final=False)) == []
    assert dialogue.ending is None
    assert dialogue.on_message(Refusal("another model")) == [Deliver(Ended(Ending.FAILED, "another model")), Abort()]


def test_who_starts_over_is_another_joiner() -> None:
    dialogue = member_of(3, "ab")
    dialogue.update_status(replace(NEW, step=9, holds=every(2)), Telemetry())
    dialogue.on_message(Shutdown(Ending.START_OVER, "evicted"))
    dialogue.start_over("other")
    hello = dialogue.say_hello()
    assert isinstance(hello, Hello)
    assert (hello.worker, hello.incarnation) == ("", "other")
    assert (hello.status.state, hello.status.step, hello.status.holds) == (MemberState.WARMING_UP, -1, NO_BLOCKS)
    assert hello.status.promised == 3
    assert dialogue.ending is None


# ---- the inbox


def test_a_stop_voids_what_was_heard_of_a_world_and_keeps_requests() -> None:
    inbox = Inbox()
    inbox.put(Stopped(1))
    inbox.put(Asked(AskKind.SAVE, 1))
    inbox.put(Opened(1))
    inbox.put(Stopped(2))
    assert inbox.waiting
    assert [inbox.take(0), inbox.take(0), inbox.take(0)] == [Asked(AskKind.SAVE, 1), Stopped(2), None]
    assert not inbox.waiting


def test_an_end_is_not_voided_by_a_stop() -> None:
    inbox = Inbox()
    inbox.put(Ended(Ending.DONE, ""))
    inbox.put(Stopped(2))
    assert inbox.take(0) == Ended(Ending.DONE, "")


def test_the_inbox_is_bounded() -> None:
    inbox = Inbox()
    for number in range(MOST_ASKED + 5):
        inbox.put(Asked(AskKind.SAVE, number))
    assert inbox.take(0) == Asked(AskKind.SAVE, 5)


# ---- what the training thread does


def test_a_heartbeat_tells_what_the_training_thread_does_and_which_groups_are_being_built() -> None:
    dialogue = member_of(1, "ab")
    dialogue.on_message(PlanMessage(planned(2, 1, "abC")))
    trains, builds = Activity(1, 3, StepPhase.VOTE, 0, ("b",), 2.5), Activity(2, waits_for=("c",), seconds=1.0)
    dialogue.activities = {1: trains, 2: builds}
    dialogue.beat()
    [heartbeat] = [message for message in dialogue.take_outgoing() if isinstance(message, Heartbeat)]
    assert (heartbeat.activity, heartbeat.builds) == (trains, (builds,))


def test_while_a_world_is_made_anew_the_training_thread_is_in_its_group_as_soon_as_that_is_built() -> None:
    dialogue = member_of(1, "ab")
    dialogue.on_message(Prepare(2))
    dialogue.answer(inventory(2))
    dialogue.on_message(PlanMessage(recovery(2, "ab")))
    sent = []
    for activity in (Activity(2, waits_for=("b",)), Activity(2, 0, StepPhase.CATCHING_UP, 0, ("b",))):
        dialogue.activities = {2: activity}
        dialogue.beat()
        [heartbeat] = [message for message in dialogue.take_outgoing() if isinstance(message, Heartbeat)]
        sent.append((heartbeat.activity == activity, heartbeat.builds == (activity,)))
    assert sent == [(False, True), (True, False)]
