"""Trains a small GPT-2 on the bytes of Python's own source text with the Trainer of Hugging Face, elastic."""

import inspect
import textwrap

import torch
from shoal.integrations.transformers import Trainer
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

LENGTH = 32


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
    config = GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    args = TrainingArguments(
        output_dir="hf_trainer",
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        weight_decay=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=1,
    )
    trainer = Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=Text())
    trainer.train()
    print(f"loss {trainer.state.log_history[-2]['loss']:.6f}")


if __name__ == "__main__":
    main()
