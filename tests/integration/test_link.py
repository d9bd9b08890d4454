"""The link to a controller: real gRPC, real rendezvous servers, real gloo groups; several links in this one process.

No test measures time: what must come is waited for by a deadline far above what it takes.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from certificates import authority, certificate
from integration.linked_workers import DESCRIPTION, NEW, Worker, at, begin_a_world, together, workers
from integration.small_controller import PATIENCE_SECONDS, SmallController
from rule import Edit, holds, rule
from shoal.exchange.packing import FramedSend
from shoal.exchange.traffic import FIRST_MESSAGE
from shoal.group.build import Cancellation, GroupSpec
from shoal.group.group import Group, SoloGroup, WorldChanged
from shoal.session.controller_link import ControllerLink
from shoal.session.link import Asked, Begun, Ended
from shoal.session.settings import SessionSettings
from shoal_protos.errors import UserError
from shoal_protos.messages import (
    NO_CONTROLLER,
    Ask,
    AskKind,
    Ending,
    Heartbeat,
    Hello,
    Inventory,
    MemberState,
    Ping,
    PlanMessage,
    Prepare,
    Refusal,
    Result,
    Shutdown,
    Telemetry,
)
from shoal_protos.runs import NO_BLOCKS, every
from worlds import BLOCKS, planned, recovery

# ---- hello


def test_a_worker_says_who_it_is_and_gets_an_id_where_it_has_none() -> None:
    with SmallController() as controller:
        worker = Worker("", controller, token="secret", domain="rack 3")
        hello = worker.introduce()
        assert (hello.job, hello.worker, hello.domain, hello.pid) == ("job", "", "rack 3", os.getpid())
        assert hello.description == DESCRIPTION
        assert worker.link.worker == "given1"
        assert controller.metadata["authorization"] == "Bearer secret"
        worker.close()


def test_a_final_refusal_is_the_users_error_in_the_controllers_sentence() -> None:
    with SmallController() as controller:
        controller.refusals.append(Refusal("the controller is starting", final=False))
        controller.refusals.append(Refusal("worker a joined with another model"))
        worker = Worker("a", controller)
        with pytest.raises(UserError, match="worker a joined with another model"):
            worker.introduce()
        worker.close()


def test_with_certificates_both_sides_know_each_other(tmp_path: Path) -> None:
    authority(tmp_path, "house")
    for name in ("controller", "worker"):
        certificate(tmp_path, name, "house")
    pair = ((tmp_path / "controller.key").read_bytes(), (tmp_path / "controller.pem").read_bytes())
    known = grpc.ssl_server_credentials([pair], (tmp_path / "house.pem").read_bytes(), require_client_auth=True)
    with SmallController(known) as controller:
        controller.address = controller.address.replace("127.0.0.1", "localhost")  # the name in the certificate
        files = {"tls_ca": "house.pem", "tls_certificate": "worker.pem", "tls_key": "worker.key"}
        worker = Worker("a", controller, **{field: tmp_path / name for field, name in files.items()})
        assert worker.introduce().worker == "a"
        worker.close()


def test_a_worker_that_starts_before_its_controller_waits_for_it() -> None:
    with SmallController() as controller:
        controller.stop()
        worker = Worker("a", controller)
        introduced = worker.does(worker.introduce)
        controller.start()
        assert introduced.result(PATIENCE_SECONDS).worker == "a"
        worker.close()


def test_of_several_addresses_the_one_that_answers_is_found_again_and_again() -> None:
    with SmallController() as first, SmallController() as second:
        second.stop()
        addresses = f"{first.address},{second.address}"
        link = ControllerLink(SessionSettings(controller=addresses, job="job", worker="a"))
        link.introduce(DESCRIPTION, NEW)
        assert first.receives(Hello).worker == "a"
        first.stop()
        second.start()
        assert second.receives(Hello).worker == "a"
        second.stop()
        first.start()
        assert first.receives(Hello).worker == "a"
        link.close()


def test_a_heart_beats_at_the_pace_that_the_welcome_gives_though_nothing_changes() -> None:
    with SmallController() as controller:
        controller.heartbeat_seconds = 0.01
        worker = Worker("a", controller)
        worker.introduce()
        numbers = [controller.receives(Heartbeat).status.sequence for _ in range(5)]
        assert numbers == sorted(set(numbers))
        worker.close()


def test_a_worker_can_end_while_its_controller_hangs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # the system takes the call, and nobody answers
        link = ControllerLink(SessionSettings(controller=f"127.0.0.1:{listener.getsockname()[1]}", job="job"))
        with ThreadPoolExecutor(1) as training:
            introduced = training.submit(link.introduce, DESCRIPTION, NEW)
            assert select.select([listener], [], [], PATIENCE_SECONDS)[0]
            link.driver.on_failure(RuntimeError("enough"))
            with pytest.raises(UserError, match="the session with the controller failed: enough"):
                introduced.result(PATIENCE_SECONDS)


@holds("A process that has not said hello is killed")
def test_a_launched_worker_in_no_world_ends_without_failing_when_its_controller_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        link = ControllerLink(SessionSettings(controller=address, job="job", worker="a", launcher="local"))
        with ThreadPoolExecutor(1) as training:
            introduced = training.submit(link.introduce, DESCRIPTION, NEW)
            assert select.select([listener], [], [], PATIENCE_SECONDS)[0]
            link.driver.on_controller_unreachable(70.0)
            assert link.dialogue.ending is None
            link.driver.on_controller_unreachable(70.1)
            with pytest.raises(SystemExit) as ended:
                introduced.result(PATIENCE_SECONDS)
            assert ended.value.code == NO_CONTROLLER


def test_a_launched_worker_that_waits_to_join_ends_likewise_after_the_jobs_reconnect_seconds() -> None:
    with SmallController() as controller:
        controller.reconnect_seconds = 2.0
        worker = Worker("a", controller, launcher="local")
        worker.introduce()
        worker.link.driver.on_controller_unreachable(62.0)
        assert not worker.link.stopping
        worker.link.driver.on_controller_unreachable(62.1)
        assert worker.takes(Ended).status == NO_CONTROLLER
        worker.close()


@holds("A process that has not said hello is killed")
@pytest.mark.parametrize(("launcher", "member"), [("local", True), ("", False)])
def test_a_member_and_a_worker_that_nobody_launched_wait_for_their_controller(launcher: str, member: bool) -> None:
    with SmallController() as controller:
        worker = Worker("a", controller, launcher=launcher)
        worker.introduce()
        if member:
            begin_a_world(controller, [worker])
        worker.link.driver.on_controller_unreachable(1e6)
        assert not worker.link.stopping
        worker.close()


@rule(
    "A member that was told to end by SIGTERM, and that no controller drains, ends when its grace is over",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal.session.driver", "if self._grace_is_over and seconds > shared.settings.grace_seconds:", "if False:"
        ),
        Edit(
            "shoal.session.driver",
            "time.monotonic() - told_at > self._shared.settings.grace_seconds",
            "time.monotonic() - told_at > 0",
        ),
    ],
)
@pytest.mark.parametrize("launcher", ["local", ""])
def test_a_member_that_was_told_to_end_waits_for_a_controller_to_drain_it_until_its_grace_is_over(
    launcher: str,
) -> None:
    with SmallController() as controller:
        patient = Worker("a", controller, launcher=launcher, grace_seconds=3600.0)
        patient.introduce()
        begin_a_world(controller, [patient])
        patient.link.driver.on_sigterm()
        patient.link.driver.on_controller_unreachable(1e6)
        assert not patient.link.stopping, "its grace lasts"
        patient.close()
        hasty = Worker("b", controller, launcher=launcher, grace_seconds=1e-9)
        hasty.introduce()
        begin_a_world(controller, [hasty])
        hasty.link.driver.on_controller_unreachable(1e6)
        assert not hasty.link.stopping, "nobody told it to end"
        hasty.link.driver.on_sigterm()
        hasty.link.driver.on_controller_unreachable(1e6)
        assert hasty.takes(Ended).status == NO_CONTROLLER
        hasty.close()


# ---- loss


def test_a_world_begins_and_its_members_exchange() -> None:
    with workers("ab") as (controller, them):
        begin_a_world(controller, them)
        assert together(them, Worker.gathers) == [[97, 98], [97, 98]]
        status = controller.receives(Heartbeat, lambda beat: beat.status.generation == 1, by="b").status
        assert (status.state, status.step) == (MemberState.TRAINING, 0)


def test_prepare_wakes_a_training_thread_that_is_blocked() -> None:
    with workers("ab") as (controller, them):
        begin_a_world(controller, them)
        blocked = them[0].does(them[0].gathers)
        controller.sends("a", Prepare(2))
        with pytest.raises(WorldChanged):
            blocked.result(PATIENCE_SECONDS)
        them[0].stops(2)
        assert controller.receives(Inventory, by="a").answers == 2
        controller.sends("b", Prepare(2))
        them[1].stops(2)
        begin_a_world(controller, them, 3)
        assert together(them, Worker.gathers) == [[97, 98], [97, 98]]


@holds("Buffers of an aborted group")
def test_the_group_is_gone_when_the_training_thread_has_heard_of_the_stop() -> None:
    """From then on it uses its buffers again, and a late sender must not write into them."""
    with workers("ab") as (controller, them):
        begin_a_world(controller, them)
        group = them[0].group
        assert group is not None
        group.receive(torch.zeros(4), 1, 3)
        controller.sends("a", Prepare(2))
        them[0].stops(2)
        with pytest.raises(WorldChanged, match="the group is closed"):
            group.send(torch.zeros(4), 1, 3)


def test_prepare_ends_the_building_of_a_group_that_a_dead_member_will_never_join() -> None:
    with workers("ab") as (controller, them):
        with_a_dead_one = at(recovery(1, "abz"), them)
        for worker in them:
            controller.sends(worker.name, Prepare(1))
            worker.stops(1)
            controller.sends(worker.name, PlanMessage(with_a_dead_one))
            controller.receives(Heartbeat, lambda beat: beat.status.state is MemberState.BUILDING, by=worker.name)
        begin_a_world(controller, them, 2)
        assert together(them, Worker.gathers) == [[97, 98], [97, 98]]


def test_a_builder_out_of_reach_is_reported() -> None:
    with workers("ab") as (controller, them):
        plan = replace(at(recovery(1, "abz"), them), builder=2)
        controller.sends("a", Prepare(1))
        them[0].stops(1)
        controller.sends("a", PlanMessage(plan))
        controller.receives(Heartbeat, lambda beat: beat.status.broken == ("z",), by="a")


def test_a_peer_that_closes_its_connection_is_reported() -> None:
    with workers("ab") as (controller, them):
        begin_a_world(controller, them)
        blocked = them[0].does(them[0].gathers)
        them[1].link.close()
        with pytest.raises(WorldChanged):
            blocked.result(PATIENCE_SECONDS)
        assert them[0].link.take(0.0) is None
        controller.receives(Heartbeat, lambda beat: beat.status.broken == ("b",), by="a")


def test_a_ping_is_answered_while_the_training_thread_is_blocked() -> None:
    with workers("ab") as (controller, them):
        begin_a_world(controller, them)
        blocked = them[0].does(them[0].gathers)
        controller.sends("a", Ping(5))
        assert controller.receives(Heartbeat, lambda beat: beat.echo == 5, by="a").status.generation == 1
        assert not blocked.done()
        them[1].gathers()
        blocked.result(PATIENCE_SECONDS)


# ---- planned


def test_a_joiner_begins_with_the_first_message_of_its_world() -> None:
    with workers("abc") as (controller, them):
        a, b, c = them
        begin_a_world(controller, [a, b])
        plan = at(planned(2, 1, "abC"), them)
        for worker in them:
            controller.sends(worker.name, PlanMessage(plan))
        controller.receives(Heartbeat, lambda beat: beat.status.state is MemberState.JOINING, by="c")
        begun = [_until_voted(worker, 2) for worker in (a, b)]
        a.plan, a.group = begun[0].plan, begun[0].group
        b.plan, b.group = begun[1].plan, begun[1].group
        FramedSend(a.group, 2, FIRST_MESSAGE, b"the job's state").wait()
        first = c.takes(Begun)
        assert first.state == b"the job's state"
        c.plan, c.group = first.plan, first.group
        for worker in them:
            worker.begins()
        assert together(them, Worker.gathers) == [[97, 98, 99]] * 3


def _until_voted(worker: Worker, generation: int) -> Any:
    """Votes until the number is this generation's: its group is built by then."""
    while worker.link.enter_vote(every(BLOCKS)) != generation:
        worker.link.leave_vote([worker.link.membership().generation] * 2)
        worker.link.pause(0.01)
    return worker.link.leave_vote([generation] * 2)


