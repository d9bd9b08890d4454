"""`python -m shoal.config < FILE`: what training refuses of a config, whatever the script adds. Imports no torch.

`shoal estimate` runs it, as the command imports nothing of the training side. What is open is no fault here: a script
may give steps, lanes, batch size, optimizer and scheduler beside the file. Exit codes: 0 nothing is refused, 1 the
sentences are on standard output.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from shoal_protos.config_file import parsed_config
from shoal_protos.errors import UserError

from shoal.config.load import Beside, load_config
from shoal.config.sifting import is_on
from shoal.config.training import BATCH


def main() -> int:
    """Returns the exit code."""
    try:
        given = parsed_config(sys.stdin.read())
        load_config(given, Beside(_all_that_is_open(given), micro_batch_size=1, optimizer=True, scheduler=True))
    except UserError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


def _all_that_is_open(given: Mapping[str, Any]) -> dict[str, int]:
    """Keys of the section `shoal` that a script must give beside this file."""
    mine = given.get("shoal") or {}
    if not isinstance(mine, Mapping):
        return {}
    steps = {} if _says(mine, "max_steps") or _says(mine, "epochs") else {"max_steps": 1}
    is_elastic = is_on(given.get("elasticity"))
    lanes = {} if is_elastic or _says(mine, "lanes") or _says(given, BATCH) else {"lanes": 1}
    return steps | lanes


def _says(section: Mapping[str, Any], key: str) -> bool:
    return section.get(key) not in (None, "auto")


if __name__ == "__main__":
    raise SystemExit(main())
