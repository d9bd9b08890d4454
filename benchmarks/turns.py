"""Turns of several clusters: while one measures a round the others stand still, so their rounds can be compared.

    turns = Turns.from_text("/a/folder:0:2")     # the first of two
    turns.on_ready()
    for number in range(rounds):
        turns.wait(number)
        ...
        turns.on_round_over(number)              # by one process of the cluster

What has happened is an empty file each in a folder of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from steps import until

PATIENCE_SECONDS = 900.0
PAUSE_SECONDS = 0.02
"""Between two looks of one that stands still: two dozen processes that look 500 times a second take a tenth of a core.
"""


@dataclass(frozen=True)
class Turns:
    """Of one cluster. An empty text stands for one that is alone."""

    folder: Path | None = None
    number: int = 0
    clusters: int = 1

    @classmethod
    def from_text(cls, text: str) -> Self:
        if not text:
            return cls()
        folder, number, clusters = text.rsplit(":", 2)
        return cls(Path(folder), int(number), int(clusters))

    def __str__(self) -> str:
        return f"{self.folder}:{self.number}:{self.clusters}" if self.folder is not None else ""

    def on_ready(self) -> None:
        """All that is not to be measured is behind this cluster."""
        self._note(f"ready {self.number}")

    def on_round_over(self, number: int) -> None:
        self._note(f"round {number} of {self.number}")

    def wait(self, number: int) -> None:
        """Until the round of this number is this cluster's."""
        folder, place = self.folder, number * self.clusters + self.number - 1
        if folder is None:
            return
        before = [f"ready {one}" for one in range(self.clusters)]
        if place >= 0:
            before = [f"round {place // self.clusters} of {place % self.clusters}"]
        until(
            f"the turn in round {number} of cluster {self.number}",
            lambda: all((folder / name).exists() for name in before),
            PATIENCE_SECONDS,
            PAUSE_SECONDS,
        )

    def _note(self, name: str) -> None:
        if self.folder is not None:
            (self.folder / name).touch()
