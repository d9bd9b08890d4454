"""A warm process: torch and Shoal are imported, nothing runs, and a worker that is forked from it saves two seconds.

The local launcher keeps one for a job, as `-c` of the job's own Python with the job's environment, and asks it over its
standard input, a socket (`launchers/process.py`). A fork is what Python would be with the worker's command: it leads a
session, falls to the launcher as its parent, and has the worker's environment, command line, `__main__`, outputs and
path. It is refused where it would be another process than that: the warm one has a second thread or a file of its own
(a socket, a device), or the script's folder has modules that would have been imported in the place of others. A script
that sets what was read as torch was imported starts over, as a process that has not. Ends when the launcher does.
Linux only.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import runpy
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

READY = b"ready\n"
LEAST_FILES = 4
"""Standard input, both outputs, and the launcher's socket once more."""
LOOK_SECONDS = 0.001
Text = bytes | str | os.PathLike[str] | os.PathLike[bytes]
READ_BY_IMPORTS = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "MKLDNN_", "DNNL_", "ONEDNN_", "OPENBLAS_", "GOTO_", "ATEN_", "THP_", "KINETO_",
    "PYTORCH_", "TORCH_", "TORCHDYNAMO_", "TORCHEXPORT_", "TORCHINDUCTOR_FORCE_", "NPY_", "NUMPY_", "GRPC_",
    "PROTOCOL_BUFFERS_",
)  # fmt: skip
"""How variables begin that torch, numpy, gRPC and their libraries read as they are loaded, or soon after."""


def main() -> None:
    """Import what workers import, and be warm until the launcher has ended; or run a worker, in the fork that is it."""
    assert callable(sys.modules["shoal"].initialize), "with it all that an engine is made of is loaded"
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=os.dup(0)) as launcher:
        launcher.sendall(READY)
        command = _wait(launcher)
    if command is not None:
        _run(command)


def _wait(launcher: socket.socket) -> Sequence[str] | None:
    """Return the worker's command, in a fork; None, in the warm process: the launcher has ended."""
    while True:
        word, files, _, _ = socket.recv_fds(launcher, 1, 2)
        if not word:
            return None
        log, door = files
        with socket.socket(fileno=door) as asking:
            if why := _unfit():
                _tell(asking, unfit=why)
            elif _fork():
                _tell(asking, pid=os.getpid())
                return _become(asking, log)
        os.close(log)


def _unfit() -> str:
    """Return why a fork would be another process than one that is started; empty: it would not."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    files = len(list(Path("/proc/self/fd").iterdir())) - 1 - 2  # what lists them, and what came with the question
    if threads > 1:
        return f"{threads} threads run in the warm process"
    return f"{files - LEAST_FILES} files are open in the warm process" if files > LEAST_FILES else ""


def _fork() -> bool:
    """Whether this is the worker. What forks it ends, so that it falls to the launcher, which takes in orphans now."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return False
    here = os.getpid()
    try:
        is_worker = not os.fork()
    except OSError:  # it was one process too many
        is_worker = False
    if not is_worker:
        os._exit(0)
    os.setsid()
    while os.getppid() == here:
        time.sleep(LOOK_SECONDS)
    return True


def _tell(asking: socket.socket, **words: object) -> None:
    asking.sendall(json.dumps(words).encode() + b"\n")


def _become(asking: socket.socket, log: int) -> Sequence[str]:
    """Become the worker that the launcher asks for; return its command. Ends where it asks for none, or cannot be."""
    line = bytearray()
    while not line.endswith(b"\n"):
        more = asking.recv(1 << 16)
        if not more:
            os._exit(0)
        line += more
    wanted = json.loads(line)
    command, environment = wanted["command"], wanted["environment"]
    why = _shadowed(command) or _take_environment(command, environment)
    _tell(asking, unfit=why)
    if why:
        os._exit(0)
    imported = os.pread(1, os.fstat(1).st_size, 0)  # what was written by what was imported
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    with contextlib.suppress(OSError):  # a disk that is full is a matter of the script's own lines
        os.write(log, imported)
    for file in (nothing, log):
        os.close(file)
    multiprocessing.current_process().authkey = os.urandom(32)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    return list(command)


