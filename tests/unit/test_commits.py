"""The check of commit messages: on messages, and on real repositories with and without a branch to compare with."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from commits import check, faults_of, main

WELL_FORMED = "Add a line\n\nReaders missed it."


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """An author, and none of the machine's own settings of git."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    settings = {"user.name": "A", "user.email": "a@example.org", "gc.auto": "0", "maintenance.auto": "false"}
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_CONFIG_COUNT", str(len(settings)))
    for index, (key, value) in enumerate(settings.items()):
        monkeypatch.setenv(f"GIT_CONFIG_KEY_{index}", key)
        monkeypatch.setenv(f"GIT_CONFIG_VALUE_{index}", value)


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(folder: Path, message: str) -> str:
    """Make an empty commit; return its short hash."""
    git(folder, "commit", "--quiet", "--allow-empty", "--cleanup=verbatim", "--message", message)
    return git(folder, "rev-parse", "--short", "HEAD")


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """A repository whose one commit breaks the rules. It is upstream already, so no clone is refused for it."""
    folder = tmp_path / "upstream"
    git(tmp_path, "init", "--quiet", "--initial-branch=main", str(folder))
    commit(folder, "added old things.")
    return folder


@pytest.fixture
def clone(tmp_path: Path, upstream: Path) -> Path:
    folder = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(upstream), str(folder))
    return folder


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ("A" * 73 + "\n\nWhy.", "the subject has 73 characters (expected at most 72)"),
        ("Add a line.\n\nWhy.", "the subject ends with a full stop (expected none)"),
        ("add a line\n\nWhy.", 'the subject begins with "add" (expected a capital letter)'),
        ("\n\nWhy.", 'the subject begins with "" (expected a capital letter)'),
        ("Add a line", "there is no body (expected the reason for the change, after a blank line)"),
        ("Add a line\n\nSigned-off-by: A <a@example.org>", "there is no body (expected the reason for the change, "),
        ("Add a line\nWhy.", "the second line is not blank (expected a blank line after the subject)"),
    ],
)
def test_a_fault_is_named_with_what_was_expected(message: str, fault: str) -> None:
    [found] = faults_of(message)
    assert found.startswith(fault)


@pytest.mark.parametrize(
    "word", ["Added", "Tried", "Re-added", "Used", "Adding", "Using", "Adds", "Fixes", "Does", "Has", "Was", "Docs:"]
)
def test_a_subject_in_another_form_than_the_imperative_is_refused(word: str) -> None:
    assert faults_of(f"{word} a line\n\nWhy.") == [
        f'the subject begins with "{word.rstrip(":")}" (expected an imperative, such as "Add")'
    ]


@pytest.mark.parametrize(
    "word",
    [
        *("Add", "Need", "Exceed", "Feed", "Shred", "Shed", "Embed", "Bring", "Ping", "String", "Pass", "Address"),
        *("Process", "Compress", "Focus", "Discuss", "Alias", "Bias", "Read,", "Re-read", "Do"),
    ],
)
def test_an_imperative_that_ends_like_another_form_passes(word: str) -> None:
    assert faults_of(f"{word} a line\n\nWhy.") == []


@pytest.mark.parametrize("subject", ['Revert "Added a line."', 'Reapply "Added a line."', "fixup! Added", "squash! x"])
def test_a_subject_that_git_writes_passes(subject: str) -> None:
    assert faults_of(subject + "!" * 72) == []


def test_a_body_of_people_and_a_reason_passes() -> None:
    assert faults_of(f"{WELL_FORMED}\n\nCo-authored-by: B <b@example.org>") == []


def test_a_clone_without_commits_of_its_own_passes(clone: Path) -> None:
    summary, found = check(clone)
    assert summary == f"Commit messages checked since {git(clone, 'rev-parse', 'HEAD')[:10]}: 0."
    assert found == []


def test_each_commit_since_the_base_with_a_fault_is_one_sentence(
    clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = commit(clone, "added ä line.\n\nWhy.")
    commit(clone, WELL_FORMED)
    third = commit(clone, "Add another line")
    assert check(clone)[1] == [
        f'Commit {first}: the subject ends with a full stop (expected none); the subject begins with "added" '
        "(expected a capital letter).",
        f"Commit {third}: there is no body (expected the reason for the change, after a blank line).",
    ]
    assert main(clone) == 1
    assert "since" in capsys.readouterr().out


def test_well_formed_commits_pass_and_a_merge_is_not_looked_at(clone: Path, upstream: Path) -> None:
    commit(clone, WELL_FORMED)
    commit(upstream, "Added more elsewhere.")
    git(clone, "fetch", "--quiet")
    git(clone, "merge", "--quiet", "--message", "merged", "origin/main")
    assert check(clone) == (f"Commit messages checked since {git(upstream, 'rev-parse', 'HEAD')[:10]}: 1.", [])
    assert main(clone) == 0


def test_a_branch_without_an_upstream_is_compared_with_origins_main(clone: Path) -> None:
    git(clone, "switch", "--quiet", "--create", "topic")
    name = commit(clone, "Add a line")
    assert [sentence.partition(":")[0] for sentence in check(clone)[1]] == [f"Commit {name}"]


def test_a_branch_with_an_upstream_is_compared_with_that(clone: Path, upstream: Path) -> None:
    git(upstream, "switch", "--quiet", "--create", "topic")
    commit(upstream, "Added on the topic.")
    git(clone, "fetch", "--quiet")
    git(clone, "switch", "--quiet", "topic")
    assert check(clone)[1] == []


def inside_another(tmp_path: Path, upstream: Path) -> Path:
    folder = upstream / "unpacked"
    folder.mkdir()
    return folder


def shallow(tmp_path: Path, upstream: Path) -> Path:
    commit(upstream, "Added more.")
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{upstream}", "shallow")
    return tmp_path / "shallow"


@pytest.mark.parametrize(
    ("variable", "reason"),
    [("PATH", "git is not installed"), ("GIT_CEILING_DIRECTORIES", "fatal: not a git repository")],
)
def test_a_folder_without_git_passes_with_one_line(
    variable: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, str(tmp_path))
    folder = tmp_path / "unpacked"
    folder.mkdir()
    assert main(folder) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"Commit messages are not checked: {reason}")


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (lambda tmp_path, upstream: upstream, "there is no branch to compare with (@{upstream} or origin/main)"),
        (inside_another, "this folder is not a git checkout of its own"),
        (shallow, "the history of this clone is shallow"),
    ],
    ids=["no remote", "unpacked in a repository", "shallow"],
)
def test_a_repository_without_a_base_passes_with_one_line(
    place: Callable[[Path, Path], Path], reason: str, tmp_path: Path, upstream: Path
) -> None:
    assert check(place(tmp_path, upstream)) == (f"Commit messages are not checked: {reason}.", [])
