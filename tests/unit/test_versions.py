"""Two releases meet: each pair works, or one refuses the other in a sentence with both releases and both numbers.

A record of the store is in test_roll_back.py, a manifest in test_checkpoint_manifest.py, an answer of REST in
test_client.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from asynchronous import asynchronous
from machine_driver import MADE_OF, NEW, RUN, Driver
from rule import Edit, rule
from shoal.core.membership import Membership
from shoal.session.dialogue import Dialogue, ProcessInfo
from shoal_controller.core.machine.durable import Place
from shoal_controller.core.machine.effects import Send, Spawn
from shoal_controller.core.machine.events import Spawned
from shoal_controller.core.machine.spec import Phase
from shoal_controller.leadership.election import LEADER
from shoal_protos import session_pb2 as pb
from shoal_protos import wire
from shoal_protos.acts import ConfirmLost
from shoal_protos.messages import PROTOCOL_VERSION, Hello, Refusal, Welcome
from shoal_protos.release import RELEASE, _commit
from standing import Stander, standing

COMMIT = "4de8e168a5d14f8a9f0d9f0c7a3f2a4b5c6d7e8f"
BOTH = f"is of shoal 9.9 and speaks protocol 9; this controller is of shoal 0.1.0 and speaks {PROTOCOL_VERSION}"


def answers(job: Driver) -> list[object]:
    return [effect.message for effect in job.of(Send)]


# ---- the name of a release


@pytest.mark.parametrize("kind", ["a branch", "packed", "no branch", "a worktree"])
def test_a_checkout_s_release_names_its_commit(tmp_path: Path, kind: str) -> None:
    git = tmp_path / ".git"
    git.mkdir()
    (git / "HEAD").write_text(f"{COMMIT}\n" if kind == "no branch" else "ref: refs/heads/main\n")
    if kind == "packed":
        (git / "packed-refs").write_text(f"# pack-refs\n{'0' * 40} refs/heads/not/main\n{COMMIT} refs/heads/main\n")
    else:
        (git / "refs/heads").mkdir(parents=True)
        (git / "refs/heads/main").write_text(f"{COMMIT}\n")
    root = tmp_path
    if kind == "a worktree":
        own = git / "worktrees/other"
        own.mkdir(parents=True)
        (own / "HEAD").write_text("ref: refs/heads/main\n")
        (own / "commondir").write_text("../..\n")
        root = tmp_path / "other"
        root.mkdir()
        (root / ".git").write_text(f"gitdir: {own}\n")
    assert _commit(root) == COMMIT


def test_what_is_no_checkout_has_no_commit(tmp_path: Path) -> None:
    assert _commit(tmp_path) == ""
    (tmp_path / ".git").mkdir()
    assert _commit(tmp_path) == ""


# ---- worker and controller


def test_a_hello_of_another_protocol_is_read_as_far_as_it_means_the_same_in_all() -> None:
    """What else it says may mean anything: here, what no hello of this version may say."""
    description, status = pb.Description(lanes=0, stage=77), pb.Status(step=-5)
    hello = pb.Hello(
        version=9, job="job", worker="w0", incarnation="a1", address="nowhere", host="here", pid=7, run="run",
        release="9.9", description=description, status=status,
    )  # fmt: skip
    read = wire.decode_worker(pb.WorkerMessage(hello=hello).SerializeToString())
    assert isinstance(read, Hello)
    assert (read.version, read.job, read.worker, read.incarnation) == (9, "job", "w0", "a1")
    assert (read.host, read.pid, read.run, read.release) == ("here", 7, "run", "9.9")


def test_a_worker_says_which_release_it_runs() -> None:
    dialogue = Dialogue(Membership("w0", "a1"), ProcessInfo("job", "here", 1, "here", "here:1"), MADE_OF, NEW)
    assert (dialogue.say_hello().version, dialogue.say_hello().release) == (PROTOCOL_VERSION, RELEASE)


def test_a_launched_worker_of_another_protocol_fails_a_job_that_has_not_begun_instead_of_being_replaced() -> None:
    job = Driver(wanted=1, launcher="local", command=("train",))
    (spawned,) = job.of(Spawn)
    job.feed(Spawned(spawned.worker, Place.of_process(7)))
    job.hello(spawned.worker, version=9, release="9.9", run=RUN)
    assert job.view.phase is Phase.FAILED and BOTH in job.view.reason
    assert not job.of(Spawn)


@rule(
    "A member whose protocol is another one than the controller's trains on until it is given up, and ends then",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.admission",
            "ends_members=bool(hello.run) and not is_member",
            "ends_members=bool(hello.run)",
        ),
        Edit(
            "shoal_controller.core.machine.phases.admission",
            "ends_members=bool(hello.run) and not is_member",
            "ends_members=False",
        ),
    ],
)
def test_a_member_of_another_protocol_is_refused_and_ends_once_it_is_given_up() -> None:
    job = Driver()
    job.start(2)
    job.restart()
    for worker in ("w0", "w1"):
        job.hello(worker, version=9, release="9.9")
        job.connections.pop(worker)
        (refusal,) = answers(job)
        assert isinstance(refusal, Refusal) and BOTH in refusal.sentence and not refusal.ends_members
    job.wait(job.spec.reconnect_seconds + 5)
    assert job.view.phase is Phase.RUNNING and BOTH in job.view.reason
    job.feed(ConfirmLost("w0"))
    job.hello("w0", version=9, release="9.9")
    (refusal,) = answers(job)
    assert isinstance(refusal, Refusal) and refusal.final and refusal.ends_members


# ---- worker and worker


@rule(
    "Workers that exchange state in another form are never in one plan",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.admission",
        "    if theirs == jobs.peers or (other := _other(turn, hello)) is None:",
        "    if (other := _other(turn, hello)) is None or True:",
    ),
)
def test_a_worker_that_exchanges_state_in_another_form_is_refused_before_any_plan_has_it() -> None:
    job = Driver(made_of=replace(MADE_OF, peers=1))
    job.start(2)
    job.hello("w2", description=replace(job.made_of, peers=2), release="9.9")
    (refusal,) = answers(job)
    assert refusal == Refusal(
        "worker w2 on host is of shoal 9.9 and exchanges state with others in form 2; worker w0 on host is of an older "
        "shoal, and the job's form is 1. Start all workers of a job with one release."
    )
    assert "w2" not in job.job.durable.roster


def test_where_no_other_worker_is_left_the_job_takes_the_form_of_the_one_that_comes() -> None:
    job = Driver(wanted=1, made_of=replace(MADE_OF, peers=1))
    job.start(1)
    job.exit("w0")
    job.hello("w1", description=replace(job.made_of, peers=2), release="9.9")
    assert isinstance(answers(job)[0], Welcome)
    assert job.job.durable.description is not None and job.job.durable.description.peers == 2
    assert job.job.durable.roster["w1"].release == "9.9"


def test_a_launched_worker_that_is_refused_while_others_train_is_replaced_after_a_while_only() -> None:
    """Its replacement would be refused too."""
    job = Driver(wanted=2, launcher="local", command=("train",), made_of=replace(MADE_OF, peers=1))
    for effect in job.of(Spawn):
        job.feed(Spawned(effect.worker, Place.of_process(7)))
        job.hello(effect.worker)
    job.recover()
    job.exit("w1")
    assert [effect.worker for effect in job.of(Spawn)] == ["w2"]
    job.recover()
    job.hello("w2", description=replace(job.made_of, peers=2), release="9.9")
    assert isinstance(answers(job)[0], Refusal)
    job.exit("w2", code=2)
    assert not [effect for effect in job.wait(20) if isinstance(effect, Spawn)]
    assert [effect.worker for effect in job.wait(20) if isinstance(effect, Spawn)] == ["w3"]


# ---- controllers of one store


@asynchronous
async def test_a_controller_does_not_stand_for_election_beside_one_that_writes_later_records(tmp_path: Path) -> None:
    """What that one has written this one could not serve."""
    async with standing(tmp_path, "a") as (store, (a,)):
        older, newer = (
            Stander(store, name, release=release, format=number)
            for name, release, number in (("old", "0.1", 6), ("new", "0.2", 7))
        )
        while older.election.newer is None or a.election.newer is None:
            await store.get(LEADER)
        assert older.election.outdated == (
            "this controller is of shoal 0.1 and reads records of the store up to format 6; the one at new:1 is of "
            "shoal 0.2 and writes format 7, so this one does not stand for election while that one is there"
        )
        await a.end()
        await newer.until(lambda: newer.leads)
        assert not older.leads and not newer.election.outdated
        await newer.end()
        await older.until(lambda: older.leads)
        await older.end()
