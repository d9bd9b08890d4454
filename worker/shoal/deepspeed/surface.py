"""DeepSpeed's Python interface as data: names that Shoal has, and a sentence for each one that it lacks.

Read by this package and docs/generate/deepspeed.py. `ARGUMENTS` has DeepSpeed's order: scripts give some by position. A
missing attribute says so by name, with what to do instead (`NotInShoal`).
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal_protos.errors import UserError

ARGUMENTS: Mapping[str, str] = {
    "args": "An object whose `deepspeed_config` names the configuration, where `config` does not.",
    "model": "One `torch.nn.Module`, or a `PipelineModule`.",
    "optimizer": "An optimizer over the model's parameters, or a function that makes one from `model_parameters`, "
    "where the configuration names none.",
    "model_parameters": "Parameters, or groups of them, that the configuration's optimizer trains.",
    "training_data": "A map-style dataset, or a DataLoader, of which the dataset, `collate_fn` and `batch_size` are "
    "taken. Without it: of the DataLoader that the loop goes over.",
    "lr_scheduler": "A scheduler of torch, or a function that makes one from the optimizer.",
    "distributed_port": "Nothing: the controller says where workers meet.",
    "mpu": "Refused: `shoal.cell` says which processes train a lane together.",
    "dist_init_required": "Nothing: workers come and go.",
    "collate_fn": "Makes a batch from a list of samples.",
    "config": "The path of the configuration, or a dict.",
    "mesh_param": "Refused, as `mpu`.",
    "config_params": "An older name of `config`.",
    "shoal": "Shoal's own: keys of the configuration's section `shoal`, for a file that has none.",
}

ENGINE: Mapping[str, str] = {
    "engine(*args, **kwargs)": "The model's forward.",
    "backward(loss)": "Once for each batch, with the mean over the micro-batch. Returns the loss divided by "
    "`gradient_accumulation_steps()`, as DeepSpeed's does.",
    "step()": "Ends the batch; with the last one of a step it updates.",
    "is_gradient_accumulation_boundary()": "Whether the current batch is this worker's last one of its step.",
    "was_step_applied()": "Whether the last call of `step()` updated the model.",
    "global_steps": "Steps that the job has committed; before the loop those of the checkpoint that `load_checkpoint` "
    "has returned.",
    "global_samples": "Samples of these steps.",
    "micro_steps": "Micro-batches of these steps, of one lane.",
    "train_batch_size()": "Samples of a step.",
    "train_micro_batch_size_per_gpu()": "Samples of a micro-batch.",
    "gradient_accumulation_steps()": "Micro-batches of a lane in a step.",
    "gradient_clipping()": "The greatest norm of a step's gradient; 0: any.",
    "zero_optimization_stage()": "The stage.",
    "fp16_enabled()": "Whether the model is trained in float16.",
    "bfloat16_enabled()": "Whether the model is trained in bfloat16.",
    "get_lr()": "The rates of the optimizer's groups.",
    "get_mom()": "The momenta of the optimizer's groups (SGD, RMSprop, Muon), or their betas.",
    "get_global_grad_norm()": "The last step's norm, before clipping; None without clipping.",
    "loss_scale()": "The factor of losses.",
    "dynamic_loss_scale()": "Whether the factor changes while training.",
    "skipped_steps": "Steps without an update, because a gradient overflowed in float16.",
    "module": "The model.",
    "optimizer": "The optimizer: its `param_groups` are in use, its `state_dict()` is refused. `cur_scale` and "
    "`loss_scale` are the factor of losses, `overflow` whether the last step overflowed.",
    "lr_scheduler": "The scheduler.",
    "training_dataloader": "The loader.",
    "device": "The device of the batches.",
    "local_rank": "The number of this worker's device; 0 on the CPU.",
    "global_rank": "This worker's number among the members; it changes, and is 0 before its first world.",
    "world_size": "How many members there are now.",
    "dp_world_size": "The number of lanes, to which batch sizes refer; it never changes.",
    "save_checkpoint(folder, tag, client_state)": "See above.",
    "load_checkpoint(folder, tag)": "See above.",
    "save_16bit_model(folder, name)": "Writes the model's weights as safetensors, on rank 0.",
    "stop()": "Ends the job after this step, on all workers alike.",
    "destroy()": "Ends this script's training; a job without `max_steps` or `epochs` then waits for the other scripts. "
    "While an error is handled (`except`, `finally`) it does nothing: call it after that.",
    "deepspeed_io(dataset, …)": "The loader of the training's dataset, where `initialize` got none.",
    "elastic": "Shoal's own engine ([the script](api.md)): `report`, `on_step`, `evaluating`, `shard`, `gathered`, …",
}

PIPELINE: Mapping[str, str] = {
    "train_batch(data_iter)": "Makes the job's next step on `train_batch_size()` samples, and returns its mean loss.",
    "eval_batch(data_iter)": "Returns the mean loss over the next `train_batch_size()` samples of the iterator's "
    "dataset. `return_logits=True`, `compute_loss=False`, other values of `reduce_output` and `num_micro_batches` are "
    "refused.",
    "set_dataiterator(iterator)": "Trains on the DataLoader that this iterator is over.",
    "set_dataloader(loader)": "Trains on this DataLoader.",
    "set_batch_fn(function)": "`function(batch)` makes the pair of inputs and labels, of all samples of a lane.",
    "is_first_stage()": "Whether this process has the first layers.",
    "is_last_stage()": "Whether this process has the last layers.",
}
"""Of the engine of a `PipelineModule` alone."""
NOT_OF_PIPELINES = ("engine(…)", "forward", "backward", "step")
"""Refused of it, as DeepSpeed does."""

ABSENT: Mapping[str, str] = {
    "allreduce_gradients": "the engine reduces gradients while the backward runs",
    "eval_batch": "it is of the engine of a `PipelineModule` alone",
    "flops_profiler": "see `wall_clock_breakdown` in docs/configuration.md",
    "load_module_state_dict": "load weights into the model before deepspeed.initialize",
    "monitor": "report numbers with engine.elastic.report(name=value); trackers get them too",
    "no_sync": "nothing is sent before a lane's last micro-batch; call engine.step() after each",
    "offload_states": "see `offload_optimizer` in docs/offload.md",
    "reload_states": "see `offload_optimizer` in docs/offload.md",
    "set_gradient_accumulation_boundary": "the engine counts micro-batches: it alone knows which lanes are here",
    "set_lr": 'set group["lr"] in engine.optimizer.param_groups, at the top of the body, from engine.global_steps',
    "set_train_batch_size": "the batch is fixed for the job's life",
    "train_batch": "it is of the engine of a `PipelineModule` alone",
}

MODULE: Mapping[str, str] = {
    "initialize": "See above.",
    "init_distributed": "Makes a group of this process alone for torch.distributed: workers meet elsewhere.",
    "add_config_arguments": "Adds `--deepspeed` and `--deepspeed_config` to a parser.",
    "elasticity.compute_elastic_config": "The batch of the section `elasticity`, by DeepSpeed's arguments and errors; "
    "`target_deepspeed_version` is not looked at.",
    "zero.Init": "A context in which a model is built without memory: `shoal.deferred()`.",
    "zero.GatheredParameters": "A context in which all of a parameter can be read: `engine.gathered()`.",
    "comm.get_rank()": "This worker's number among the members: it changes. 0 before the first world, -1 in a warm-up.",
    "comm.get_world_size()": "The number of lanes, to which batch sizes refer; known after `initialize`.",
    "comm.barrier()": "Returns at once: members meet in each step's vote.",
    "comm.init_distributed": "As `init_distributed`.",
    "moe.layer.MoE(hidden_size, expert, …)": "A layer of experts, divided among the processes of a cell: see "
    "[Cells](cells.md#experts).",
    "moe.utils.split_params_into_different_moe_groups_for_optimizer(param_groups)": "The groups without "
    "their experts, and behind them those of experts, with `moe: True` and the name `ep_size_N`. A list is changed, as "
    "DeepSpeed's does; groups are not cut to `max_group_size`.",
    "moe.utils.split_params_into_shared_and_expert_params(params)": "Two lists.",
    "moe.utils.is_moe_param(param)": "Whether it is an expert's.",
    "moe.utils.has_moe_layers(model)": "Whether there is an `MoE`, and how many experts the first one has.",
    "pipe.PipelineModule(layers, num_stages, …)": "A model as a list of layers: see [Pipelines](#pipelines).",
    "pipe.LayerSpec(class, …)": "A layer that is built in the process of its stage alone.",
    "pipe.TiedLayerSpec(key, class, …)": "One of several layers that share parameters.",
    "utils.RepeatingLoader(loader)": "An iterator over a DataLoader without end.",
    "PipelineEngine": "The class of the engine of a `PipelineModule`.",
    "PipelineModule": "As `pipe.PipelineModule`.",
    "checkpointing.checkpoint(function, *args)": "Activation checkpointing of one call, by `torch.utils.checkpoint`.",
    "DeepSpeedEngine": "The class of the engine.",
    "HfDeepSpeedConfig": "Replaces transformers' class of that name once `shoal.deepspeed` is imported: see "
    "[Models of transformers](#models-of-transformers).",
}

OTHERS: Mapping[str, str] = {
    "checkpointing": "what the configuration's section activation_checkpointing says needs no call (docs/memory.md)",
    "comm": "workers come and go, and what one waits for may never come: the engine alone sends. Numbers that all "
    "workers are to have: engine.elastic.report(name=value); rows: engine.elastic.gather(name=rows)",
    "comm.get_local_rank": "engine.local_rank is the number of this worker's device",
    "comm.is_initialized": "workers meet through the controller, and nothing is to be asked before",
    "get_accelerator": "engine.device is where batches are",
    "init_inference": "Shoal trains",
    "moe": "there is deepspeed.moe.layer.MoE (docs/cells.md), and deepspeed.moe.utils with groups for an optimizer",
    "ops": "use torch.optim's own classes, or the config's section optimizer",
    "pipe": "there are PipelineModule, LayerSpec and TiedLayerSpec of deepspeed.pipe, whose data dimension is the "
    "number of cells",
    "tp_model_init": "the script divides its model itself (docs/cells.md)",
    "utils": "there is deepspeed.utils.RepeatingLoader; float32 weights of a checkpoint: "
    "`shoal export PATH FILE --dtype float32`; what is logged: `logging`",
}
"""What scripts also use of the package, with what to do instead."""

LAUNCHER: Mapping[str, str] = {
    "--num_gpus N": "`shoal run --workers N`",
    "--enable_each_rank_log DIR": "`shoal run --log-dir DIR`",
    "--module": "`shoal run -m`: SCRIPT is the name of a module",
    "--no_python": "SCRIPT is any program, as of `shoal run`",
    "--num_nodes N": "1 is this host",
}
"""Flags of DeepSpeed's command, and what becomes of them."""
UNREAD_FLAGS = (
    "--master_port PORT", "--master_addr ADDRESS", "--log_level LEVEL", "--bind_core_list LIST", "--bind_cores_to_rank",
    "--no_local_rank", "--no_ssh_check", "--elastic_training", "--save_pid", "--quiet",
)  # fmt: skip
"""Those that change nothing: the controller says where workers meet, and every job is elastic."""
JOINING = (
    "workers of other hosts join a controller: `shoal controller` and `shoal submit` on one, `shoal worker` on each "
    "(docs/operations.md), or pods of a cluster (docs/kubernetes.md)"
)
DEVICES = "CUDA_VISIBLE_DEVICES says which devices of this host are used"
REFUSED_FLAGS: Mapping[str, str] = {
    **dict.fromkeys(
        ("--hostfile", "--launcher", "--launcher_args", "--node_rank", "--no_ssh", "--force_multi"), JOINING
    ),
    **dict.fromkeys(("--ssh_port", "--min_elastic_nodes", "--max_elastic_nodes"), JOINING),
    **dict.fromkeys(("--include", "--exclude"), f"{DEVICES}; {JOINING}"),
    "--autotuning": "`shoal estimate` says what fits",
    "--venv_script": "activate the environment before",
}
"""Those that are refused, with what to do instead."""


PAGE = "docs/deepspeed.md says what there is"


class NotInShoal(UserError, AttributeError):
    """An `AttributeError` too, so that `hasattr` answers."""


def engine_lacks(name: str) -> NotInShoal:
    why = ABSENT.get(name, PAGE)
    return NotInShoal(f"engine.{name} of DeepSpeed is not in Shoal, nor does the model have it; {why}.")


def module_lacks(name: str) -> NotInShoal:
    """`name`: of a module within it with that module's."""
    why = OTHERS.get(name) or OTHERS.get(name.partition(".")[0], PAGE)
    return NotInShoal(f"deepspeed.{name} is not in Shoal; {why}.")
