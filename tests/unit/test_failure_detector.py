"""Who is here: a silent worker is asked before it is suspected, and evicted as soon as it is."""

from dataclasses import replace

from rule import Edit, holds, rule
from shoal_controller.core.machine.durable import Standing
from shoal_controller.core.machine.effects import Note, Probe, Send
from shoal_controller.core.machine.events import Connected, Disconnected, MessageReceived, Tick
from shoal_controller.core.machine.machine import new_job, step, view
from shoal_controller.core.machine.spec import JobSpec, State
from shoal_protos.description import Description
from shoal_protos.messages import PROTOCOL_VERSION, Heartbeat, Hello, MemberState, Ping, Status, Telemetry
from shoal_protos.plan import EVERYONE

TICK_SECONDS = 0.125  # no rounding in sums of it
MADE_OF = Description(4, 8, 4096, 8, EVERYONE, 0, 100, (), "SGD", {}, {}, False, False)
WARMING_UP = Status(sequence=0, generation=0, state=MemberState.WARMING_UP, promised=0, step=-1, committed_in=0)


class Silence:
    """Three workers said hello at 0; w1 and w2 go on with heartbeats, w0 says nothing more."""

    def __init__(self, **spec):
        spec = {"heartbeat_seconds": 1.0, "reconnect_seconds": 0.5, **spec}
        self.job, self.now, self.sequence = new_job(JobSpec("job", 3, **spec), 0.0), 0.0, 0
        self.happened, self.sent, self.asked_on = [], [], []
        for number in range(3):
            self.feed(Connected(number, self.hello_of(number)))
        self.now = TICK_SECONDS / 2  # ticks fall between the limits, not on them

    def hello_of(self, number):
        worker = f"w{number}"
        return Hello(PROTOCOL_VERSION, "job", worker, f"{worker}.1", "127.0.0.1:9", "host", 1, "", MADE_OF, WARMING_UP)

    def feed(self, event):
        self.job, effects = step(self.job, [event], self.now)
        for effect in effects:
            if isinstance(effect, Note) and effect.worker == "w0":
                self.happened.append((round(self.now, 1), effect.kind))
            elif isinstance(effect, Note) and effect.kind in ("silent", "heard"):
                self.sent.append(effect.message)
            elif isinstance(effect, Send) and effect.connection in (0, 3) and isinstance(effect.message, Ping):
                self.happened.append((round(self.now, 1), "ping"))
                self.asked_on.append(effect.connection)

    def beat(self, *connections):
        self.sequence += 1
        for connection in connections:
            self.feed(MessageReceived(connection, Heartbeat(replace(WARMING_UP, sequence=self.sequence), Telemetry())))

    def last(self, seconds, beating=(1, 2)):
        """Time passes."""
        for tick in range(1, round(seconds / TICK_SECONDS) + 1):
            self.now += TICK_SECONDS
            self.feed(Tick())
            if tick % 2 == 0:
                self.beat(*beating)

    @property
    def why(self):
        """Why w0 was evicted."""
        return self.job.durable.roster["w0"].why

    @property
    def states(self):
        return [worker.state for worker in view(self.job, self.now).workers]


def test_a_frozen_worker_has_missed_its_answer_when_it_is_suspected_so_it_is_evicted_at_once():
    world = Silence()
    world.last(4.0)
    assert world.happened == [(0.0, "joined"), (2.4, "ping"), (3.1, "suspected"), (3.1, "lost")]
    assert world.job.durable.roster["w0"].standing is Standing.LOST


def test_an_eviction_tells_for_how_long_nothing_was_heard_by_the_clock_and_never_less_than_it_is_judged_by():
    suspected = "no answer to a ping (suspected after 3 s)"
    world = Silence()
    world.last(4.0)
    assert world.why == f"silent for 3.1 s and {suspected}"
    world = Silence()
    world.last(1.0)
    world.now += 0.9 * TICK_SECONDS
    world.beat(0)  # counted from the last tick, it is silent for 3.1 s when the clock says 3.0 s
    world.last(4.0)
    assert world.why == f"silent for 3.1 s and {suspected}"
    world = Silence(stall_seconds=20.0)
    world.last(24.0, beating=(2,))  # of a majority, whose silence is not counted
    assert world.why == f"silent for 20.1 s and {suspected}"


