"""Whether files can be written where they are to go, asked before anything begins that needs it at its end."""

from __future__ import annotations

import tempfile
from pathlib import Path

from shoal_protos.errors import UserError

from shoal_controller.private_files import make_private_folder


def check_writable(folder: Path, content: str, setting: str, is_private: bool = True) -> None:
    """Make the folder if need be, for this user alone where it is private. Raises `UserError` where no file can be made
    in it. `content`: what is to be written there; `setting`: what says where.
    """
    try:
        if is_private:
            make_private_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"{content} cannot be written to {folder}: {error.strerror}; name another folder with {setting}"
        ) from error
