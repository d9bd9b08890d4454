"""What a fork of a warm Python does with a mutant: it runs tests on its tree, as a fresh Python would.

run.py calls it there, by its name. Nothing of the product and of the tests is imported yet in what was forked, but for
a few modules of the true tree, which are dropped here.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

WARM_MODULES = ("pytest", "torch", "torch.distributed")
"""What every fork has imported already. No plugin of pytest: it would complain, and could not rewrite its asserts."""
ROOT = Path(__file__).resolve().parents[2]


def run_tests(tree: str, paths: list[str], arguments: list[str]) -> None:
    """Ends with pytest's exit status. `paths` come first on the path of modules."""
    for name, module in list(sys.modules.items()):
        if name != "__main__" and _is_of_the_true_tree(getattr(module, "__file__", None) or ""):
            del sys.modules[name]
    sys.path[:] = [tree, *paths, *(path for path in sys.path if not _is_of_the_true_tree(path))]
    sys.dont_write_bytecode = True
    os.chdir(tree)
    random.seed()  # hypothesis draws from it, and forks would all have the same examples

    import pytest

    sys.exit(int(pytest.main(arguments)))


def _is_of_the_true_tree(path: str) -> bool:
    return Path(path).is_relative_to(ROOT) and not Path(path).is_relative_to(ROOT / ".venv")
