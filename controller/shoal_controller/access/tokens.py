"""The operators' token of this machine: `shoal run` and `shoal demo` keep it in a file, where commands
look for it (`shoal_protos.bearer`).

Also how tokens are compared. Tokens of workers are made in `worker_tokens.py`, named ones in `token_register.py`. Those
that come are checked in `api/guard.py` for REST and in `sessions/service.py` for workers.
"""

from __future__ import annotations

import hmac
import secrets
import tempfile
from pathlib import Path

from shoal_protos.bearer import TOKEN_FILE, kept_token
from shoal_protos.errors import UserError

from shoal_controller.process.private_files import make_private_folder


def is_same(shown: str, expected: str) -> bool:
    """Takes as long for a near miss as for nonsense."""
    return hmac.compare_digest(shown.encode(errors="surrogateescape"), expected.encode())


def made_token(folder: Path) -> str:
    """The token kept there, made (readable by this user only) where there is none."""
    token, file = kept_token(folder), folder / TOKEN_FILE
    if not token:
        token = secrets.token_urlsafe(32)
        try:
            make_private_folder(folder)
            with tempfile.NamedTemporaryFile("w", dir=folder, prefix=f"{TOKEN_FILE}.", delete=False) as new:  # 0600
                new.write(token + "\n")
            Path(new.name).replace(file)
        except OSError as error:
            raise UserError(f"no token can be written to {file}: {error.strerror}; set SHOAL_TOKEN") from None
    elif others := file.stat().st_mode & 0o077:
        raise UserError(
            f"{file} can be read by others (mode {0o600 | others:o}); expected 600. Remove it: a new one is made"
        )
    return token
