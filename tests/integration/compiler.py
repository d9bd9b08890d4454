"""Imported by a warm process whose forks compile: torch's compiler, which takes two seconds to import, is in each.

It imports its parts when it first compiles, so it compiles something, and forgets that. Where tqdm is installed, which
the data sets of tests bring, torch shows a bar with it, and its first bar would start a thread.
"""

from __future__ import annotations

import torch
import tqdm

tqdm.tqdm.monitor_interval = 0

torch.compile(lambda value: value + 1, backend="aot_eager")(torch.ones(1, requires_grad=True)).backward()
torch.compiler.reset()
torch._dynamo.utils.counters.clear()
