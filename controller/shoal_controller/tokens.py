"""Tokens: the operators' is a secret; one for workers is derived from it and opens nothing but the sessions of one job.

So nothing about workers' tokens is stored, and a training script cannot submit commands. Both ports check tokens here,
the launcher and `shoal token` make them, `shoal run` and `shoal demo` keep the operators' in a file of this machine.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import tempfile
from pathlib import Path

from shoal_protos.errors import UserError

FILE = "token"
_KIND = "worker"


def token_of_job(secret: str, job: str) -> str:
    """What workers of this job may show: `worker:JOB:` and 64 digits that only who knows the secret can make."""
    mac = hmac.new(secret.encode(), f"shoal {_KIND}\0{job}".encode(), hashlib.sha256)
    return f"{_KIND}:{job}:{mac.hexdigest()}"


def job_of_token(secret: str, shown: str) -> str | None:
    """The job whose workers show this token, None where it was not made from the secret."""
    kind, _, rest = shown.partition(":")
    job = rest.rpartition(":")[0]
    return job if kind == _KIND and is_same(shown, token_of_job(secret, job)) else None


def is_for_workers(shown: str) -> bool:
    """Whether it looks like a token for workers, sound or not."""
    return shown.startswith(f"{_KIND}:")


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
