"""The messages that docs/troubleshooting.md explains are messages that the code has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def texts() -> str:
    """All texts of the worker, what is put into them left out, without quotes and backticks."""
    found = []
    for file in (ROOT / "worker" / "shoal").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return re.sub(r'[`"]', "", "\n".join(found))


def test_every_message_that_is_explained_is_one_of_the_workers() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    table = page.partition("## Messages")[2].partition("## ")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", table, flags=re.MULTILINE)
    known = texts()
    assert len(messages) > 20
    assert [message for message in messages if message not in known] == []
