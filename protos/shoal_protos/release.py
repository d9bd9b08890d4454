"""The release of Shoal that this process runs, as hellos, records, manifests and refusals name it.

`0.1.0` where a package is installed; `0.1.0+g4de8e168` where it runs from a source checkout, whose commits all have the
number of the next release. It is for people: what works together is decided by the numbers of the formats, each of
which stands where the format does. Standard library only; read once, when it is imported.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

COMMIT_CHARACTERS = 8


def _release(root: Path) -> str:
    try:
        number = version("shoal")
    except PackageNotFoundError:
        number = "0"  # it was put on Python's path, and never installed
    commit = _commit(root)
    return f"{number}+g{commit[:COMMIT_CHARACTERS]}" if commit else number


def _commit(root: Path) -> str:
    """The commit that is checked out at `root`; empty where that is no checkout. Git itself may not be installed."""
    git = root / ".git"
    try:
        if git.is_file():  # a worktree
            git = root / git.read_text().removeprefix("gitdir: ").strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name, common = head.removeprefix("ref: "), git / "commondir"
        shared = git / common.read_text().strip() if common.is_file() else git
        if (shared / name).is_file():
            return (shared / name).read_text().strip()
        lines = (shared / "packed-refs").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    return next((line.partition(" ")[0] for line in lines if line.endswith(f" {name}")), "")


RELEASE: Final = _release(Path(__file__).resolve().parents[2])

RELEASE_HEADER: Final = "shoal-release"
"""Header of a controller's answers to those that it lets in."""
