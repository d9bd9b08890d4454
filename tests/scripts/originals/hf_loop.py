"""Trains a small Llama on the bytes of Python's own source text, in a plain loop."""

import inspect
import textwrap

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

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
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = DataLoader(Text(), batch_size=4, shuffle=True)
    steps = EPOCHS * (len(loader) // ACCUMULATION)
    scheduler = get_linear_schedule_with_warmup(optimizer, 5, steps)

    total, last = 0.0, 0.0
    model.train()
    for _ in range(EPOCHS):
        for number, batch in enumerate(loader, 1):
            loss = model(**batch).loss
            (loss / ACCUMULATION).backward()
            total += loss.item() / ACCUMULATION
            if number % ACCUMULATION == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                last, total = total, 0.0
    print(f"loss {last:.6f}")


if __name__ == "__main__":
    main()
