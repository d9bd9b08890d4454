"""What DeepSpeed's engine says of itself, as Shoal's engine has it. Only questions; `deepspeed_engine.py` acts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.deepspeed import rank_reads
from shoal.deepspeed.elastic_loader import ElasticLoader
from shoal.training.engine import Engine


class EngineFacts:
    """Numbers of batches, of the world and of the step. `elastic` is Shoal's engine."""

    elastic: Engine
    training_dataloader: ElasticLoader

    # ---- batches

    def train_batch_size(self) -> int:
        """Samples of a step."""
        return self.elastic.context.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch."""
        return self.elastic.context.config.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a lane in a step."""
        return self.elastic.context.config.micro_batches_per_lane

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the batch at hand is this worker's last one of its step."""
        return self.elastic.context.loop.at_last_backward

    # ---- progress

    @property
    def global_steps(self) -> int:
        """Steps that the job has committed."""
        self.training_dataloader.on_asked()
        return self.elastic.global_step

    @property
    def global_samples(self) -> int:
        """Samples of these steps."""
        return self.global_steps * self.train_batch_size()

    @property
    def micro_steps(self) -> int:
        """Micro-batches of these steps, of one lane."""
        return self.global_steps * self.gradient_accumulation_steps()

    def get_lr(self) -> list[float]:
        """The rates of the optimizer's groups."""
        return [float(group["lr"]) for group in self.elastic.context.state.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """What the optimizer's groups have as momentum: of SGD and RMSprop that, of others their betas; 0 where a group
        has none.
        """
        optimizer = self.elastic.context.state.optimizer
        key = "momentum" if type(optimizer).__name__ in ("SGD", "RMSprop") else "betas"
        return [group.get(key, 0.0) for group in optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """The last step's norm, before clipping; None where nothing is clipped."""
        record = self.elastic.context.state.record
        return record.norm if record is not None else None

    def loss_scale(self) -> float:
        """What losses are multiplied by before their backward."""
        return self.elastic.context.state.scale

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale is found while training."""
        scaling = self.elastic.context.config.precision.scaling
        return scaling is not None and scaling.is_dynamic

    @property
    def skipped_steps(self) -> int:
        """Steps of the job that updated nothing, because a gradient overflowed at the loss scale."""
        scale = self.elastic.context.state.loss_scale
        return scale.skipped_steps if scale is not None else 0

    # ---- settings

    def gradient_clipping(self) -> float:
        """The greatest norm of a step's gradient; 0: any."""
        return self.elastic.context.config.gradient_clipping

    def zero_optimization_stage(self) -> int:
        """ZeRO's."""
        return self.elastic.context.config.stage

    def fp16_enabled(self) -> bool:
        """Whether the model is trained in float16."""
        return self._half() == "float16"

    def bfloat16_enabled(self) -> bool:
        """Whether the model is trained in bfloat16."""
        return self._half() == "bfloat16"

    def _half(self) -> str | None:
        precision = self.elastic.context.config.precision
        return precision.parameters or precision.autocast

    # ---- the world

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self.elastic.module

    @property
    def device(self) -> torch.device:
        """Where batches are."""
        return self.elastic.device

    @property
    def local_rank(self) -> int:
        """The number of this worker's device; 0 on the CPU."""
        return self.elastic.device.index or 0

    @property
    def global_rank(self) -> int:
        """This worker's number among the members; 0 before its first world."""
        rank_reads.note()
        return max(0, self.elastic.rank)

    @property
    def world_size(self) -> int:
        """Members now."""
        return self.elastic.world_size

    @property
    def dp_world_size(self) -> int:
        """The world that batch sizes are for: the lanes."""
        return self.elastic.context.config.lanes

    def __getattr__(self, name: str) -> Any:
        """The model's, as in DeepSpeed."""
        elastic = vars(self).get("elastic")
        if elastic is None or name.startswith("__"):
            raise AttributeError(name)
        try:
            return getattr(elastic.module, name)
        except AttributeError:
            from shoal.deepspeed.not_here import engine_lacks

            raise engine_lacks(name) from None