def test_a_job_that_ends_while_another_world_is_voted_ends_that_vote_as_a_lost_world_does() -> None:
    with workers("ab") as (controller, them):
        begin_a_world(controller, them)
        a = them[0]
        controller.sends("a", PlanMessage(at(planned(2, 1, "ab"), them)))
        while a.link.enter_vote(every(BLOCKS)) != 2:
            a.link.leave_vote([1, 1])
            a.link.pause(0.01)
        controller.sends("a", Shutdown(Ending.DONE, "done"))
        while not a.link.stopping:
            a.link.pause(0.01)
        with pytest.raises(WorldChanged):
            a.link.leave_vote([2, 2])
        assert a.takes(Ended).ending is Ending.DONE


@holds("A joiner keeps every planned")
def test_a_joiner_keeps_an_older_plan_that_begins_after_all() -> None:
    with workers("abc") as (controller, them):
        a, b, c = them
        begin_a_world(controller, [a, b])
        older, newer = at(planned(2, 1, "abC"), them), at(planned(3, 1, "aC"), them)
        for worker in them:
            controller.sends(worker.name, PlanMessage(older))
        begun = [_until_voted(worker, 2) for worker in (a, b)]
        controller.sends("c", PlanMessage(newer), Ping(1))
        controller.receives(Heartbeat, lambda beat: beat.echo == 1, by="c")
        FramedSend(begun[0].group, 2, FIRST_MESSAGE, b"").wait()
        assert c.takes(Begun).plan.generation == 2


