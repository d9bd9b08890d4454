"""A Llama of transformers, unchanged and with its own tensor plan, trained by cells of two real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from integration.cluster import Cluster, warmed
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.mark.timeout(400)
def test_a_llama_with_its_tensor_plan_ends_in_the_same_bits_when_a_process_is_killed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **shape)).save_pretrained(tmp_path / "llama")
    options = {"by": str(tmp_path / "llama"), "max_steps": 8, "lanes": 4}
    ends = []
    with warmed(["transformers"]):
        for workers, killed in ((2, ()), (5, ("w1",))):
            with Cluster(workers, options, script="integration.cell_scripts:train", pace=0.05) as cluster:
                cluster.wait_step(2)
                cluster.kill(*killed)
                cluster.wait_done()
                ends.append(cluster.fingerprint)
    assert ends[0] == ends[1]
