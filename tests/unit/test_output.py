"""What commands print of texts from elsewhere: a terminal shows them, and obeys none."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path
from typing import Any, ClassVar

import forked_command
import pytest
import shoal_controller.cli
import yaml
from rule import Edit, rule
from shoal_protos.text import printable
from told_controller import Controller, answering

pytestmark = pytest.mark.usefixtures("commands")

EVIL = "\x1b]0;taken\x07\x1b[2J\x9b31m\u202eright to left\u2066 [bold]:skull:[/nonsense] \ud800"
ALL_OF_IT = "\\u001b]0;taken\\u0007\\u001b[2J\\u009b31m\\u202eright to left\\u2066 [bold]:skull:[/nonsense] \\ud800"
TURNS_TEXT = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}

JOB = {
    "job": "j", "phase": "failed", "generation": 3, "workers": {"wanted": 3, "active": 2, "min": 1, "max": None},
    "lanes": 8, "step": 7, "max_steps": 100, "loss": 1.25, "samples": 56, "last_checkpoint_step": None, "reason": EVIL,
}  # fmt: skip
WORKER = {
    "worker": "w0", "host": EVIL, "pid": 7, "state": "starting", "rank": 0, "lanes": [0, 1], "blocks": 3,
    "mirrored_blocks": 1, "step": 7, "step_seconds": 0.5, "memory_bytes": 1000, "log": EVIL, "why": EVIL,
    "activity": {"sentence": EVIL},
}  # fmt: skip
WORLD = {
    "generation": 2, "workers": 3, "reason": EVIL, "from_step": 17, "pause_seconds": 0.043, "phases": {},
    "promoted_blocks": 90, "bytes": {"pause": 0, "fill": 1, "checkpoint": 0}, "lost_steps": 0,
}  # fmt: skip
EVENT = {"revision": 1, "time": 0.0, "generation": 1, "kind": "drain", "worker": "w0", "message": EVIL, "data": {}}
CHECKPOINT = {"step": 7, "generation": 1, "bytes": 100, "path": EVIL}
ROW = {
    "job": JOB, "attention": {"level": "act", "sentence": EVIL}, "last_checkpoint": {"sentence": EVIL},
    "last_resize": {"sentence": EVIL},
}  # fmt: skip


class Evil(Controller):
    """Answers each path as REST does, with such texts."""

    answers: ClassVar[dict[str, Any]] = {
        "/v1/jobs": {"jobs": [JOB]},
        "/v1/jobs/j": JOB,
        "/v1/jobs/j/pause": JOB,
        "/v1/jobs/j/workers": {"workers": [WORKER]},
        "/v1/jobs/j/events": {"events": [EVENT]},
        "/v1/jobs/j/checkpoints": {"checkpoints": [CHECKPOINT]},
        "/v1/jobs/j/report": {"generations": [WORLD]},
        "/v1/overview": {"jobs": [ROW]},
    }

    @property
    def body(self) -> str:  # type: ignore[override]
        return json.dumps(self.answers[self.path.partition("?")[0]])


def test_a_character_that_a_terminal_obeys_or_hides_is_escaped_and_every_other_one_stays() -> None:
    for number in range(0x110000):
        character = chr(number)
        obeyed = unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") and character not in "\n\t"
        obeyed |= unicodedata.bidirectional(character) in TURNS_TEXT or character in "\u200e\u200f\u061c"
        shown = printable(character)
        if obeyed:
            assert re.fullmatch(r"\\u[0-9a-f]{4}", shown) and json.loads(f'"{shown}"') == character
        elif unicodedata.category(character) != "Cf":
            assert shown == character


@rule(
    "What came from elsewhere is shown as text by every command: a terminal obeys none of it",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit("shoal_controller.cli.output", "typer.echo(printable(text), err=err)", "typer.echo(text, err=err)"),
        Edit("shoal_controller.cli.tables", "render_str(printable(text), **given)", "render_str(text, **given)"),
    ],
)
@pytest.mark.parametrize("command", ["events j", "describe j", "jobs", "workers j", "checkpoints j", "top", "pause j"])
def test_texts_from_elsewhere_are_shown_as_text_by_every_command(command: str) -> None:
    with answering(Evil) as url:
        done = forked_command.shoal(*command.split(), "--url", url)
    assert (done.returncode, done.stderr) == (0, "")
    assert printable(done.stdout) == done.stdout and "\\u001b]0;tak" in done.stdout


def test_the_sentence_of_a_refusal_is_shown_as_text(controller: str) -> None:
    Controller.status, Controller.kind = 404, "application/problem+json"
    Controller.body = json.dumps({"title": "No", "status": 404, "detail": EVIL})
    done = forked_command.shoal("pause", "j", "--url", controller)
    assert (done.returncode, done.stderr) == (2, f"shoal: {ALL_OF_IT}\n")


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_documents_are_shown_as_text_and_read_as_what_they_were(controller: str, form: str) -> None:
    event = {**EVENT, "message": EVIL.removesuffix("\ud800") + "café\x85\x7f"}
    Controller.body = json.dumps({"events": [event]})
    done = forked_command.shoal("events", "j", "-o", form, "--url", controller)
    assert printable(done.stdout) == done.stdout
    read = json.loads(done.stdout) if form == "json" else yaml.safe_load(done.stdout)
    assert read == {"events": [event]}


def test_a_log_is_shown_as_text_without_its_colours(controller: str, tmp_path: Path) -> None:
    log = tmp_path / "w0.log"
    log.write_text("\x1b[31mred\x1b[0m \x1b[2J\u202ecleared\n")
    Controller.body = json.dumps({"workers": [{**WORKER, "log": str(log)}]})
    assert forked_command.shoal("logs", "j", "--url", controller).stdout == "red \\u001b[2J\\u202ecleared\n"


def test_no_command_prints_in_another_way() -> None:
    folder = Path(shoal_controller.cli.__file__).parent
    printing = re.compile(r"typer\.echo|(?<!\.)\bprint\(|\bConsole\(")
    ways = {path.name: set(printing.findall(path.read_text())) for path in folder.glob("*.py")}
    assert {name: found for name, found in ways.items() if found} == {"output.py": {"typer.echo"}}
