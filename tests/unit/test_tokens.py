"""Tokens: what opens what, and where a controller of this machine keeps its own."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest
from shoal_controller.tokens import is_for_workers, job_of_token, kept_token, made_token, token_of_job
from shoal_protos.errors import UserError

TOKEN = token_of_job("secret", "train")


def test_a_token_for_workers_names_its_job_and_is_made_from_the_operators() -> None:
    assert re.fullmatch(r"worker:train:[0-9a-f]{64}", TOKEN)
    assert is_for_workers(TOKEN) and not is_for_workers("secret")
    assert job_of_token("secret", TOKEN) == "train"
    assert token_of_job("secret", "train") == TOKEN != token_of_job("secret2", "train")


@pytest.mark.parametrize(
    "shown",
    [
        "", "secret", "worker:", "worker:train:", "worker::", TOKEN[:-1], TOKEN + "0", TOKEN.upper(),
        TOKEN.replace("train", "other"), TOKEN.replace("train", "train:x"), TOKEN.removeprefix("worker:"),
        token_of_job("another", "train"), "worker:train:" + "é" * 64, "worker:train:\udcff",
    ],
)  # fmt: skip
def test_nothing_else_opens_a_job(shown: str) -> None:
    assert job_of_token("secret", shown) is None


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


def test_a_token_that_cannot_be_read_or_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "token").mkdir()
    with pytest.raises(UserError, match=r"cannot be read: .*; set SHOAL_TOKEN"):
        kept_token(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="Not a directory"):
        made_token(tmp_path / "file")
