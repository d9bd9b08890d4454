"""A script that takes its samples by its rank: found where it reads the rank, and refused with the line that does it.

Ranks are told before a world is there, and change with it, so what a script picks by one is no part of the data in any
world. A DistributedSampler is given the rank too, and does no harm: its dataset is whole. Functions that return a rank
call `note`, those that take a script's data call `check`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shoal_protos.errors import UserError

from shoal.checkpoint.failure import script_frame

_reads: dict[str, set[int]] = {}
"""Lines of the script in which it has read a rank, by file."""


def note() -> None:
    """The script reads a rank."""
    frame = script_frame(sys._getframe(1))
    if frame is not None:
        _reads.setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)


def check() -> None:
    """Raises `UserError` where a line of the script picks samples by a rank that it has read."""
    for file, lines in _reads.items():
        with suppress(OSError, SyntaxError, ValueError):  # of a notebook, of a string: there is no source to look at
            picked = next(_picks(ast.parse(Path(file).read_text()), lines), None)
            if picked is not None:
                raise UserError(
                    f"{Path(file).name}:{picked} takes samples by the worker's rank, and which worker reads which "
                    "samples changes with the world; give the loader the whole dataset. A DistributedSampler is fine."
                )


def _picks(tree: ast.AST, lines: set[int]) -> Iterator[int]:
    """Lines in which something is sliced, counted or sharded by what was read in these lines."""
    known = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and lines & set(range(node.lineno, (node.end_lineno or 0) + 1))
        for target in ast.walk(node)
        if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store)
    }

    def is_rank(node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in known
        reads = isinstance(node, ast.Call | ast.Attribute) and node.lineno in lines
        return reads and ast.unparse(node).rstrip("()").endswith("rank")

    for node in ast.walk(tree):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Slice):
            parts = [node]
        elif isinstance(node, ast.Call) and _name(node.func) in ("range", "islice", "shard"):
            parts = [*node.args, *node.keywords]
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.BinOp) and isinstance(node.left.op, ast.Mod):
            parts = [*node.comparators]
        if any(is_rank(inner) for part in parts for inner in ast.walk(part)):
            yield node.lineno  # type: ignore[attr-defined]


def _name(called: ast.expr) -> str:
    return called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