def test_a_slow_worker_that_answers_is_never_suspected():
    world = Silence()
    world.last(2.8)
    world.beat(0)
    world.last(2.0)
    assert world.happened == [(0.0, "joined"), (2.4, "ping")]
    assert world.states == [State.STARTING] * 3


@holds("A silent worker is asked")
def test_who_comes_back_and_falls_silent_again_is_asked_on_its_new_stream():
    world = Silence()
    world.last(2.8)
    world.feed(Connected(3, world.hello_of(0)))
    world.last(3.0)
    assert world.asked_on == [0, 3]


@rule(
    "The wait for a silent majority ends after `stall_seconds` if others can be heard: hosts that vanish refuse "
    "no connection",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.failure_detector",
            "    due = turn.now - turn.spec.stall_seconds\n",
            "    due = 0.0\n",
        ),
        Edit(
            "shoal_controller.core.machine.phases.failure_detector",
            "    if not silence.hears_somebody(turn.job, quiet):\n        return []\n",
            "",
            by="test_where_nobody_is_heard_nobody_is_evicted_however_long_that_lasts",
        ),
        Edit(
            "shoal_controller.core.machine.phases.failure_detector",
            "if turn.record(worker).serves and silence.last_heard",
            "if silence.last_heard",
            by="test_of_a_silent_majority_that_is_gone_for_good_each_is_told_of_once",
        ),
    ],
)
def test_where_nobody_is_heard_nobody_is_evicted_however_long_that_lasts():
    world = Silence(stall_seconds=20.0)
    world.last(60.0, beating=())
    assert [record.standing for record in world.job.durable.roster.values()] == [Standing.HERE] * 3


@holds("The wait for a silent")
def test_of_a_silent_majority_that_is_gone_for_good_each_is_told_of_once():
    world = Silence(stall_seconds=20.0)
    world.last(60.0, beating=(2,))
    assert [kind for _, kind in world.happened] == ["joined", "lost"]


@rule(
    "A silent worker is asked on the stream that it has now, and has its time to answer, before it is evicted",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.failure_detector",
            "if turn.job.listening.uncut - process.ping.at >= PING_SECONDS:",
            "if True:",
            by="test_nobody_is_evicted_before_a_ping_had_its_time",
        ),
        Edit(
            "shoal_controller.core.machine.phases.admission",
            "            ping=None,\n",
            "",
            by="test_who_comes_back_and_falls_silent_again_is_asked_on_its_new_stream",
        ),
    ],
)
def test_nobody_is_evicted_before_a_ping_had_its_time():
    world = Silence(heartbeat_seconds=0.2)
    world.last(0.5)
    assert world.happened[1:] == [(0.6, "ping")]
    world.last(TICK_SECONDS)
    assert world.happened[2:] == [(0.7, "suspected")]
    assert world.states[0] is State.SUSPECTED
    world.last(0.5)
    assert world.happened[3:] == [(1.1, "lost")]


def test_healthy_workers_are_not_asked():
    world = Silence(heartbeat_seconds=0.2, suspect_after=1)
    world.last(1.0, beating=(0, 1, 2))
    assert world.happened == [(0.0, "joined")]


@rule(
    "Silence of more than half of the members evicts nobody",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.silence",
        "    return bool(silent) and 2 * len(silent) > len(_counting(job))\n",
        "    return False\n",
    ),
)
def test_a_silent_majority_is_neither_suspected_nor_evicted_and_the_job_says_why_it_waits():
    world = Silence(stall_seconds=100.0)
    world.last(6.0, beating=(2,))
    assert world.happened == [(0.0, "joined")]
    assert world.states == [State.STARTING] * 3
    says = "2 of 3 workers are silent (w0 for 6 s, w1 for 6 s); nobody is evicted, because the controller may be"
    assert says in view(world.job, world.now).reason
    assert "Waiting for up to 94 s more" in view(world.job, world.now).reason
    assert len(world.sent) == 1 and world.sent[0].startswith("2 of 3 workers are silent (w0 for 3 s, w1 for 3 s)")


