"""Data workers: processes that read micro-batches ahead for one training process, as many as a DataLoader would.

A batch is a function of its place (step, lane, micro-batch), so what was read ahead stays right through every change of
the world; what a change makes useless is thrown away on arrival. `DataWorkers` is called on the training thread only,
and started before the session with the controller, so that a fork copies no thread and no connection of it.

`serve` is the life of such a process: it reads in the order in which it is asked, and ends when its training process
does, however that ends: its socket closes, and on Linux the kernel kills it. Signals to a whole group of processes
(Ctrl-C, a notice of preemption) are left to the training process. It knows no group, no controller and no accelerator.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.utils.data._utils.worker as torch_worker
from shoal_protos.errors import PeerError, UserError

from shoal.core.stream_position import Bookmark
from shoal.data.batch_memory import receive, send
from shoal.data.source import Place, Read, Source, where

Before = Callable[[Place], Bookmark | None]
END_SECONDS = 5.0
"""For a data worker to finish the batch at hand when it is told to end; then it is killed."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How a DataLoader reads."""

    processes: int = 0
    """0: on the training thread."""
    ahead: int = 2
    """Batches that each process reads ahead."""
    start_method: str | None = None
    """fork | forkserver | spawn; None: what Python takes here."""
    timeout_seconds: float = 0
    """For one batch; 0: none."""
    init: Callable[[int], None] | None = None
    """Called in each process with its number."""
    gives_batches: bool = False
    """Whether each item of a stream is a micro-batch (`batch_size=None`)."""
    pinned: bool = False
    """Whether batches go to an accelerator through pinned memory, beside its work."""


HERE = Reading()


class _DataWorker:
    """One process, and what it was asked for."""

    def __init__(self, process: Any, channel: socket.socket) -> None:
        self.process, self.channel = process, channel
        self.asked: deque[Place] = deque()
        """In the order in which it answers."""
        self.lanes: set[int] = set()
        """Those that it has read, where that matters."""


class DataWorkers:
    """Processes that read for this one. Raises `UserError` where they cannot be started."""

    def __init__(self, source: Source, reading: Reading, seed: int) -> None:
        self._source, self._reading = source, reading
        self._depth = reading.processes * reading.ahead
        self._context = multiprocessing.get_context(reading.start_method)
        self._ready: dict[Place, Read | Failure] = {}
        self._workers: list[_DataWorker] = []
        try:
            for number in range(reading.processes):
                self._workers.append(self._start(number, seed))
        except BaseException:
            self.close()
            raise

    def _start(self, number: int, seed: int) -> _DataWorker:
        ours, theirs = socket.socketpair()
        method = self._context.get_start_method()
        is_watched = method != "forkserver" and threading.current_thread() is threading.main_thread()
        parent = os.getpid() if is_watched else None
        duty = Duty(number, self._reading.processes, seed, self._source, self._reading.init, parent)
        others = [worker.channel for worker in self._workers] + [ours] if method == "fork" else []
        name = f"shoal data worker {number}"
        process = self._context.Process(target=serve, args=(duty, theirs, others), name=name, daemon=True)  # type: ignore[attr-defined]
        try:
            with warnings.catch_warnings():
                # Python warns of forks beside threads: none of ours runs yet, and the child calls nothing of others'
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            ours.close()
            raise UserError(
                f"dataset {type(self._source.dataset).__name__} cannot be given to data workers that are started by "
                f"{method}: {error}. Define the dataset, its transforms, collate_fn and worker_init_fn at the top of a "
                'module, or use multiprocessing_context="fork" in the DataLoader.'
            ) from None
        finally:
            theirs.close()
        return _DataWorker(process, ours)

    # ---- batches

    def take(self, place: Place, upcoming: Iterable[Place], before: Before) -> Read:
        """The batch, in host memory, and from now on those of the next places are read. `before`: the bookmark from
        which a place is quicker. Raises what reading it has raised, `PeerError` where a data worker is gone.
        """
        wanted = dict.fromkeys([place, *islice(upcoming, self._depth)])
        self._take_arrived(wanted)
        self._ready = {known: batch for known, batch in self._ready.items() if known in wanted}
        asked = {one for worker in self._workers for one in worker.asked}
        for one in wanted:
            if one not in self._ready and one not in asked:
                self._ask(one, before(one))
        while place not in self._ready:
            self._receive(next(worker for worker in self._workers if place in worker.asked), wanted)
        found = self._ready.pop(place)
        if isinstance(found, Failure):
            raise found.error
        return found

    def _ask(self, place: Place, bookmark: Bookmark | None) -> None:
        worker = self._reader_of(place)
        worker.asked.append(place)
        text = bookmark.to_text().encode() if bookmark is not None else b""
        try:
            worker.channel.sendall(TASK.pack(*place, len(text)) + text)
        except OSError:
            raise self._gone(worker) from None

    def _reader_of(self, place: Place) -> _DataWorker:
        least = min(self._workers, key=lambda worker: (len(worker.lanes), len(worker.asked)))
        if not self._source.keeps_lanes:
            return least
        lane = place[1]
        worker = next((worker for worker in self._workers if lane in worker.lanes), least)
        worker.lanes.add(lane)
        return worker

    def _take_arrived(self, wanted: Iterable[Place]) -> None:
        """Whatever lies there, so that nothing piles up."""
        while arrived := wait([worker.channel for worker in self._workers if worker.asked], 0):
            for worker in self._workers:
                if worker.channel in arrived:
                    self._receive(worker, wanted)

    def _receive(self, worker: _DataWorker, wanted: Iterable[Place]) -> None:
        seconds = self._reading.timeout_seconds or None
        if not wait([worker.channel], seconds):
            raise UserError(
                f"{self._called(worker)} has not given the batch of {where(worker.asked[0])} for {seconds:g} s, the "
                "DataLoader's timeout."
            )
        try:
            batch = receive(worker.channel)
        except (EOFError, OSError):
            raise self._gone(worker) from None
        place = worker.asked.popleft()
        if place in wanted:
            self._ready[place] = batch

    def _called(self, worker: _DataWorker) -> str:
        number = self._workers.index(worker)
        return f"data worker {number} of {len(self._workers)} (pid {worker.process.pid})"

    def _gone(self, worker: _DataWorker) -> PeerError:
        worker.process.join(END_SECONDS)
        code = worker.process.exitcode
        at = f" while it was to read {self._source.samples(worker.asked[0])}" if worker.asked else ""
        if code is not None and code >= 0:
            return PeerError(
                f"{self._called(worker)} has ended with status {code}{at}. Something there has ended its process, such "
                "as os._exit; look for its own message above."
            )
        how = "has ended" if code is None else f"was killed by {signal.Signals(-code).name}"
        return PeerError(
            f"{self._called(worker)} {how}{at}. A common cause is memory: use fewer num_workers, a smaller "
            "prefetch_factor, or look for its own message above."
        )

    # ---- the end

    def close(self) -> None:
        """Ends the processes."""
        for worker in self._workers:
            worker.channel.close()
        for worker in self._workers:
            worker.process.join(END_SECONDS)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.process.close()
        self._workers, self._ready = [], {}


