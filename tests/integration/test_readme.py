"""The README's script, as it stands there: alone, and with the bits that it has on three workers."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from integration.cluster import Cluster, alone
from integration.scripts import Model, Samples
from safetensors.torch import load_file
from tiers import promise

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
SCRIPT = "integration.test_readme:readme"


def readme(result: str) -> None:
    """What a worker runs: the README's code with a model and a data set of ours, and six steps instead of many."""
    code, config = (re.findall(rf"```{kind}\n(.*?)```", README, flags=re.DOTALL)[0] for kind in ("python", "json"))
    os.chdir(Path(result).parent)  # the same for all workers, as on a shared disk
    settings = json.loads(config)
    settings["shoal"]["max_steps"] = 6
    own = Path(f"{result}.json")
    own.write_text(json.dumps(settings))
    own.replace("shoal.json")
    torch.manual_seed(5)
    given: dict[str, Any] = {"model": Model(dropout=0.1, buffers=True), "dataset": Samples(100)}
    exec(code, given)
    ended = {"fingerprint": given["engine"].fingerprint(), "names": sorted(load_file("model.safetensors"))}
    Path(result).write_text(json.dumps(ended))


@promise("a script alone")
def test_the_readmes_script_trains_alone_and_on_three_workers_to_the_same_bits() -> None:
    with Cluster(workers=3, script=SCRIPT) as cluster:
        cluster.wait_done()
        assert [cluster.wait_exit(worker) for worker in cluster.pids] == [0, 0, 0]
        undisturbed = alone({}, SCRIPT)
        assert [cluster.result(worker) for worker in cluster.pids] == [undisturbed] * 3
        assert cluster.fingerprint == undisturbed["fingerprint"]
        assert {"embedding.weight", "norm.running_mean"} <= set(undisturbed["names"])
