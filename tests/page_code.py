"""Run the Python of a page as it stands there: `python page_code.py PAGE …`, each block in a namespace of its own.

Called by tests/unit/test_page_code.py, in a process of its own. A block finds what its page speaks of (`model`,
`dataset`, `optimizer`, `engine`, `shoal.json` …), small. A block that is the body of a loop (it has a `continue`) is
put into one; one that only prepares an engine is followed by the loop. A block in `diff` is run twice: what it was
(lines with `-`), and what it is (lines with `+`); one with a title is of a script that other tests run. Prints a line
for each block, and ends with 1 where one failed.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS = 4
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "shoal": {"lanes": 2, "max_steps": STEPS},
}
CLASSIC = {"train_batch_size": 32, "optimizer": CONFIG["optimizer"]}
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
NEEDS = {"devices.md": "a GPU"}
"""Pages whose Python needs what `make check` has not: run where it is there."""
RUN_ELSEWHERE = {"client.md": "tests/integration/test_client.py", "cells.md": "tests/integration/test_cells.py",
                 "first_job.md": "tests/integration/test_first_job.py"}  # fmt: skip
"""Pages whose Python needs a controller, and which test runs it."""

LOOP = """
for batch in engine:
    engine.backward(engine.module(**batch))
    engine.step()
"""


@dataclass(frozen=True, slots=True)
class Block:
    """Code of a page."""

    page: str
    line: int
    language: str
    title: str
    """The file that a diff is of, in examples/; else empty."""
    code: str


def blocks(page: Path) -> Iterator[Block]:
    """All that stands between fences, without their indentation."""
    text = page.read_text()
    for found in re.finditer(r'^( *)```(\w*)(?: title="([\w.]+)")?\n(.*?)^ *```', text, flags=re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(page.name, line, found[2], found[3] or "", textwrap.dedent(found[4]))


def before(diff: str) -> str:
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("+"))


def after(diff: str) -> str:
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))


def variants(block: Block) -> list[str]:
    """What is to be run."""
    return [before(block.code), after(block.code)] if block.language == "diff" else [block.code]


def given(page: str) -> dict[str, Any]:
    """What a page's code finds: names of its model, data and settings."""
    import shoal
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self, *_: Any) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, points: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(self.layers(points), targets)

    torch.manual_seed(0)
    points = torch.randn(32, 4)
    dataset = [{"points": point, "targets": point[:1]} for point in points]
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = {**CONFIG, "zero_optimization": {"stage": 3 if page == "sharded_parameters.md" else 1}}
    Path("shoal.json").write_text(json.dumps(config))
    classic = page == "deepspeed.md"  # 8 lanes of the loader's 4 samples follow from the file
    Path("ds_config.json").write_text(json.dumps(CLASSIC if classic else {**CONFIG, "shoal": {}}))
    return {
        "__name__": "__main__", "torch": torch, "nn": nn, "shoal": shoal, "model": model, "dataset": dataset,
        "validation": dataset[:8], "optimizer": optimizer, "config": {**config, "optimizer": None}, "GPT": Model,
        "build": Model, "DataLoader": torch.utils.data.DataLoader, "AdamW": torch.optim.AdamW,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "collate": torch.utils.data.default_collate,
    }  # fmt: skip


def run(code: str, page: str) -> None:
    """One block, to the end of the training that it begins."""
    names = given(page)
    if re.search(r"\bengine\b", code) and "initialize(" not in code:
        names["engine"] = names["shoal"].initialize(names["model"], "shoal.json", names["dataset"])
    try:
        program = compile(code, page, "exec")
    except SyntaxError as error:
        if "not properly in loop" not in str(error):
            raise
        body = f"{code}\nengine.backward(loss)\nengine.step()"
        program = compile(f"for batch in engine:\n{textwrap.indent(body, '    ')}", page, "exec")
    try:
        exec(program, names)
    finally:
        if (distributed := names["torch"].distributed).is_initialized():
            distributed.destroy_process_group()  # the next block is a script of its own
    engine = names.get("engine")
    if isinstance(engine, names["shoal"].Engine) and engine.global_step < STEPS and "for " not in code:
        exec(LOOP, names)
        assert engine.global_step == STEPS


def is_here(need: str) -> bool:
    import torch

    return need == "a GPU" and torch.cuda.is_available()


def attempt(block: Block, act: Callable[[], None]) -> bool:
    """Whether it ran, in a folder of its own; says what went wrong."""
    here = f"{block.page}:{block.line}"
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        try:
            act()
        except (Exception, SystemExit):
            print(f"{here} failed\n{traceback.format_exc()}", flush=True)
            return False
    print(f"{here} ran", flush=True)
    return True


def main() -> int:
    from ports import free_port

    os.environ.update({**ALONE, "MASTER_PORT": str(free_port())})
    good = True
    for page in map(Path, sys.argv[1:]):
        if page.name in NEEDS and not is_here(NEEDS[page.name]):
            print(f"{page.name} is left out: it needs {NEEDS[page.name]}")
            continue
        if page.name in RUN_ELSEWHERE:
            continue
        for block in blocks(page):
            if block.language in ("python", "diff") and not block.title:
                for code in variants(block):
                    good &= attempt(block, lambda code=code, page=page: run(code, page.name))  # type: ignore[misc]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
