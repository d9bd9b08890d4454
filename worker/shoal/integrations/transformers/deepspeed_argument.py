"""`TrainingArguments(deepspeed=…)` without DeepSpeed: the library's own arguments would import it when they are made.

From the import of the door on they keep the value and do nothing with it; `engine_config.py` reads it.
"""

from __future__ import annotations

from typing import Any

import transformers


def put_deepspeed_aside() -> None:
    """Once, when the door is imported."""
    kind: Any = transformers.TrainingArguments
    whole = kind.__post_init__
    if getattr(whole, "puts_deepspeed_aside", False):
        return

    def post_init(self: Any) -> None:
        given, self.deepspeed = self.deepspeed, None
        whole(self)
        assert self.device is not None, "the device is found while there is no DeepSpeed to be asked"
        self.deepspeed = given

    post_init.puts_deepspeed_aside = True  # type: ignore[attr-defined]
    kind.__post_init__ = post_init
