"""Scenarios: a transcript of commands, each followed by what it leads to.

    job workers=3 lanes=6 blocks=12 launcher=none
    > start
    > until step 2
    > kill w2 at vote
    > until settled

A job's line and the lines with `>` are commands; the lines below one are its effects, which `play` gives back. Nothing
is left to chance, so a transcript changes only where the behaviour does. docs/simulation.md lists the commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import takewhile

from shoal_controller.core.machine import effects
from shoal_controller.core.machine.view import view
from shoal_protos.acts import Cancel, ConfirmLost, DrainWorker, Pause, Resume, Save, Scale

from .cells import shape_of
from .liars import Liars
from .pods import PodLauncher
from .seeds import settled
from .simulation import Simulation
from .stored import StoredJob
from .watch import Violation
from .worker import SimWorker

PATIENCE_SECONDS = 60.0


class Impatient(Exception):
    """What a scenario waits for does not happen."""


class Otherwise(Exception):
    """An effect is another one than the transcript's."""


def goes_otherwise(text: str) -> bool:
    """Whether playing a scenario gives another transcript, played no further than to where that shows."""
    try:
        return play(text, compare=True) != text
    except Otherwise:
        return True


def play(text: str, compare: bool = False) -> str:
    """The transcript of a scenario, made anew. `compare`: raises `Otherwise` once an effect differs."""
    lines = [line.rstrip() for line in text.splitlines()]
    comments = [line for line in lines if line.startswith("#")]
    job = next(line for line in lines if line.startswith("job "))
    script = Script(job)
    transcript = [*comments, job]
    for place, command in enumerate(lines):
        if not command.startswith("> "):
            continue
        transcript.append(command)
        script.expected = list(takewhile(lambda line: line.startswith("  "), lines[place + 1 :])) if compare else None
        try:
            script.do(command[2:])
        except (Violation, Impatient) as error:
            transcript += [*script.effects(), f"  !! {error}"]
            break
        transcript += script.effects()
    return "\n".join(transcript) + "\n"


