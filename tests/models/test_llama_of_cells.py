"""A Llama of transformers, unchanged and with its own tensor plan, trained by cells of two real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from integration.cluster import Cluster, warmed
from safetensors.torch import load_file
from shoal.checkpoint.catalogue import at
from shoal.checkpoint.export import export
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.mark.timeout(400)
def test_a_llama_with_its_tensor_plan_ends_in_the_same_bits_when_a_process_is_killed(tmp_path: Path) -> None:
    """And its exports, from the job and from a checkpoint, are the library's whole model."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **shape)).save_pretrained(tmp_path / "llama")
    shoal = {"checkpoint": {"path": str(tmp_path / "saved"), "every_steps": 8}}
    options = {"by": str(tmp_path / "llama"), "max_steps": 8, "lanes": 4, "shoal": shoal}
    options["export"] = str(tmp_path / "model.safetensors")
    ends = []
    with warmed(["transformers"]):
        for workers, killed in ((2, ()), (5, ("w1",))):
            with Cluster(workers, options, script="integration.cell_scripts:train", pace=0.05) as cluster:
                cluster.wait_step(2)
                cluster.kill(*killed)
                cluster.wait_done()
                ends.append(cluster.fingerprint)
    assert ends[0] == ends[1]
    whole = load_file(tmp_path / "model.safetensors")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "llama")
    model.load_state_dict({name.removeprefix("model."): value for name, value in whole.items()})
    reader = at(str(next((tmp_path / "saved").glob("step-*8-*"))), print).reader()
    export(reader, tmp_path / "saved.safetensors", None)
    saved = load_file(tmp_path / "saved.safetensors")
    assert saved.keys() == whole.keys() and all(torch.equal(saved[name], whole[name]) for name in whole)
