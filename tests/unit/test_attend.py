"""What an interrupted `shoal run` waits for before it ends its job, against a job that is only pretended."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from shoal_controller.cli import attend
from shoal_controller.cli.client import NotTraining
from shoal_protos.errors import UserError
from shoal_protos.rest import Json

Event = tuple[str, int]
"""Its kind, and the step of the save that it speaks of."""


class Pretended:
    """A client of a controller that is asked for a save of step 21 or later; each look brings another event."""

    def __init__(self, *rounds: Event) -> None:
        self._rounds = list(rounds)
        self._seen: list[Json] = [{"revision": 1, "kind": "checkpoint_failed", "message": "", "data": {"step": 99}}]
        self._saved: int | None = None
        self.away = 0
        """So many requests come before its workers do."""

    async def save_checkpoint(self, _: str) -> Json:
        self.away -= 1
        if self.away >= 0:
            raise NotTraining("job train is not training; nothing can be saved now.")
        return {"step": 21}

    async def job(self, _: str) -> Json:
        if self._rounds:
            kind, step = self._rounds.pop(0)
            self._saved = step if kind == "checkpoint_saved" else self._saved
            event = {"revision": 2 + len(self._seen), "kind": kind, "message": f"{kind} {step}", "data": {"step": step}}
            self._seen.append(event)
        return {"phase": "running", "last_checkpoint_step": self._saved}

    async def events(self, _: str, after: int = 0) -> list[Json]:
        return [event for event in self._seen if event["revision"] > after]


@pytest.mark.parametrize(
    "rounds, outcome",
    [
        ([("checkpoint_skipped", 40), ("checkpoint_saved", 20), ("checkpoint_saved", 47)], "saved at step 47"),
        ([("checkpoint_failed", 20), ("checkpoint_saved", 22)], "saved at step 22"),
        ([("checkpoint_saved", 20), ("checkpoint_failed", 22)], "checkpoint_failed 22"),
    ],
)
def test_another_save_that_is_skipped_or_fails_is_not_the_end_of_the_one_that_is_waited_for(
    rounds: list[Event], outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attend, "POLL_SECONDS", 0.0)
    client: Any = Pretended(*rounds)
    assert asyncio.run(attend.saved(client, "train")) == outcome


@pytest.mark.parametrize(
    ("patience_seconds", "outcome"),
    [(60.0, "saved at step 22"), (0.0, "nothing is saved now: job train is not training; nothing can be saved now.")],
)
def test_a_job_of_an_earlier_run_is_saved_once_its_workers_are_back(
    patience_seconds: float, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attend, "POLL_SECONDS", 0.0)
    pretended = Pretended(("none", 0), ("none", 0), ("checkpoint_saved", 22))
    pretended.away = 2
    client: Any = pretended
    assert asyncio.run(attend.saved(client, "train", patience_seconds)) == outcome


def test_a_report_that_can_no_longer_be_written_is_a_sentence_and_leaves_no_half_of_it(tmp_path: Path) -> None:
    (tmp_path / "report.json").mkdir()
    with pytest.raises(UserError, match=r"^the run report cannot be written to .*report\.json: Is a directory$"):
        attend.write(tmp_path / "report.json", {"job": "train"})
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize(
    ("job", "typed", "shown"),
    [
        ("train", "run train.py", "shoal run train.py"),
        ("train-2", "run --quiet train.py", "shoal run --job train-2 --quiet train.py"),
        ("train-2", "run --job=train-2 train.py", "shoal run --job=train-2 train.py"),
    ],
)
def test_the_command_that_goes_on_names_a_job_whose_name_was_made_beside_anothers(
    job: str, typed: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/shoal", *typed.split()])
    assert attend.how_to_go_on({"job": job, "last_checkpoint_step": None}).endswith(f"from step 0: {shown}")