class Script:
    """One scenario being played."""

    def __init__(self, job: str) -> None:
        shape = dict(pair.split("=") for pair in job.split()[1:])
        defaults: dict[str, object] = {
            "still": True, "workers": 8, "wanted": shape.pop("workers"), "lanes": 8, "blocks": 8, "mirrors": 1,
            "launcher": "none", "min_workers": shape_of(0, shape.get("cell", "")).processes, "max_steps": 1000,
        }  # fmt: skip
        numbers = {name: int(value) if value.isdigit() else value for name, value in shape.items()}
        self.simulation = Simulation(0, **{**defaults, **numbers})
        self._shown = 0
        self._backup: StoredJob | None = None
        self.expected: list[str] | None = None
        """Effects of the command that is being done; None: nobody compares."""

    def do(self, command: str) -> None:
        verb, *words = command.split()
        getattr(self, f"do_{verb}")(*words)

    def effects(self) -> Iterator[str]:
        """What the last command led to."""
        log = self.simulation.log
        lines, self._shown = log[self._shown :], len(log)
        return (f"  {line[10:]}" for line in lines)

    def _compare(self) -> None:
        if self.expected is None:
            return
        seen = len(self.simulation.log) - self._shown
        last = f"  {self.simulation.log[-1][10:]}".rstrip() if seen else ""
        if seen > len(self.expected) or (seen and last != self.expected[seen - 1]):
            raise Otherwise(last)

    # ---- waiting

    def _wait(self, goal: str, is_so: Callable[[], bool]) -> None:
        clock = self.simulation.clock
        deadline = clock.now + PATIENCE_SECONDS
        while not is_so():
            if clock.now > deadline:
                raise Impatient(f"waited in vain for {goal}")
            clock.step()
            self._compare()

    def _at(self, worker: str, words: tuple[str, ...]) -> SimWorker:
        """The process of that id, once it is in a phase of its step (`at vote`) or in a state (`at joining`)."""
        if words:
            awaited = " ".join(words[1:])
            self._wait(f"{worker} {' '.join(words)}", lambda: self._is_at(worker, awaited))
        return self.simulation.by_id(worker)

    def _is_at(self, worker: str, awaited: str) -> bool:
        here = [process for process in self.simulation.workers() if process.membership.worker == worker]
        return any(awaited in (process.training.step_phase, process.membership.state.value) for process in here)

    def do_until(self, goal: str, *words: str) -> None:
        simulation = self.simulation
        if goal == "step":
            self._wait(f"step {words[0]}", lambda: simulation.watch.top >= int(words[0]))
        elif goal == "phase":
            self._wait(f"phase {words[0]}", lambda: self._view().phase.value == words[0])
        elif goal == "generation":
            self._wait(f"generation {words[0]}", lambda: self._view().generation == int(words[0]))
        elif goal == "settled":
            begin = simulation.watch.commits
            self._wait("everyone in one world that trains", lambda: settled(simulation, begin))
        elif words[0] == "promises":
            process = simulation.by_id(goal)
            self._wait(f"{goal} promises {words[1]}", lambda: process.membership.newest_known == int(words[1]))
        else:
            self._at(goal, words)

    def do_run(self, seconds: str) -> None:
        self.simulation.clock.run_until(self.simulation.clock.now + float(seconds))

    # ---- processes

    def do_start(self) -> None:
        self.simulation.host.start()
        if self.simulation.spec.launcher == "none":
            a_moment = 0.001  # after the tick
            began = self.simulation.spec.reconnect_seconds  # the controller was there before
            self.simulation.clock.run_until(began + a_moment)
            for _ in range(self.simulation.spec.wanted):
                self.simulation.start_process()

    def do_come(self, claimed: str = "") -> None:
        self.simulation.start_process(claimed)

    def do_old(self, claimed: str = "") -> None:
        """A worker of an earlier run of this job's name, which came further."""
        Liars(self.simulation).come_from_an_earlier_run(claimed)

    def do_lie(self, worker: str, name: str, value: str) -> None:
        """One heartbeat says a number that cannot be."""
        self.simulation.liars.add(worker)
        self.simulation.by_id(worker).session.lie(name, int(value))

    def do_kill(self, worker: str, *at: str) -> None:
        self._at(worker, at).end(-9, "killed")

    def do_end(self, worker: str) -> None:
        """Its script ends at the next step, whatever the others' do."""
        self.simulation.by_id(worker).training.end.is_through = True

    def do_fail(self, worker: str, *at: str) -> None:
        self._at(worker, at).fail("ValueError: no such column")

    def do_freeze(self, worker: str, *at: str) -> None:
        self._at(worker, at).freeze()

    def do_thaw(self, worker: str) -> None:
        self.simulation.by_id(worker).thaw()

    # ---- pods

    def do_room(self, pods: str) -> None:
        """So many pods may run from now on."""
        self._pods.room = int(pods)
        self._pods.look_again()

    def do_image(self, there: str) -> None:
        """`lost` or `found`: whether the image of the workers can be pulled."""
        self._pods.image_is_there = there == "found"
        self._pods.look_again()

    def do_preempt(self, *workers: str) -> None:
        """Their nodes get a taint that says that they are to go."""
        for worker in workers:
            self._pods.preempt(worker)

    def do_spare(self, worker: str) -> None:
        self._pods.spare(worker)

    def do_vanish(self, *workers: str) -> None:
        """Their nodes are gone."""
        for worker in workers:
            self._pods.vanish(worker)

    @property
    def _pods(self) -> PodLauncher:
        launcher = self.simulation.launcher
        assert isinstance(launcher, PodLauncher), "the job's launcher is not kubernetes"
        return launcher

    # ---- the network and the controller

    def do_cut(self, *workers: str) -> None:
        for worker in self._those(workers):
            worker.set_cut(True)

    def do_heal(self, *workers: str) -> None:
        for worker in self._those(workers):
            worker.set_cut(False)

    def do_firewall(self, position: str, *workers: str) -> None:
        """`up` or `down`: the controller's connections to these workers are refused, theirs to it pass."""
        for worker in self._those(workers):
            worker.walled = position == "up"

    def _those(self, workers: tuple[str, ...]) -> list[SimWorker]:
        return self.simulation.workers() if workers == ("all",) else [self.simulation.by_id(name) for name in workers]

    def do_sever(self, source: str, to: str) -> None:
        """Whatever one has sent to the other and will send is lost; neither notices."""
        self.simulation.groups.severed.add((self.simulation.by_id(source), self.simulation.by_id(to)))

    def do_drop(self, source: str, to: str, *both: str) -> None:
        """What one sends to the other arrives when the link is mended; nobody notices, and no new group holds both."""
        self.simulation.links.drop(self.simulation.by_id(source), self.simulation.by_id(to), bool(both))

    def do_mend(self, one: str, other: str) -> None:
        self.simulation.links.mend(self.simulation.by_id(one), self.simulation.by_id(other))

    def do_stick(self, worker: str) -> None:
        self.simulation.by_id(worker).training.code.stick()

    def do_unstick(self, worker: str) -> None:
        self.simulation.by_id(worker).training.code.unstick()

    def do_slow(self, worker: str, seconds: str) -> None:
        self.simulation.by_id(worker).training.code.slow_down(float(seconds))

    def do_break(self, one: str, other: str) -> None:
        self.simulation.break_between(self.simulation.by_id(one), self.simulation.by_id(other))

    def do_tear(self, one: str, other: str) -> None:
        """Only one of two notices that their connection broke; the next group has connections of its own."""
        worker, peer = self.simulation.by_id(one), self.simulation.by_id(other)
        worker.awake(worker.training.peer_gone, worker.membership.generation, peer)
        self.simulation.groups.severed.clear()

    def do_fault(self, one: str, other: str) -> None:
        """From now on no group that holds both can be built."""
        pair = [self.simulation.by_id(one), self.simulation.by_id(other)]
        self.simulation.link_faults.add(frozenset(worker.pid for worker in pair))
        self.simulation.break_between(*pair)

    def do_hang(self, worker: str) -> None:
        """Its stream breaks."""
        stream = self.simulation.by_id(worker).session.stream
        assert stream is not None
        stream.break_off()

    def do_controller(self, act: str, *words: str) -> None:
        host = self.simulation.host
        if act == "dies" and words:  # after N effects
            host.crash_after = int(words[1])
            self._wait("the controller's death", lambda: not host.alive)
        elif act == "dies":
            host.crash()
        elif act == "backs":  # its store up
            self._backup = host.store.copy()
        elif act == "restores":  # what it was then
            assert self._backup is not None, "nothing was backed up"
            host.put_back(self._backup)
            host.start()
        elif act == "forgets":  # it is started again with an empty store
            Liars(self.simulation).stand_in(60.0)
        elif act == "late":  # by SECONDS with every tick
            host.late = float(words[0])
        elif act == "will":  # die before the next effect of a kind
            host.crash_before = getattr(effects, words[-1])
        else:
            host.start()

    # ---- checkpoints

    def do_flip(self, worker: str, block: str) -> None:
        """One bit of a block's state in the memory of a worker that holds it."""
        self.simulation.bits.flip(self.simulation.by_id(worker), int(block))

    def do_pace(self, worker: str, factor: str) -> None:
        """From now on its lanes take so many times as long."""
        self.simulation.speeds.slow(self.simulation.by_id(worker), float(factor))

    def do_damage(self) -> None:
        """The newest checkpoint cannot be read from now on."""
        self.simulation.checkpoints.damaged.add(max(self.simulation.checkpoints.there).path)

    # ---- an operator

    def do_drain(self, worker: str) -> None:
        self.simulation.host.request(DrainWorker(worker, 5.0))

    def do_lost(self, worker: str) -> None:
        self.simulation.host.request(ConfirmLost(worker))

    def do_sigterm(self, worker: str) -> None:
        process = self.simulation.by_id(worker)
        process.awake(process.session.request_drain)

    def do_scale(self, workers: str) -> None:
        self.simulation.host.request(Scale(int(workers)))

    def do_pause(self) -> None:
        self.simulation.host.request(Pause())

    def do_resume(self) -> None:
        self.simulation.host.request(Resume())

    def do_save(self) -> None:
        self.simulation.host.request(Save())

    def do_cancel(self) -> None:
        self.simulation.host.request(Cancel())

    def _view(self) -> object:
        return view(self.simulation.host.job, self.simulation.host.now)

    def do_show(self) -> None:
        """What `shoal describe` would say."""
        seen = self._view()
        workers = [
            f"{w.worker} {w.state.value} lanes {len(w.lanes)} blocks {w.blocks}+{w.mirrored_blocks}"
            for w in seen.workers
            if w.state.value not in ("lost", "left")
        ]
        self.simulation.say(f"{seen.phase.value}, generation {seen.generation}: {'; '.join(workers)}")
        if seen.reason:
            self.simulation.say(f"because {seen.reason}")
