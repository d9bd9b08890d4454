"""A script for DeepSpeed's pipelines that trains elastic: a small GPT on bytes, a `PipelineModule` in two stages.

What differs from a script for DeepSpeed are the imports. Run it on two cells of two processes (`shoal run --workers 4
examples/deepspeed_pipeline.py`), kill any of them, and scale it (`shoal scale JOB 2`): the fingerprint stays.
"""

import inspect

import shoal.deepspeed as deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as F
from shoal.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from shoal.deepspeed.utils import RepeatingLoader

steps, length, width, heads = 60, 32, 64, 4
config = {
    "train_batch_size": 32,  # 4 lanes of 4 micro-batches
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
}


class Text(torch.utils.data.Dataset):
    def __init__(self, start, stop):
        self.data = torch.tensor(list(inspect.getsource(inspect).encode()[start:stop]))

    def __len__(self):
        return len(self.data) - length

    def __getitem__(self, i):
        return self.data[i : i + length], self.data[i + 1 : i + 1 + length]


class Position(nn.Module):
    def __init__(self):
        super().__init__()
        self.wpe = nn.Embedding(length, width)

    def forward(self, x):
        return x + self.wpe.weight[: x.size(1)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in self.qkv(self.ln_1(x)).chunk(3, dim=-1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


def logits(embedding, x):
    return F.linear(x, embedding.weight)


def loss_fn(outputs, labels):
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())


deepspeed.init_distributed()
torch.manual_seed(0)
net = PipelineModule(
    layers=[
        TiedLayerSpec("embedding", nn.Embedding, 256, width),
        LayerSpec(Position),
        *[LayerSpec(Block) for _ in range(4)],
        LayerSpec(nn.LayerNorm, width),
        TiedLayerSpec("embedding", nn.Embedding, 256, width, forward_fn=logits),
    ],
    loss_fn=loss_fn,
    num_stages=2,
    partition_method="type:Block",
    activation_checkpoint_interval=2,
)
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
training = RepeatingLoader(torch.utils.data.DataLoader(Text(0, 50000), batch_size=2, shuffle=True))
held_out = RepeatingLoader(torch.utils.data.DataLoader(Text(50000, 60000), batch_size=2))

for step in range(1, steps + 1):
    loss = engine.train_batch(data_iter=training)
    if step % 20 == 0:
        evaluated = engine.eval_batch(data_iter=held_out)
        if engine.global_rank == 0:
            print(f"step {engine.global_steps}: loss {loss:.4f}, of held-out text {evaluated:.4f}")
