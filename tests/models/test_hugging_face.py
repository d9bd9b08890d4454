"""Models of Hugging Face from configs: the bits of stage 0 in stage 3, through a loss, and the same generated tokens.

`make models` installs what they need; `make test` does not run them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import shoal.blocks.unit_flats
import torch
from crew import Crew, Task, undisturbed
from shoal.training.engine import Engine
from torch import Tensor, nn

transformers: Any = importlib.import_module("transformers")

WORDS = 256
SMALL = {"vocab_size": WORDS, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64}


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        **SMALL, num_hidden_layers=3, num_key_value_heads=1, attention_dropout=0.1, eos_token_id=None
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=64, n_embd=32, n_layer=3, n_head=2, bos_token_id=None, eos_token_id=None
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def bert() -> nn.Module:
    model: nn.Module = transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, num_hidden_layers=3))
    return model


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(vocab_size=WORDS, **sizes, decoder_start_token_id=0)
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    return model


def recomputed(make: Callable[[], Any]) -> Callable[[], nn.Module]:
    """With its own activation checkpointing."""

    def build() -> nn.Module:
        model = make()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        built: nn.Module = model
        return built

    return build


class Trained(nn.Module):
    """The model's own loss."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.model = make()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (batch, length) both
        loss: Tensor = self.model(input_ids=tokens, labels=targets).loss
        return loss


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama": llama, "GPT-2": gpt2, "BERT": bert, "T5": t5,
    "Llama, recomputed": recomputed(llama), "GPT-2, recomputed": recomputed(gpt2),
}  # fmt: skip


def task(name: str, stage: int, generated: list[Any], mirrors: int = 1) -> Task:
    def prepare(engine: Engine) -> None:
        def generate() -> None:
            start = torch.tensor([[1, 2, 3]])
            with engine.evaluating():
                tokens = engine.module.model.generate(start, max_new_tokens=5, do_sample=False, pad_token_id=0)
            generated.append(tokens.tolist())

        if name.startswith(("Llama", "GPT")):
            engine.on_step(lambda _: generate())

    return Task(
        {"max_steps": 4, "lanes": 4, "stage": stage, "mirrors": mirrors},
        model=lambda: Trained(MODELS[name]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        prepare=prepare,
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_same_bits_and_says_the_same_in_stage_3(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.blocks.unit_flats, "POISON", True)
    whole: list[Any] = []
    right = undisturbed(task(name, 0, whole))
    for workers, mirrors in (("ab", 0), ("abc", 1)):
        sharded: list[Any] = []
        with Crew(workers, task(name, 3, sharded, mirrors)) as crew:
            if mirrors:
                crew.plant("c", 2, "gather")
            assert crew.finish() == right
        assert sharded == whole
