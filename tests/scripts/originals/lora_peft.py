"""Trains a LoRA adapter of a small Llama with PEFT, on the bytes of Python's own source text."""

import inspect
import textwrap

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH, EPOCHS, ACCUMULATION = 32, 2, 4


class Text(Dataset):
    def __init__(self):
        self.bytes = torch.tensor(list(inspect.getsource(textwrap).encode()))

    def __len__(self):
        return len(self.bytes) // LENGTH

    def __getitem__(self, index):
        tokens = self.bytes[index * LENGTH : (index + 1) * LENGTH]
        return {"input_ids": tokens, "labels": tokens}


def main():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), lora)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    loader = DataLoader(Text(), batch_size=4, shuffle=True)

    total, last = 0.0, 0.0
    for _ in range(EPOCHS):
        for number, batch in enumerate(loader, 1):
            loss = model(**batch).loss
            (loss / ACCUMULATION).backward()
            total += loss.item() / ACCUMULATION
            if number % ACCUMULATION == 0:
                optimizer.step()
                optimizer.zero_grad()
                last, total = total, 0.0
    print(f"loss {last:.6f}")
    model.save_pretrained("adapter")


if __name__ == "__main__":
    main()
