"""Which tokens an `Authorization: Bearer` header can carry, and where this machine keeps its operators'.

For both sides. What cannot be sent is refused before it is: the libraries that send it repeat it in their errors.
"""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_ISREG

from shoal_protos.errors import UserError

TOKEN_FILE = "token"

UNSENDABLE = "SHOAL_TOKEN has characters that an HTTP header cannot carry; use printable ones"


def is_sendable(token: str) -> bool:
    """Whether it arrives as it is: printable ASCII without blanks around it."""
    return token.isascii() and token.isprintable() and token == token.strip()


def shown_token(given: str | None, folder: Path | None) -> str:
    """Return the token that a client shows: the one that it was given, else SHOAL_TOKEN, else the one that is kept in
    `folder` (None: the controller is on another machine). Raises `UserError` for one that no header can carry.
    """
    if given is None:
        given = os.environ.get("SHOAL_TOKEN") or (kept_token(folder) if folder is not None else "")
    if not is_sendable(given):
        raise UserError(UNSENDABLE)
    return given


def kept_token(folder: Path) -> str:
    """The operators' token that a controller of this machine has written there; empty where there is none."""
    file = folder / TOKEN_FILE
    try:
        if not S_ISREG(file.stat().st_mode):  # to read a pipe would wait for ever
            raise UserError(
                f"the token in {file} cannot be read: it is not a regular file; remove it, or set SHOAL_TOKEN"
            )
        return file.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise UserError(f"the token in {file} cannot be read: {error}; set SHOAL_TOKEN") from None
