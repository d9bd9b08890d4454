"""What a command says of arguments that it cannot use: all of them at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_command import shoal


@pytest.mark.usefixtures("commands")
def test_all_that_is_wrong_with_a_commands_arguments_is_said_at_once(tmp_path: Path) -> None:
    """What typer finds, and what only the command can."""
    typed = shoal("run", "--workers", "0", "--min-workers", "x", "nothere.py")
    beginning, *faults = typed.stderr.splitlines()
    assert (typed.returncode, beginning) == (2, "shoal: the command has 3 faults:")
    for fault, name in zip(faults, ("'SCRIPT'", "'--workers'", "'--min-workers'"), strict=True):
        assert fault.startswith(f"  - Invalid value for {name}: ")
    missing = shoal("drain")
    assert missing.stderr.splitlines() == [
        "shoal: the command has 2 faults:", "  - Missing argument 'JOB'", "  - Missing argument 'WORKER'",
    ]  # fmt: skip
    flags = ["--workers", "2", "--min-workers", "4", "--http", "nohost", "--open-page", "--no-page"]
    (tmp_path / "a.py").touch()
    own = shoal("run", *flags, "a.py", folder=tmp_path)
    assert (own.returncode, own.stdout) == (2, "")
    assert own.stderr.splitlines() == [
        "shoal: the command has 3 faults:",
        "  - --workers is 2; expected 4 (--min-workers) to the job's lanes",
        "  - --open-page and --no-page exclude each other; leave one of them out",
        "  - --http (SHOAL_HTTP): 'nohost' is not a valid address; expected HOST:PORT, such as 127.0.0.1:7070",
    ]
    assert not [*tmp_path.glob(".*")], "nothing was begun"
