"""docs/client.md as it stands there, against a real controller that starts a real job."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from integration.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
OPTIONS: dict[str, Any] = {"max_steps": 12}
SCRIPT = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from integration.scripts import train
train(result=os.path.join(sys.argv[1], os.environ["SHOAL_WORKER_ID"]), **json.loads(sys.argv[2]))
"""


def test_the_page_on_the_client_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = json.dumps([sys.executable, str(tmp_path / "train.py"), str(tmp_path), json.dumps(OPTIONS)])
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs/client.md").read_text(), flags=re.DOTALL))
    assert '["python", "train.py"]' in code
    with Cluster(workers=1, options={"max_steps": 1}) as cluster:  # another job, of no interest
        monkeypatch.setenv("SHOAL_URL", cluster.url)
        exec(code.replace('["python", "train.py"]', command), {})
    printed = capsys.readouterr().out
    assert "succeeded at step 12 - " in printed and "is over" in printed, printed