TASK = struct.Struct("<qqqI")
"""A place, and the length of a bookmark's text behind it; 0: none."""
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Duty:
    """What a data worker is told when it starts."""

    number: int
    workers: int
    seed: int
    source: Source
    init: Callable[[int], None] | None
    """The DataLoader's `worker_init_fn`."""
    dies_with: int | None
    """The pid of the training process, where the kernel can watch it: its main thread starts data workers."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What reading has raised."""

    error: BaseException


def serve(duty: Duty, channel: socket.socket, others: list[socket.socket]) -> None:
    """The whole life of the process. `others`: ends of sockets that a fork has brought along, which keep none open."""
    for other in others:
        other.close()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if duty.dies_with is not None:
        _die_with(duty.dies_with)
    torch.set_num_threads(1)
    source = duty.source
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=duty.number, num_workers=duty.workers, seed=duty.seed, dataset=source.dataset
    )
    init, broken = duty.init, None
    if init is not None and not source.keeps_lanes:  # a stream's is called lane by lane
        broken = _failure_of(duty, lambda: init(duty.number))
    try:
        while task := _task(channel):
            _answer(channel, broken or _read(duty, *task))
    except OSError:
        return  # nobody waits for it any more


def _task(channel: socket.socket) -> tuple[Place, Bookmark | None] | None:
    """The next one; None: there will be no more."""
    message = _bytes(channel, TASK.size)
    if message is None:
        return None
    step, lane, micro, length = TASK.unpack(message)
    text = _bytes(channel, length)
    return (step, lane, micro), Bookmark.from_text(text.decode()) if text else None


def _bytes(channel: socket.socket, count: int) -> bytes | None:
    """So many; None where nobody sends any more."""
    message = b""
    while len(message) < count:
        received = channel.recv(count - len(message))
        if not received:
            return None
        message += received
    return message


def _read(duty: Duty, place: Place, bookmark: Bookmark | None) -> Any:
    try:
        return duty.source.read(place, bookmark)
    except SystemExit as error:
        return _exited(duty, error, f"the dataset, at one of {duty.source.samples(place)}")
    except BaseException as error:
        return _as_failure(error)


def _failure_of(duty: Duty, action: Callable[[], object]) -> Failure | None:
    try:
        action()
    except SystemExit as error:
        return _exited(duty, error, "worker_init_fn")
    except BaseException as error:
        return _as_failure(error)
    return None


def _exited(duty: Duty, error: SystemExit, caller: str) -> Failure:
    """Not handed on as it is: it would end the script, which would say nothing of why."""
    given = "" if error.code is None else repr(error.code)
    return Failure(PeerError(
        f"data worker {duty.number} of {duty.workers} (pid {os.getpid()}) was ended by sys.exit({given}) in {caller}. "
        "What cannot be read raises an error, or is left out of the dataset."
    ))  # fmt: skip


def _as_failure(error: BaseException) -> Failure:
    """As it can be sent. The traceback goes along as a note, because it cannot be."""
    if isinstance(error, UserError):
        return Failure(error)
    lines = "".join(traceback.format_exception(error)).strip()
    error.add_note(f"shoal: in a data worker (pid {os.getpid()}):\n{lines}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return Failure(RuntimeError(f"{type(error).__name__} in a data worker (pid {os.getpid()}):\n{lines}"))
    return Failure(error)


def _answer(channel: socket.socket, value: Any) -> None:
    try:
        send(channel, value)
    except OSError:
        raise
    except Exception as error:
        send(channel, Failure(UserError(
            f"a batch cannot be sent from a data worker: {type(error).__name__}: {error}. A collate_fn gives tensors "
            "in host memory, arrays, numbers, texts, and containers of them; or use num_workers=0."
        )))  # fmt: skip


def _die_with(parent: int) -> None:
    """The kernel ends this process when the thread that has started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)  # it ended before
