"""A data worker: a process that reads micro-batches for its training process, in the order in which it is asked.

Started by data_workers.py. It ends when its training process does, however that ends: its socket closes, and on Linux
the kernel kills it. Signals to a whole group of processes (Ctrl-C, a notice of preemption) are the training process's
business. Knows no group, no controller, and no accelerator.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data._utils.worker as torch_worker
from shoal_protos.errors import PeerError, UserError

from shoal.core.stream_position import Bookmark
from shoal.data.batch_memory import send
from shoal.data.source import Place, Source

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