def test_of_a_silent_majority_that_was_evicted_the_job_does_not_say_that_it_waits_for_it():
    world = Silence(stall_seconds=20.0)
    world.last(24.0, beating=(2,))
    assert view(world.job, world.now).reason.endswith(
        "2 of 3 workers are silent (w0 for 24 s, w1 for 24 s) and were evicted; nobody else is evicted before 20 s of "
        "silence (stall_seconds), because the controller may be the one that is cut off. If they are dead, say so: "
        '"shoal lost job WORKER"'
    )
    world.last(30.0, beating=())
    says = view(world.job, world.now).reason
    assert "w2 for 30 s); nobody else is evicted, because the controller may be the one that is cut off" in says
    assert "Waiting until one of them is heard" in says


@rule(
    "… and the time during which the controller was cut off counts as nobody's silence",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.silence", "uncut if is_cut_off(job) else uncut + passed", "uncut + passed"
    ),
    after="Silence is counted in the",
)
def test_as_most_are_heard_again_the_time_of_the_cut_is_nobodys_silence():
    world = Silence()
    world.last(20.0, beating=())
    world.last(1.25, beating=(1, 2))
    world.last(1.0, beating=(0, 1, 2))
    assert world.happened == [(0.0, "joined"), (21.2, "ping")]
    assert world.sent[1:] == ["at least half of the workers are heard again, or known to be dead"]
    assert "silent" not in view(world.job, world.now).reason


@rule(
    "… and who lost its stream meanwhile has `reconnect_seconds` from when others come back, as after a "
    "controller's start: each looks for a controller at its own pace",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.failure_detector", " and not silence.may_be_on_its_way(turn):\n", ":\n"
    ),
    after="… and the time during",
)
def test_after_a_cut_that_broke_all_streams_who_comes_back_last_has_as_long_as_after_a_start():
    """Each looks for a controller at its own pace: the others are back, and it is on its way."""
    for returns in (True, False):
        world = Silence(reconnect_seconds=6.0)
        world.last(8.0, beating=(0, 1, 2))
        for connection in range(3):
            world.feed(Disconnected(connection, "its stream ended"))
        world.last(14.0, beating=())
        for connection in (1, 2):
            world.feed(Connected(3 + connection, world.hello_of(connection)))
        world.last(5.0, beating=(4, 5))
        assert "lost" not in dict(world.happened).values()
        if returns:
            world.feed(Connected(3, world.hello_of(0)))
        world.last(6.0, beating=(3, 4, 5) if returns else (4, 5))
        assert ("lost" in dict(world.happened).values()) is not returns


@rule(
    "Silence is counted in the controller's own running time: a tick comes after everything in the inbox, and "
    "adds at most one heartbeat interval",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.silence",
        "    passed = min(turn.now - since, turn.spec.heartbeat_seconds)\n",
        "    passed = turn.now - since\n",
    ),
)
def test_a_controller_that_was_stopped_evicts_nobody_for_its_own_absence():
    world = Silence()
    world.last(1.0, beating=(0, 1, 2))
    world.now += 60.0
    world.feed(Tick())
    world.last(1.0, beating=(0, 1, 2))
    assert world.happened == [(0.0, "joined")]


@holds("Silence is counted in the")
def test_a_controller_whose_every_tick_is_late_still_evicts_a_frozen_worker():
    world = Silence()
    for _ in range(4):
        world.now += 7.0
        world.beat(1, 2)
        world.feed(Tick())
    assert [kind for _, kind in world.happened] == ["joined", "ping", "suspected", "lost"]
    assert [record.standing for record in world.job.durable.roster.values()] == [
        Standing.LOST, Standing.HERE, Standing.HERE,
    ]  # fmt: skip


def test_whose_stream_broke_is_asked_for_with_every_tick_at_first_and_then_once_a_second():
    world, probes = Silence(), []
    world.job, effects = step(world.job, [Disconnected(0, "its stream ended")], world.now)
    for _ in range(32):  # four seconds
        probes.append(sum(isinstance(effect, Probe) and effect.worker == "w0" for effect in effects))
        world.now += TICK_SECONDS
        world.job, effects = step(world.job, [Tick()], world.now)
    assert probes[:8] == [1] * 8
    assert sum(probes[8:]) == 3