def test_a_planned_change_without_new_members_keeps_the_group() -> None:
    with workers("ab") as (controller, them):
        begin_a_world(controller, them)
        plan = at(planned(2, 1, "ab"), them)
        for worker in them:
            controller.sends(worker.name, PlanMessage(plan))
            begun = _until_voted(worker, 2)
            assert begun.group is worker.group
            worker.plan = begun.plan
            worker.begins()
        assert together(them, Worker.gathers) == [[97, 98], [97, 98]]
        blocked = them[0].does(them[0].gathers)
        controller.sends("a", Prepare(3))
        with pytest.raises(WorldChanged):
            blocked.result(PATIENCE_SECONDS)


def test_a_worker_that_a_plan_leaves_out_has_no_group() -> None:
    with workers("ab") as (controller, them):
        begin_a_world(controller, them)
        controller.sends("b", PlanMessage(at(planned(2, 1, "a"), them)))
        begun = _until_voted(them[1], 2)
        assert begun.group is None
        them[1].link.begin(begun.plan, None)
        them[1].link.publish(replace(NEW, step=3), Telemetry())
        controller.receives(Heartbeat, lambda beat: beat.status.state is MemberState.LEFT, by="b")


# ---- the controller


def test_training_goes_on_while_no_controller_is_there_and_the_next_one_hears_where_it_stands() -> None:
    with workers("ab") as (controller, them):
        begin_a_world(controller, them)
        controller.stop()
        assert together(them, Worker.gathers) == [[97, 98], [97, 98]]
        them[0].link.publish(replace(NEW, step=7), Telemetry())
        controller.start()
        hello = controller.receives(Hello, by="a")
        assert (hello.status.generation, hello.status.state, hello.status.step) == (1, MemberState.TRAINING, 7)
        controller.receives(Hello, by="b")


