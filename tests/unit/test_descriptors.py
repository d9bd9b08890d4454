"""How many files and connections a controller or a worker may have open; too few are one sentence, no traceback."""

import os
import re
import resource
import subprocess
import sys

import pytest
from forked_command import SHOAL
from rule import holds
from shoal_controller.process.descriptors import raise_descriptor_limit
from tiers import check

pytestmark = check("starts processes")

LIMIT = resource.RLIMIT_NOFILE


@pytest.fixture
def lowered():
    """This process may open fewer than its user could grant it."""
    soft, hard = resource.getrlimit(LIMIT)
    resource.setrlimit(LIMIT, (min(soft, hard) - 1, hard))
    yield hard
    resource.setrlimit(LIMIT, (soft, hard))


@holds("… and no address has more than half")
def test_a_process_that_serves_may_open_as_many_as_its_user_can_grant(lowered):
    raise_descriptor_limit()
    assert resource.getrlimit(LIMIT) == (lowered, lowered)


def test_where_more_is_refused_the_limit_stays(lowered, monkeypatch):
    def refuse(*_):
        raise ValueError("not allowed to raise maximum limit")

    before = resource.getrlimit(LIMIT)
    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_descriptor_limit()
    monkeypatch.undo()
    assert resource.getrlimit(LIMIT) == before


SCRIPT = """
import shoal, torch
model = torch.nn.Linear(2, 2)
shoal.initialize(
    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), dataset=[torch.ones(2)] * 8,
    config={"train_micro_batch_size_per_gpu": 1, "shoal": {"lanes": 1, "max_steps": 1}},
)
"""


@pytest.mark.parametrize(
    ("who", "command"),
    [
        ("a controller", [SHOAL, "run", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "train.py"]),
        ("a controller", [SHOAL, "controller", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]),
        (
            "a worker",
            [SHOAL, "worker", "--controller", "127.0.0.1:1", "--job", "train", "--", sys.executable, "train.py"],
        ),
    ],
)
def test_whoever_may_open_too_few_is_told_how_many_it_needs(who, command, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    limited = ["bash", "-c", 'ulimit -n 20 && exec "$@"', "bash", *command]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    done = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, timeout=100, env=environment)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert re.sub(r" \(train\.py:\d+\)$", "", done.stderr, flags=re.MULTILINE) == (
        f"shoal: this process may open 20 files and connections; {who} needs 64 at least, and more with every worker. "
        "Raise the limit: `ulimit -n 1024`\n"
    )
