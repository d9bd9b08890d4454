"""What a name is, and a name as a part of a path of REST, for the `shoal` command and for `shoal.client`.

What cannot be sent is refused before it is: the libraries that send it raise errors of their own, and a name with a
slash would ask for another path.
"""

from __future__ import annotations

import re

from shoal_protos.errors import UserError
from shoal_protos.text import shown

MOST_NAME = 300
"""Characters of a name; no job, worker or token has so many."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
NAME_EXPECTED = "letters, digits, '.', '_' and '-', a letter or digit first"

NOT_TEXT = "what is to be sent holds text that is not valid (a lone surrogate); give it as UTF-8"
NOT_FINITE = "what is to be sent holds a number that is not finite; expected finite numbers"
"""Both of a body."""


def path_part(name: str) -> str:
    """The name, which needs no escape. Raises `UserError` for what is none."""
    if len(name) > MOST_NAME:
        raise UserError(f"{shown(name)} is no name: it has {len(name)} characters; expected at most {MOST_NAME}")
    if not NAME.fullmatch(name):
        raise UserError(f"{shown(name)} is no name of a job, a worker or a token; expected {NAME_EXPECTED}")
    return name