def test_bytes_that_are_no_message_cost_a_stream_and_nothing_else() -> None:
    with workers("a") as (controller, them):
        begin_a_world(controller, them)
        controller.sends("a", b"\xff\xff garbage")
        assert controller.receives(Hello, by="a").status.generation == 1


def test_an_unsound_plan_ends_the_worker_with_the_reason() -> None:
    with workers("a") as (controller, them):
        controller.sends("a", Prepare(1))
        them[0].stops(1)
        controller.sends("a", PlanMessage(replace(at(recovery(1, "a"), them), steps=True, lanes=3)))
        ended = them[0].takes(Ended)
        assert ended.ending is Ending.FAILED and "plan 1 is unsound" in ended.reason


def test_a_defect_in_the_building_of_a_group_ends_the_worker_with_the_reason() -> None:
    def broken(spec: GroupSpec, cancellation: Cancellation) -> Group:
        raise ZeroDivisionError("a bug")

    with SmallController() as controller:
        worker = Worker("a", controller)
        worker.link = ControllerLink(SessionSettings(controller=controller.address, job="job", worker="a"), broken)
        worker.introduce()
        controller.sends("a", Prepare(1))
        worker.stops(1)
        controller.sends("a", PlanMessage(at(recovery(1, "a"), [worker])))
        ended = worker.takes(Ended)
        assert ended.ending is Ending.FAILED and "a bug" in ended.reason
        worker.close()


