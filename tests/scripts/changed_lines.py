"""How many lines of a port were added or changed: those of its code that the original has not, in its order.

Docstrings, comments and empty lines are not counted, and neither is indentation alone (as `git diff -w`): a loop over
epochs that goes takes its body's indentation along. Deleted lines are not counted.
"""

from __future__ import annotations

import ast
import io
import tokenize


def code_lines(text: str) -> list[str]:
    """The lines of code, without indentation."""
    left_out = {line for first, last in _docstrings(text) for line in range(first, last + 1)}
    comments = {
        token.start[0]: token.start[1]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    lines = [
        line[: comments.get(number)].strip()
        for number, line in enumerate(text.splitlines(), 1)
        if number not in left_out
    ]
    return [line for line in lines if line]


def changed_lines(original: str, port: str) -> list[str]:
    """The port's lines that are not in the longest common sequence with the original's."""
    before, after = code_lines(original), code_lines(port)
    width = len(before)
    longest = [[0] * (width + 1) for _ in range(len(after) + 1)]  # of after[a:] and before[b:]
    for a in reversed(range(len(after))):
        for b in reversed(range(width)):
            same = after[a] == before[b]
            longest[a][b] = longest[a + 1][b + 1] + 1 if same else max(longest[a + 1][b], longest[a][b + 1])
    changed, b = [], 0
    for a, line in enumerate(after):
        while b < width and line != before[b] and longest[a][b] == longest[a][b + 1]:
            b += 1
        if b < width and line == before[b]:
            b += 1
        else:
            changed.append(line)
    return changed


def _docstrings(text: str) -> list[tuple[int, int]]:
    """First and last line of each."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    strings = [
        node.body[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, owners) and ast.get_docstring(node, clean=False) is not None
    ]
    return [(string.lineno, string.end_lineno or string.lineno) for string in strings]
