"""transformers' configuration for DeepSpeed, without DeepSpeed: models built and read under it, and trained."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import shoal
import shoal.deepspeed as deepspeed
import torch
from crew import Crew, Opened, Task
from models.trainer_scripts import Sequences, padded
from shoal.deepspeed import initializing
from shoal.training.start import engine_with

transformers: Any = importlib.import_module("transformers")
theirs: Any = importlib.import_module("transformers.integrations")

OPENED: ContextVar[Opened] = ContextVar("the process of this thread")
CONFIG = {
    "train_micro_batch_size_per_gpu": 3,
    "train_batch_size": 12,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 3},
}


def sizes() -> Any:
    return transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, eos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip


def script(model: Callable[[], Any], config: dict[str, Any] = CONFIG) -> Task:
    """As for DeepSpeed: the configuration first, the model under it, and a loop of its own."""

    def whole(opened: Opened) -> None:
        OPENED.set(opened)
        settings = theirs.HfDeepSpeedConfig(config)
        assert settings.is_zero3() == (config is CONFIG)
        torch.manual_seed(0)
        built = model()
        engine, _, loader, _ = deepspeed.initialize(
            model=built, model_parameters=built.parameters(), training_data=Sequences(48), collate_fn=padded,
            config=settings.config, shoal={"epochs": 2},
        )  # fmt: skip
        assert loader is not None
        for _ in range(2):
            for batch in loader:
                opened.before()
                engine.backward(engine(**batch).loss)
                engine.step()

    return Task(whole=whole)


@pytest.fixture(autouse=True)
def in_a_crew(monkeypatch: pytest.MonkeyPatch) -> None:
    def assemble(given: Any) -> Any:
        opened = OPENED.get()
        engine = engine_with(given, lambda *_: (opened.link, opened.faults))
        opened.made(engine)
        return engine

    monkeypatch.setattr(initializing, "assemble", assemble)


def trained(names: str, task: Task, kill: bool = False) -> str:
    with Crew(names, task) as crew:
        if kill:
            crew.train_to(2)
            crew.plant("b", 4, "exchange")
        return crew.finish()


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_is_built_under_the_configuration_takes_no_memory_and_trains_to_the_bits_of_any_stage() -> None:
    def whole() -> Any:
        with shoal.deferred():
            return transformers.LlamaForCausalLM(sizes())

    def built() -> Any:
        model = transformers.AutoModelForCausalLM.from_config(sizes())
        assert all(parameter.is_meta for parameter in model.parameters())
        return model

    right = trained("a", script(whole, {**CONFIG, "zero_optimization": {"stage": 0}}))
    assert trained("a", script(built)) == trained("ab", script(built), kill=True) == right


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_is_read_under_the_configuration_has_its_saved_values(tmp_path: Path) -> None:
    torch.manual_seed(5)
    transformers.LlamaForCausalLM(sizes()).save_pretrained(tmp_path)

    def read() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(tmp_path)

    def whole() -> Any:
        model = transformers.LlamaForCausalLM(sizes())
        model.load_state_dict(transformers.LlamaForCausalLM.from_pretrained(tmp_path).state_dict())
        return model

    right = trained("a", script(whole, {**CONFIG, "zero_optimization": {"stage": 0}}))
    assert trained("a", script(read)) == trained("ab", script(read), kill=True) == right