def test_a_worker_answers_a_prepare_before_it_closes_its_groups() -> None:
    answered = threading.Event()

    class Closing(SoloGroup):
        def close(self) -> None:
            assert answered.wait(PATIENCE_SECONDS), "the controller plans meanwhile"

    with SmallController() as controller:
        worker = Worker("a", controller)
        settings = SessionSettings(controller=controller.address, job="job", worker="a")
        worker.link = ControllerLink(settings, lambda spec, _: Closing(spec.progress))
        worker.introduce()
        begin_a_world(controller, [worker])
        controller.sends("a", Prepare(2))
        stopping = worker.does(lambda: worker.stops(2))
        controller.receives(Inventory, lambda inventory: inventory.answers == 2, by="a")
        answered.set()
        stopping.result(PATIENCE_SECONDS)
        worker.close()


def test_a_request_of_the_controller_reaches_the_training_thread() -> None:
    with workers("a") as (controller, them):
        controller.sends("a", Ask(AskKind.SAVE, 1))
        them[0].link.pause(PATIENCE_SECONDS)
        assert them[0].link.stopping
        assert them[0].takes(Asked).kind is AskKind.SAVE


# ---- the end


def test_a_failure_is_reported_before_the_worker_ends_though_no_controller_is_there_at_first() -> None:
    with workers("a") as (controller, them):
        controller.stop()
        reporting = them[0].does(lambda: them[0].link.result(Result(3, failure="RuntimeError: boom")))
        controller.start()
        assert controller.receives(Result).failure == "RuntimeError: boom"
        reporting.result(PATIENCE_SECONDS)


def test_a_shutdown_ends_the_session_and_wakes_the_training_thread() -> None:
    with workers("ab") as (controller, them):
        begin_a_world(controller, them)
        blocked = them[0].does(them[0].gathers)
        controller.sends("a", Shutdown(Ending.FAILED, "the job was cancelled"))
        with pytest.raises(WorldChanged):
            blocked.result(PATIENCE_SECONDS)
        assert them[0].takes(Ended) == Ended(Ending.FAILED, "the job was cancelled")


def test_who_was_evicted_comes_back_as_a_joiner_with_a_new_id() -> None:
    with workers("ab") as (controller, them):
        begin_a_world(controller, them)
        before = them[0].link.incarnation
        controller.sends("a", Shutdown(Ending.START_OVER, "evicted"))
        them[0].link.publish(replace(NEW, step=9, holds=every(2)), Telemetry())
        them[0].takes(Ended)
        hello = controller.receives(Hello, lambda hello: hello.worker == "")
        assert (hello.status.step, hello.status.state, hello.status.holds) == (-1, MemberState.WARMING_UP, NO_BLOCKS)
        assert hello.incarnation != before
        them[0].link.end_warm_up()
        controller.receives(Heartbeat, lambda beat: beat.status.state is MemberState.WAITING, by="given1")
