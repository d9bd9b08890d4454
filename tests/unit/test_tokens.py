"""Where a controller of this machine keeps the operators' token."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from shoal_controller.access.tokens import made_token
from shoal_protos.bearer import kept_token
from shoal_protos.errors import UserError


def test_a_token_of_this_machine_is_made_once_and_read_by_its_user_only(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    assert kept_token(folder) == ""
    token = made_token(folder)
    assert len(token) >= 40 and kept_token(folder) == made_token(folder) == token
    assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
    assert [path.name for path in folder.iterdir()] == ["token"]
    assert made_token(tmp_path / "other") != token


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    made_token(tmp_path)
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(UserError, match=r"token can be read by others \(mode 644\); expected 600\. Remove it"):
        made_token(tmp_path)


def test_a_pipe_in_the_place_of_the_token_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token")
    with pytest.raises(UserError, match=r"token cannot be read: it is not a regular file; remove it"):
        kept_token(tmp_path)


def test_a_token_that_cannot_be_read_or_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "token").mkdir()
    with pytest.raises(UserError, match=r"token cannot be read: it is not a regular file; remove it"):
        kept_token(tmp_path)
    (tmp_path / "token").rmdir()
    (tmp_path / "token").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"cannot be read: .*; set SHOAL_TOKEN"):
        kept_token(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="Not a directory"):
        made_token(tmp_path / "file")
