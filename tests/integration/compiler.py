"""Imported by the warm process: torch's compiler, which takes two seconds to import, is there in every fork of it.

It imports its parts when it first compiles, so it compiles something, and forgets that.
"""

from __future__ import annotations

import torch

torch.compile(lambda value: value + 1, backend="aot_eager")(torch.ones(1, requires_grad=True)).backward()
torch.compiler.reset()
torch._dynamo.utils.counters.clear()
