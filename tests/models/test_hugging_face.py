"""Models of Hugging Face from configs: the bits of stage 0 in stage 3, through a loss, and the same generated tokens.

`make models` installs what they need; `make check` does not run them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shoal
import shoal.blocks.unit_flats
import torch
from crew import ONE_AT_A_TIME, Crew, Task, engine_of, undisturbed
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.engine import Engine
from torch import Tensor, nn

transformers: Any = importlib.import_module("transformers")
transformers.utils.logging.disable_progress_bar()  # it starts a thread

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


def mistral() -> nn.Module:
    config = transformers.MistralConfig(
        **SMALL, num_hidden_layers=3, num_key_value_heads=1, sliding_window=8, eos_token_id=None
    )
    model: nn.Module = transformers.MistralForCausalLM(config)
    return model


def clip() -> nn.Module:
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    words = {"vocab_size": WORDS, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 0}
    config = transformers.CLIPConfig(
        text_config={**size, **words}, vision_config={**size, "image_size": 4, "patch_size": 2}, projection_dim=16
    )
    model: nn.Module = transformers.CLIPModel(config)
    return model


def vit() -> nn.Module:
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model: nn.Module = transformers.ViTForImageClassification(
        transformers.ViTConfig(**size, image_size=32, patch_size=4, num_labels=WORDS)
    )
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
        more: dict[str, Any] = {"labels": targets}
        if type(self.model).__name__ == "CLIPModel":
            pixels = (targets / WORDS).view(-1, 1, 4, 4).expand(-1, 3, 4, 4)
            more = {"pixel_values": pixels, "return_loss": True}
        loss: Tensor = self.model(input_ids=tokens, **more).loss
        return loss


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama": llama, "GPT-2": gpt2, "BERT": bert, "T5": t5,
    "Llama, recomputed": recomputed(llama), "GPT-2, recomputed": recomputed(gpt2),
}  # fmt: skip


BUILT = {"Llama": llama, "Mistral": mistral, "GPT-2": gpt2, "BERT": bert, "T5": t5, "CLIP": clip}
ALL = {**BUILT, "ViT": vit}


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


# ---- built without memory


def built(name: str, stage: int, mirrors: int = 0, weights: Path | None = None) -> Task:
    def model() -> nn.Module:
        with shoal.deferred(weights=weights):
            inner = ALL[name]()
        return Trained(lambda: inner)

    return replace(task("", stage, [], mirrors), model=model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*BUILT, "ViT"])
def test_a_model_built_without_memory_begins_with_values_of_its_own_kind(name: str) -> None:
    """Those of a constructor come from another stream of random numbers."""
    torch.manual_seed(5)
    right = Trained(ALL[name]).state_dict()
    with ONE_AT_A_TIME:
        made = engine_of(built(name, 0), AloneLink(), Faults([])).module.state_dict()
    assert made.keys() == right.keys()
    for key, value in right.items():
        spread = value.float().std(correction=0)
        if spread == 0 or not value.is_floating_point():
            assert torch.equal(made[key], value), key
        elif value.numel() > 500:
            assert float(made[key].std()) == pytest.approx(float(spread), rel=0.2), key


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BUILT)
def test_a_model_built_without_memory_trains_to_the_same_bits_in_stages_0_and_3(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shoal.blocks.unit_flats, "POISON", True)
    right = undisturbed(built(name, 0))
    for workers, mirrors in (("a", 0), ("ab", 0), ("abcd", 1)):
        with Crew(workers, built(name, 3, mirrors)) as crew:
            if mirrors:
                crew.plant("c", 2, "gather")
            assert crew.finish() == right


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("parts", [1, 3])
def test_a_model_that_was_saved_is_read_by_its_workers_in_parts(
    name: str, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shoal.blocks.unit_flats, "POISON", True)
    torch.manual_seed(5)
    saved: Any = BUILT[name]()
    size = sum(parameter.nbytes for parameter in saved.parameters())
    saved.save_pretrained(tmp_path, max_shard_size=size // (parts - 1) if parts > 1 else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (parts > 1)
    assert len(list(tmp_path.glob("*.safetensors"))) >= parts
    loaded = replace(built(name, 0), model=lambda: Trained(lambda: type(saved).from_pretrained(tmp_path).train()))
    right = undisturbed(loaded)
    with Crew("ab", built(name, 3, weights=tmp_path)) as crew:
        assert crew.finish() == right


@pytest.mark.filterwarnings("ignore")
def test_a_model_begins_with_what_was_saved_of_its_body(tmp_path: Path) -> None:
    torch.manual_seed(5)
    saved: Any = gpt2()
    saved.transformer.save_pretrained(tmp_path)
    right = undisturbed(replace(built("GPT-2", 0), model=lambda: Trained(lambda: saved)))
    with Crew("ab", built("GPT-2", 3, weights=tmp_path)) as crew:
        assert crew.finish() == right
