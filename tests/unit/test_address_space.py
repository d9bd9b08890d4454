"""A limit of the address space that is too low is one sentence, before gRPC aborts the process or waits for ever."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from shoal_protos import limits
from shoal_protos.errors import UserError
from shoal_protos.limits import MIB, check_address_space
from tiers import check

pytestmark = check("measures memory")


@pytest.mark.parametrize(("limit", "refused"), [(resource.RLIM_INFINITY, False), (600, True), (700, False)])
def test_what_is_left_below_the_limit_counts(monkeypatch: pytest.MonkeyPatch, limit: int, refused: bool) -> None:
    most = limit * MIB if limit > 0 else limit, resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: most)
    monkeypatch.setattr(limits, "_in_use", lambda: 150 * MIB)
    if not refused:
        return check_address_space("a controller", 512)
    with pytest.raises(UserError, match=r"limited to 600 MiB, and 450 MiB of it are free; a controller needs 512 MiB"):
        check_address_space("a controller", 512)
    return None


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (300 << 20, 300 << 20))
from shoal_controller.cli.console import main
main()
"""


def test_a_controller_with_too_little_does_not_start(tmp_path: Path) -> None:
    """300 MiB are enough to import all, and then a thread of gRPC's finds no room, or does."""
    places = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--store", f"embedded:{tmp_path}", "--data", tmp_path]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, "controller", *places],
        capture_output=True, text=True, timeout=100, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("shoal: the address space of this process is limited to 300 MiB, and ")
