"""The operators' token of this machine: `shoal run` and `shoal demo` keep it in a file, commands look for it there.

Also how tokens are compared. Those of workers are made in `worker_tokens.py`, named ones in `token_register.py`.
"""

from __future__ import annotations

import hmac
import secrets
import tempfile
from pathlib import Path

from shoal_protos.errors import UserError

FILE = "token"


def is_same(shown: str, expected: str) -> bool:
    """Takes as long for a near miss as for nonsense."""
    return hmac.compare_digest(shown.encode(errors="surrogateescape"), expected.encode())


def kept_token(folder: Path) -> str:
    """The operators' token that a controller of this machine has written there; empty where there is none."""
    try:
        return (folder / FILE).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise UserError(f"the token in {folder / FILE} cannot be read: {error}; set SHOAL_TOKEN") from None


def made_token(folder: Path) -> str:
    """The token kept there, made (readable by this user only) where there is none."""
    token = kept_token(folder)
    if not token:
        token = secrets.token_urlsafe(32)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=folder, prefix=f"{FILE}.", delete=False) as new:  # mode 0600
                new.write(token + "\n")
            Path(new.name).replace(folder / FILE)
        except OSError as error:
            raise UserError(f"no token can be written to {folder / FILE}: {error.strerror}; set SHOAL_TOKEN") from None
    elif others := (folder / FILE).stat().st_mode & 0o077:
        raise UserError(
            f"{folder / FILE} can be read by others (mode {0o600 | others:o}); expected 600. Remove it: a new one is "
            "made"
        )
    return token
