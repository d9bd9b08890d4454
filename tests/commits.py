"""The form of commit messages, as `make lint` checks it: `python tests/commits.py`.

Only commits that the upstream branch does not have are checked. Without git, a base or a whole history there is nothing
to compare with; the reason is printed and the check passes. Merges and the subjects that git writes itself are exempt.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST_SUBJECT = 72
BASES = ("@{upstream}", "origin/main")

WRITTEN_BY_GIT = re.compile(r'(Revert|Reapply) "|(fixup|squash|amend)! ')
NO_REASON = re.compile(r"[\w-]+-by: |\(cherry picked from commit ")
"""Lines of a body that name people or an origin; they are no reason."""

OTHER_FORM = re.compile(r"(?!embed$)\S*[aeiouy]\S*((?<!e)ed|ing)|\S*[^sua]s|has|was", re.IGNORECASE)
"""A past tense, a gerund or a third person, by its ending. What ends alike and is none of them passes: a stem without a
vowel ("Shred", "Bring"), "-eed" ("Need", "Exceed"), "-ss", "-us" and "-as" ("Pass", "Focus", "Alias")."""


class Unchecked(Exception):
    """There is nothing to check; the message says why."""


def git(root: Path, *arguments: str) -> str:
    """Run git in a folder and return its output. Raises: Unchecked: git is missing or refuses."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise Unchecked("git is not installed") from None
    if done.returncode:
        raise Unchecked(done.stderr.strip().partition("\n")[0] or f"git {arguments[0]} ended with {done.returncode}")
    return done.stdout.rstrip("\n")


def base_of(root: Path) -> str:
    """Return the newest commit that HEAD and the upstream branch share. Raises: Unchecked: there is none."""
    if Path(git(root, "rev-parse", "--show-toplevel")).resolve() != root.resolve():
        raise Unchecked("this folder is not a git checkout of its own")
    if git(root, "rev-parse", "--is-shallow-repository") == "true":
        raise Unchecked("the history of this clone is shallow")
    for name in BASES:
        try:
            return git(root, "merge-base", "HEAD", name)
        except Unchecked:
            continue
    raise Unchecked(f"there is no branch to compare with ({' or '.join(BASES)})")


def faults_of(message: str) -> list[str]:
    """Return what is wrong with a commit's message, each fault with what was expected."""
    subject, _, rest = message.partition("\n")
    if WRITTEN_BY_GIT.match(subject):
        return []
    found = []
    if len(subject) > LONGEST_SUBJECT:
        found.append(f"the subject has {len(subject)} characters (expected at most {LONGEST_SUBJECT})")
    if subject.endswith("."):
        found.append("the subject ends with a full stop (expected none)")
    word = subject.split()[0].rstrip(",:;.") if subject.strip() else ""
    if not word[:1].isupper():
        found.append(f'the subject begins with "{word}" (expected a capital letter)')
    elif OTHER_FORM.fullmatch(word):
        found.append(f'the subject begins with "{word}" (expected an imperative, such as "Add")')
    if rest and not rest.startswith("\n"):
        found.append("the second line is not blank (expected a blank line after the subject)")
    elif not any(line.strip() and not NO_REASON.match(line) for line in rest.splitlines()):
        found.append("there is no body (expected the reason for the change, after a blank line)")
    return found


def check(root: Path) -> tuple[str, list[str]]:
    """Return a line on what was checked, and a sentence for each commit with a fault, oldest first."""
    try:
        base = base_of(root)
    except Unchecked as reason:
        return f"Commit messages are not checked: {reason}.", []
    log = git(root, "log", "-z", "--reverse", "--no-merges", "--no-show-signature", "--format=%h%n%B", f"{base}..HEAD")
    commits = [entry.partition("\n") for entry in log.split("\0") if entry]
    found = [(name, faults_of(message.strip("\n"))) for name, _, message in commits]
    sentences = [f"Commit {name}: {'; '.join(faults)}." for name, faults in found if faults]
    return f"Commit messages checked since {base[:10]}: {len(commits)}.", sentences


def main(root: Path = ROOT) -> int:
    """Print the result and return the exit status: 1 if a commit has a fault."""
    summary, sentences = check(root)
    print(summary)
    for sentence in sentences:
        print(sentence, file=sys.stderr)
    if sentences:
        print("Reword them with `git rebase --interactive`; CONTRIBUTING.md says how commits look.", file=sys.stderr)
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main())
