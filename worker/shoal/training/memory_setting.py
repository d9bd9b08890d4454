"""What a worker's advice depends on where memory ran out (`shoal.out_of_memory`), read from what its parts share.

Called by the update, and where nobody has caught the error. Makes no tensor.
"""

from __future__ import annotations

from shoal.optim.twin import may_step_in_parts
from shoal.out_of_memory import Setting
from shoal.training.activation_checkpointing import finds_units
from shoal.training.context import TrainingContext


def memory_setting(context: TrainingContext) -> Setting:
    """As it is now."""
    config, state = context.config, context.state
    return Setting(
        config=config,
        workers=context.world.plan.world_size if context.world is not None else 1,
        is_on_host=state.device.on_host,
        has_units=finds_units(state.module, config),
        steps_in_parts=may_step_in_parts(state.optimizer),
    )
