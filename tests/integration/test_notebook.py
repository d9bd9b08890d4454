"""A notebook: a world of one trains in Jupyter, cell by cell, with the bits of a script; errors are a sentence."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages that Jupyter is made of
    import nbformat
    from nbclient import NotebookClient

MODEL = """
import torch, shoal
from torch import nn
from shoal.callbacks import CSV, Progress

torch.manual_seed(0)
model = nn.Linear(4, 1)
samples = [{"x": torch.full((4,), float(n)), "y": torch.ones(1)} for n in range(32)]
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "shoal": {"lanes": 2, "max_steps": 6},
}
"""
ENGINE = """
engine = shoal.initialize(model=model, config=config, dataset=samples)
engine.on_step(Progress(every_steps=3))
engine.on_step(CSV("steps.csv"))
"""
LOOP = """
for batch in engine:
    engine.backward(nn.functional.mse_loss(engine.module(batch["x"]), batch["y"]))
    engine.step()
"""
END = "engine.fingerprint()"
AGAIN = MODEL + ENGINE + LOOP + END
WRONG = 'shoal.initialize(model=model, config={**config, "zero_optimisation": {}}, dataset=samples)'


def by_a_script() -> str | None:
    """What the notebook's cells do, in a plain program."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    samples = [{"x": torch.full((4,), float(n)), "y": torch.ones(1)} for n in range(32)]
    optimizer = {"type": "AdamW", "params": {"lr": 0.01}}
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": optimizer, "shoal": {"lanes": 2, "max_steps": 6}}
    engine = shoal.initialize(model=model, config=config, dataset=samples)
    for batch in engine:
        engine.backward(nn.functional.mse_loss(engine.module(batch["x"]), batch["y"]))
        engine.step()
    return engine.fingerprint()


def output_of(cell: Any, kind: str) -> Any:
    return next(output for output in cell.outputs if output.output_type == kind)


def run_in_jupyter(folder: Path, *cells: str) -> Any:
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(
        book, timeout=100, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(folder)}}
    )
    asyncio.run(client.async_execute())
    return book.cells


@pytest.mark.filterwarnings("ignore")
def test_a_world_of_one_trains_in_a_notebook_with_the_bits_of_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    _, _, loop, end, again, wrong = run_in_jupyter(tmp_path, MODEL, ENGINE, LOOP, END, AGAIN, WRONG)
    progress = [output.text for output in loop.outputs if output.get("name") == "stdout"]
    assert "step 6/6" in "".join(progress) and "world of 1" in "".join(progress)
    digest = output_of(end, "execute_result")["data"]["text/plain"]
    assert digest == repr(by_a_script())
    assert output_of(again, "execute_result")["data"]["text/plain"] == digest, "the cells can be run again"
    assert len((tmp_path / "steps.csv").read_text().splitlines()) == 7
    error = output_of(wrong, "error")
    assert error["ename"] == "UserError" and "zero_optimisation" in error["evalue"]
