"""The ten scripts of docs/scripts.md: which they are, how many lines may change, in which order the original reads.

`run.py` measures them, `docs/generate/script_table.py` writes the page. How to add one: README.md beside this file.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
MOST_CHANGED_LINES = 6
WITHOUT_CUDA = "../tests/scripts/torchvision_without_cuda"
HUGGING_FACE = ("models", WITHOUT_CUDA)  # transformers imports torchvision where it is installed


@dataclass(frozen=True, slots=True)
class Order:
    """How the port spreads a step over lanes, so that the original can be given the same samples and seeds."""

    lanes: int
    micro_batch_size: int
    micro_batches_per_lane: int = 1
    seed: int = 0
    draws: bool = False
    """The original has no DataLoader: it draws the positions of a micro-batch by `torch.randint(high, (count,))`."""
    ahead: bool = False
    """The original's loader is accelerate's, which reads the next batch before it gives one out."""


@dataclass(frozen=True, slots=True)
class Script:
    """One row of the table."""

    name: str
    """Of `originals/NAME.py` and `examples/NAME.py`."""
    title: str
    order: Order | None
    """None: the original's own order is the port's too, nothing needs to be given."""
    limit: int = MOST_CHANGED_LINES
    packages: tuple[str, ...] = ()
    """Folders, seen from `.venv`, that both need in PYTHONPATH: `models` is made by `make models`."""
    arguments: tuple[str, ...] = ()
    """Of the original."""
    files: tuple[str, ...] = ()
    """Other files that the port reads, such as a config, from the repository's root."""

    @property
    def original(self) -> Path:
        return ROOT / "tests/scripts/originals" / f"{self.name}.py"

    @property
    def port(self) -> Path:
        return ROOT / "examples" / f"{self.name}.py"

    @property
    def digest(self) -> str:
        """Of all that the row was measured with; what is measured holds for these files alone."""
        read = [self.original, self.port, *(ROOT / file for file in self.files)]
        return hashlib.sha256(b"\0".join(file.read_bytes() for file in read)).hexdigest()[:16]


SCRIPTS = (
    Script("nanogpt_loop", "Loop in the manner of nanoGPT", Order(lanes=4, micro_batch_size=4, draws=True), limit=12),
    Script("hf_loop", "Loop over a Hugging Face model", Order(lanes=4, micro_batch_size=4), packages=HUGGING_FACE),
    Script("hf_trainer", "Hugging Face Trainer", None, packages=HUGGING_FACE),
    Script(
        "torchvision_cnn",
        "torchvision CNN with augmentation",
        Order(lanes=4, micro_batch_size=8),
        packages=(WITHOUT_CUDA,),
    ),
    Script("recommender", "Recommender with EmbeddingBag", Order(lanes=4, micro_batch_size=32)),
    Script("lora_peft", "LoRA with PEFT", Order(lanes=4, micro_batch_size=4), packages=HUGGING_FACE),
    Script("streamed_corpus", "Streamed corpus", None),
    Script(
        "deepspeed_script",
        "DeepSpeed script",
        Order(lanes=8, micro_batch_size=8),
        packages=("deepspeed",),
        arguments=("--deepspeed_config", str(ROOT / "examples/ds_config.json")),
        files=("examples/ds_config.json",),
    ),
    Script("ddp_tutorial", "DDP tutorial", Order(lanes=4, micro_batch_size=8)),
    Script(
        "diffusion",
        "Diffusers with averaged weights",
        Order(lanes=4, micro_batch_size=4, ahead=True),
        limit=10,
        packages=HUGGING_FACE,
    ),
)


def script(name: str) -> Script:
    return next(one for one in SCRIPTS if one.name == name)
