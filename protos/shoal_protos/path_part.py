"""A name as a part of a path of REST, for the `shoal` command and for `shoal.client`.

What cannot be sent is refused before it is: the libraries that send it raise errors of their own.
"""

from __future__ import annotations

from urllib.parse import quote

from shoal_protos.errors import UserError

MOST_NAME = 300
"""Characters of a name; no job, worker or token has so many."""

NOT_TEXT = "what is to be sent holds text that is not valid (a lone surrogate); give it as UTF-8"
NOT_FINITE = "what is to be sent holds a number that is not finite; expected finite numbers"
"""Both of a body."""


def path_part(name: str) -> str:
    """A name, escaped. Raises `UserError` for what would ask for another path, and for what cannot be sent."""
    if name in ("", ".", ".."):
        raise UserError(f"{name!r} is no name; expected that of a job, a worker or a token")
    if len(name) > MOST_NAME:
        raise UserError(f"{name[:20]!a}… is no name: it has {len(name)} characters; expected at most {MOST_NAME}")
    try:
        return quote(name, safe="")
    except UnicodeEncodeError:
        raise UserError(f"{name!a} is not valid text; expected a name in UTF-8") from None
