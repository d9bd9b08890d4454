"""Models with experts of transformers, unchanged, trained by cells of two real processes that divide the experts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Task, undisturbed
from integration.cell_scripts import OfTransformers, WithoutChance
from integration.cluster import Cluster, warmed
from integration.scripts import VOCABULARY
from safetensors.torch import load_file
from shoal.checkpoint.catalogue import at
from shoal.checkpoint.export import export
from shoal.training.engine import Engine
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2,
}  # fmt: skip
PAGE = str(Path(__file__).resolve().parents[2] / "docs/cells.md")


def mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**SIZES, intermediate_size=48, num_local_experts=4))


def deepseek() -> nn.Module:
    """A dense layer, and one of experts with a shared one."""
    sizes = {**SIZES, "num_key_value_heads": 4, "intermediate_size": 64, "moe_intermediate_size": 24}
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
    groups = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **latent, **groups))


def qwen() -> nn.Module:
    sizes = {**SIZES, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "intermediate_size": 64}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes, num_experts=4))


MODELS = {"mixtral": mixtral, "deepseek": deepseek, "qwen": qwen}
CASES = [
    ("mixtral", "expert"), ("deepseek", "expert"), ("qwen", "expert"), ("mixtral", "tensor"), ("mixtral", "layers"),
]  # fmt: skip
WORLDS = [(2, 1, (), 0), (4, 0, (), 0), (6, 2, ("w0",), 0), (4, 3, ("w3",), 1)]
"""Of one to three cells: workers, stage, those that are killed, and how many join."""
OPTIONS: dict[str, Any] = {"lanes": 4, "max_steps": 24, "gradient_clipping": 0.0}


def trained_in_one_process(folder: str, micro_batches: int) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of the model in one process, step by step, and its weights at the end."""
    found, weights = list[float](), dict[str, Tensor]()

    def step(engine: Engine) -> None:
        if engine.step() and engine.loss is not None:
            found.append(engine.loss)

    def model() -> nn.Module:
        return OfTransformers(AutoModelForCausalLM.from_pretrained(folder))

    def descent(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=0.1)

    def keep(engine: Engine) -> None:
        weights.update((name, value.clone()) for name, value in engine.module.state_dict().items())

    options = {**OPTIONS, "micro_batches_per_lane": micro_batches}
    undisturbed(
        Task(
            options, model, descent, lambda _: None, step=step, data=lambda: WithoutChance(40),
            prepare=lambda engine: engine.on_commit(keep),
        )
    )  # fmt: skip
    return found, weights


def are_mirrored(cluster: Cluster, count: int, _: Any) -> bool:
    """Whether so many train, each with copies of others' blocks."""
    workers = [worker for worker in cluster.workers().values() if worker["state"] == "active"]
    return len(workers) == count and all(worker["mirrored_blocks"] for worker in workers)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "by"), CASES)
def test_a_model_with_experts_ends_in_the_same_bits_in_any_number_of_cells_and_every_stage(
    name: str, by: str, tmp_path: Path
) -> None:
    """Through a kill and a join, with the losses of the model in one process."""
    torch.manual_seed(0)
    model: Any = MODELS[name]()
    model.save_pretrained(tmp_path / "model")
    of_experts = sum(one.numel() for called, one in model.named_parameters() if ".experts." in called)
    shoal = {"checkpoint": {"path": str(tmp_path / "saved"), "every_steps": OPTIONS["max_steps"]}}
    options = {**OPTIONS, "folder": str(tmp_path / "model"), "by": by, "page": PAGE}
    ends, script = list[Any](), "integration.cell_scripts:of_transformers"
    with warmed(["transformers"]):
        for workers, stage, killed, joining in WORLDS:
            go = tmp_path / f"go {workers} {stage}"
            brake = {"pace": 1.0 if killed else 0.0, "until": str(go)}
            if workers == 2:
                brake |= {"shoal": shoal, "export": str(tmp_path / "job.safetensors")}
            with Cluster(workers, {**options, "stage": stage, **brake}, script=script) as cluster:
                if killed:
                    cluster.until("copies of all blocks", partial(are_mirrored, cluster, workers), 150)
                    cluster.kill(*killed)
                    cluster.wait_state(killed[0], "lost", "gone")
                    cluster.add(joining)
                go.touch()
                cluster.wait_done()
                ends.append(cluster.fingerprint)
                if workers == 2:
                    first = cluster.result("w0")
    assert len(set(ends)) == 1
    assert first["of_experts"] == of_experts // 2
    expected, weights = trained_in_one_process(str(tmp_path / "model"), 2 if by == "expert" else 1)
    assert len(first["losses"]) == OPTIONS["max_steps"] and first["losses"][-1] < first["losses"][0]
    assert first["losses"] == pytest.approx(expected, abs=1e-5)
    export(at(str(next((tmp_path / "saved").glob("step-*"))), print).reader(), tmp_path / "saved.safetensors", None)
    assert (tmp_path / "job.safetensors").read_bytes() == (tmp_path / "saved.safetensors").read_bytes()
    whole = load_file(tmp_path / "job.safetensors")
    assert whole.keys() == weights.keys()
    assert all((value - weights[one]).abs().max() < 1e-5 for one, value in whole.items())
    model.load_state_dict({one.removeprefix("model."): value for one, value in whole.items()})