def _shadowed(command: Sequence[str]) -> str:
    """Return which module that is imported lies in the script's folder, too, as a sentence; empty: none."""
    folder = _folder(command)
    if command[1] != "-m" and not Path(command[1]).is_file():
        return f"{command[1]} is no file"
    for name in sorted({name.partition(".")[0] for name in sys.modules}):
        found = PathFinder.find_spec(name, [folder]) if name != "__main__" else None
        if found is not None and found.origin is not None and not sys.flags.safe_path:
            return f"{found.origin} has the name of a module that is imported before the script"
    return ""


def _folder(command: Sequence[str]) -> str:
    """Return where Python looks for the script's modules first."""
    return str(Path.cwd() if command[1] == "-m" else Path(command[1]).resolve().parent)


def _take_environment(command: Sequence[str], environment: dict[str, str]) -> str:
    """Return why the worker's environment cannot be this process's, in its own eyes and in those of the system."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    words, variables = (tuple(map(int, fields[at : at + 2])) for at in (45, 47))
    shown = [os.fsencode(f"{name}={value}") for name, value in environment.items()]
    if len(b"\0".join(shown)) >= variables[1] - variables[0]:
        return "the worker's environment is larger than the warm process's"
    coerced = {name: os.environ[name] for name in ("LC_CTYPE",) if name in os.environ}  # by Python, as it starts
    os.environ.clear()
    os.environ.update(coerced | environment)
    _overwrite(variables, shown)
    _overwrite(words, [os.fsencode(word) for word in command])
    return ""


def _overwrite(place: tuple[int, ...], texts: Sequence[bytes]) -> None:
    """Put texts where the system shows a process's own; not those that have no room there."""
    begin, end = place
    content = b"\0".join(texts) + b"\0"
    if len(content) <= end - begin:
        ctypes.memmove(begin, content.ljust(end - begin, b"\0"), end - begin)


def _run(command: Sequence[str]) -> None:
    """Run the script or module as Python does. Raises what ends it."""
    sys.orig_argv = list(command)
    if not sys.flags.safe_path:
        sys.path.insert(0, _folder(command))
    sys.modules["__main__"] = ModuleType("__main__")
    names = vars(sys.modules["__main__"])
    names.update(__builtins__=builtins, __annotations__={}, __cached__=None)
    _start_over_where_too_late(command)
    try:
        _call(command, names)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.excepthook = _say_nothing  # what remains of an end by an error is Python's; the error keeps its traceback
        raise (KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else SystemExit)(1) from None


def _start_over_where_too_late(command: Sequence[str]) -> None:
    """From now on, a variable that was to be set or removed before torch is imported makes this process begin again,
    started and not forked; until it has threads, as it has with an engine.
    """
    worker, began_with, put, unset = os.getpid(), dict(os.environ), os.putenv, os.unsetenv

    def look(name: Text, value: Text | None) -> None:
        known = os.fsdecode(name)
        is_read = known.startswith(READ_BY_IMPORTS) and began_with.get(known) != (
            None if value is None else os.fsdecode(value)
        )
        if is_read and os.getpid() == worker and threading.active_count() == 1:
            sys.stdout.flush()
            os.execvpe(command[0], list(command), began_with)

    def putenv(name: Text, value: Text) -> None:
        look(name, value)
        put(name, value)

    def unsetenv(name: Text) -> None:
        look(name, None)
        unset(name)

    os.putenv, os.unsetenv = putenv, unsetenv


def _say_nothing(*_: object) -> None:
    """An exception hook where the error has been told."""


def _call(command: Sequence[str], names: dict[str, Any]) -> None:
    if command[1] == "-m":
        sys.argv = [command[1], *command[3:]]
        as_main: Callable[[str], object] = runpy._run_module_as_main  # type: ignore[attr-defined]
        as_main(command[2])
        return
    sys.argv = list(command[1:])
    path = str(Path(command[1]).absolute())
    names.update(__file__=path, __loader__=SourceFileLoader("__main__", path))
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), names)
