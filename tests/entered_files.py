"""`python tests/entered_files.py`: how many product files each of a few things enters, as JSON, from real engines and a
real job machine in one process (crew.py).

The job uses nothing that most jobs do not use, so that a file which is entered is one that a reader of any step meets.
A process of its own: it profiles all threads. tests/unit/test_entered_files.py holds the figures.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from crew import Crew, Task
from crew_saves import saved
from shoal_protos.acts import Save

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = tuple(f"{ROOT / package}/" for package in ("controller", "worker", "protos"))
MACHINE = "/core/machine/"
CONFIG = {"max_steps": 40, "stage": 1}


class Watch:
    """The product's files of which a function was called."""

    def __init__(self) -> None:
        self._seen: set[str] | None = None

    def on_event(self, frame: FrameType, event: str, _: object) -> None:
        """Of `sys.setprofile`."""
        if self._seen is not None and event == "call" and frame.f_code.co_filename.startswith(PRODUCT):
            self._seen.add(frame.f_code.co_filename)

    def of(self, *acts: Callable[[], object]) -> set[str]:
        """Those that these acts enter, on any thread."""
        self._seen = seen = set[str]()
        for act in acts:
            act()
        self._seen = None
        return seen


def figures(watch: Watch) -> dict[str, int]:
    """By what enters them. A step is one between others, three steps where a checkpoint may be written beside them."""
    with Crew("abc", Task(CONFIG)) as crew:
        _settle(crew)
        step = _step(watch, crew)
        heartbeats = watch.of(lambda: crew.beat(2))
        crew.train_to(crew.allowed + 1)
        recovery = watch.of(lambda: crew.kill("b"), lambda: crew.train_to(crew.allowed + 2))
    with Crew("abc", Task({**CONFIG, "stage": 3})) as crew:
        _settle(crew)
        gathered = _step(watch, crew)
    with TemporaryDirectory() as place, Crew("abc", Task({**CONFIG, "shoal": {"checkpoint": {"path": place}}})) as crew:
        _settle(crew)
        before = watch.of(lambda: crew.train_to(crew.allowed + 1), lambda: crew.train_to(crew.allowed + 3))
        save = watch.of(lambda: crew.request(Save()), lambda: saved(crew))
    return {
        "step": len(step),
        "stage 3 beyond a step": len(gathered - step - heartbeats),
        "heartbeats": len(heartbeats),
        "recovery": len(recovery),
        "save beyond steps, without the machine": sum(MACHINE not in file for file in save - before - heartbeats),
    }


def _step(watch: Watch, crew: Crew) -> set[str]:
    """The least of nine: a heartbeat may come into a step, and several on a busy machine."""
    return min((watch.of(lambda: crew.train_to(crew.allowed + 1)) for _ in range(9)), key=len)


def _settle(crew: Crew) -> None:
    crew.train_to(3)
    crew.until("rest", crew.at_rest)


if __name__ == "__main__":
    found = Watch()
    threading.setprofile(found.on_event)
    sys.setprofile(found.on_event)
    print(json.dumps(figures(found)), flush=True)
    os._exit(0)  # the crews' threads still wait for each other
