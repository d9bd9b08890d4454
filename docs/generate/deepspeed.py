"""The page about DeepSpeed: which of its Python interface Shoal has, and every key of its configuration.

Written by `python -m docs.generate.deepspeed` (`make docs`) to docs/deepspeed.md, with its tables from the code's own;
a test compares the page with it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from shoal.config.deepspeed import FATES, REASONS, VALUES_REFUSED, Fate, Ignored, Renamed, Switched, Unsupported
from shoal.config.document import Document
from shoal.config.sentences import keys_of
from shoal.deepspeed.surface import (
    ABSENT,
    ARGUMENTS,
    ENGINE,
    LAUNCHER,
    MODULE,
    NOT_OF_PIPELINES,
    PIPELINE,
    REFUSED_FLAGS,
    UNREAD_FLAGS,
)
from shoal_protos.validation import model_in

FILES = 156
OUTCOMES = {
    "trains": 99, "is not supported": 37, "; expected ": 27, "always correct it": 4,
    "needed to derive the third": 1, "is not for the optimizer": 1,
}  # fmt: skip
"""Of tests/deepspeed_public.jsonl.gz: files that train, and files that each phrase refuses. A test counts."""

OPENING = """\
# DeepSpeed

<!-- Written by `make docs` from the code; do not edit. -->

Change one import, and a script for DeepSpeed trains elastically.

```python
import torch
import shoal.deepspeed as deepspeed                                    # was: import deepspeed

deepspeed.init_distributed()
sampler = torch.utils.data.DistributedSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler)
engine, optimizer, _, scheduler = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config="ds_config.json"
)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch in loader:
        loss = engine(**batch)
        engine.backward(loss)
        engine.step()
```

```json
{
  "train_batch_size": 64,
  "gradient_accumulation_steps": 2,
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
  "zero_optimization": {"stage": 2}
}
```

`examples/deepspeed_script.py` is a complete script. Start it with `shoal run --workers 3 script.py`, or alone: both
give the same bits.

## The batch, the data and the end

- **Lanes.** A step's batch is divided into lanes. Their number belongs to the job and does not depend on the number of
  workers; at most one worker per lane trains. If the configuration gives a micro-batch, the number of lanes is
  `train_batch_size / (micro-batch × accumulation)`. If it gives neither a micro-batch nor `shoal.lanes`, it is the
  greatest number up to 8 that divides `train_batch_size / gradient_accumulation_steps`, and one log line says so.
- **Data.** `initialize` takes `training_data`, a dataset or a DataLoader, and returns a loader. Without it, the
  dataset, the `collate_fn` and the reading options come from the first DataLoader that the script iterates over for
  training (with gradients, and the model in train mode). That DataLoader may be created before or after `initialize`,
  or by `engine.deepspeed_io`. Samples are read in Shoal's order, in micro-batches of the configuration's size. The
  DataLoader must shuffle: a `DistributedSampler`, or `shuffle=True`. Loops over other DataLoaders are not changed, nor
  are loops after `engine.eval()` or in `torch.no_grad()`.
- **`len(loader)`** of a DataLoader of your own counts its own batches on one process. For a schedule's
  length, use `len(engine.training_dataloader) // engine.gradient_accumulation_steps()` steps per epoch, once the loop
  has begun, or write the number.
- **Ranks.** `init_distributed` creates a `torch.distributed` group of this process alone, so that a
  `DistributedSampler` can be created. A line that picks samples by the engine's rank is refused.
- **The end.** Set `shoal.max_steps` or `shoal.epochs`, or neither. With neither, the job ends with its scripts: when
  the script of every member has ended, or called `engine.destroy()`, at the same step. Until then `max_steps` is null
  in REST, and the command and the page show "open". A request after the last epoch, such as a checkpoint, is still
  carried out. A script that is started again from its last checkpoint and skips all its loops ends its job at once.
- If one script ends at a step and another one continues with the next, the job fails and names both. To leave a loop in
  the middle of an epoch, test `engine.global_steps` right after `engine.step()` or at the top of the body: it is the
  same on all workers, a count of batches is not. Leaving the loop by any other test fails the job with the script's
  line. A worker without lanes in the last step, such as one that has just joined, gets no further batch, and its loop
  ends.
- A schedule of the configuration whose length is `"auto"` needs a known end: give a number.

## The loop on lanes

- A step has `train_batch_size` samples for any number of workers: `lanes × gradient_accumulation_steps` micro-batches.
  A worker trains the micro-batches of its lanes one after the other, so the loop's body runs several times per step,
  and not equally often on each worker. `engine.step()` ends each micro-batch; the last one of a step updates the model.
  `engine.is_gradient_accumulation_boundary()` and `engine.was_step_applied()` report that before and after the call.
- Count with `engine.global_steps`, never with the loop's own iterations. `len(loader)` is the number of micro-batches
  of one lane in an epoch, so `len(loader) // gradient_accumulation_steps` is the number of steps, as in DeepSpeed.
- `loader` reads the data set in Shoal's order, on `engine.device`. One pass of the loop over it is one epoch. A
  worker that joins in the middle of the third epoch goes through the first two at once (they are empty for it) and
    begins where the others are. To end a job in the middle of an epoch, use `engine.stop()`, `max_steps` in the config,
  or `engine.global_steps` (see above).
- The engine calls optimizer and scheduler. `optimizer.param_groups` are the real ones; `optimizer.state_dict()` is
  refused, because the state lies in blocks on all workers.
- `engine.eval()`, a forward without gradients and `engine.train()` work as usual between two micro-batches. To divide
  an evaluation among the workers, write `with engine.evaluating(): for batch in engine.shard(dataset): …`.

## Pipelines

A `PipelineModule` is a model in stages, each in another process of a [cell](cells.md#pipelines), and trains in any
number of cells, through losses and scaling, with the same bits.

```
import shoal.deepspeed as deepspeed
from shoal.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

deepspeed.init_distributed()
net = PipelineModule(
    layers=[
        TiedLayerSpec("embedding", nn.Embedding, 256, 64),
        *[LayerSpec(Block, 64) for _ in range(4)],
        TiedLayerSpec("embedding", nn.Embedding, 256, 64, forward_fn=logits),
    ],
    loss_fn=loss_fn, num_stages=2, partition_method="type:Block",
)
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
training = deepspeed.utils.RepeatingLoader(DataLoader(dataset, batch_size=2, shuffle=True))
for step in range(60):
    loss = engine.train_batch(data_iter=training)
```

`examples/deepspeed_pipeline.py` is a complete script: `shoal run --workers 4 examples/deepspeed_pipeline.py` trains it
in two cells of two processes.

- **Cells.** `num_stages` opens the cell, as `shoal.cell(pipeline=num_stages)`, or must be that of the cell that the
  script has opened before; a `topology` may have the axes pipe and data. The axis data is the number of cells: nothing
  says it. With `num_stages=1` every process has all layers, and the script can be started alone.
- **Layers.** Each process builds the layers of its stage, and those of the others without memory. All begin as they
  would in one process, in any number of stages; with `seed_layers` layer `i` is built from the seed `base_seed + i`.
  `partition_method` is "uniform", "parameters" or "type:" and a pattern. Layers of one key are one module within a
  stage, and copies in several, whose `tied_weight_attr` stay equal ([tied parameters](cells.md#pipelines)).
  Parameters are named by stage and layer, `0.3.weight`, and `0.tied_modules.embedding.weight`.
- **A step.** The n-th call of `train_batch` is the job's n-th step. It trains `train_batch_size` samples, in
  `gradient_accumulation_steps` micro-batches for each lane, by PyTorch's 1F1B schedule (by GPipe, where there are fewer
  of them than stages), and returns the mean loss, the same on all workers. A worker that joins goes through the calls
  before at once: they return the last loss that it knows. So all scripts end at one step, with or without
  `shoal.max_steps`. After the last step calls return at once, too. The others wait for it meanwhile, at 0.1 ms a call
  and for what else the body does: leave that out by `if engine.global_steps > step: continue` behind the call of step
  `step`.
- **Data.** `initialize` takes `training_data`, or `train_batch` an iterator over a DataLoader: `iter(loader)`, which
  ends with each epoch, or `RepeatingLoader(loader)`. Both say which dataset is trained on; its order is Shoal's. A
  batch is a pair of inputs and labels, each a tensor or a tuple of tensors. All processes of a cell read it.
- **Evaluations.** `eval_batch` takes the next `train_batch_size` samples of the iterator's dataset by their numbers,
  and is for all processes, after a `train_batch`. It returns nan on a worker that joins and goes through steps of
  before, and on all where a process was lost in it and no lane is left.
- **Random numbers** of a forward follow from step, lane and stage; `seed_layers` is for first values alone.
- The optimizer is the config's, an object of one group, or a function of the parameters of any stage. Checkpoints,
  all of ZeRO's stages, and `tensor` beside it by `shoal.cell(config)` before the model: see [Cells](cells.md).
- Refused by name: `DualPipeVModule`, `dynamic_shape`, an `activation_checkpoint_func` of another library, topologies
  with the axis model, frozen layers where there are several stages.

## Checkpoints

`engine.save_checkpoint(folder, tag, client_state)` saves an elastic checkpoint, readable by a world of any size.
`folder` must be `shoal.checkpoint.path` of the configuration or a folder below it, because all workers must know the
path before the first step. Called right after a step, it saves that step in the background, or a later one
where the checkpoint before is still being written; called after the loop, it waits for the save. `tag` and
`client_state` (plain values and tensors) are saved too. So a script that resumes counts from `engine.global_steps`, and
not from a step that it has put into `client_state`.

A job resumes from its newest checkpoint without a call (`shoal.checkpoint.resume`), also in the middle of an epoch.
`engine.load_checkpoint(folder)`, called before the loop, returns that checkpoint's path and its `client_state`, or
`(None, {})`. After the call, `engine.global_steps` is that checkpoint's step until the loop begins, and the first pass
over `loader` is its epoch: a script counts its epochs on from there, also on a worker that joins. Without the call it
is 0 until then, and the passes count from the first epoch. A `tag` must be that of the checkpoint, unless the job is
under way: a worker that joins goes on where the others are.

`python zero_to_fp32.py . OUTPUT`, run in the folder of the checkpoints, writes the newest one's weights as float32 to
`OUTPUT/model.safetensors`, as `shoal export` does; `--tag TAG` takes the newest that the script has saved as `TAG`.

## Models of transformers

`from transformers.integrations import HfDeepSpeedConfig` works without DeepSpeed where the script imports
`shoal.deepspeed` too, before it or after it. `settings = HfDeepSpeedConfig("ds_config.json")` answers `is_zero3()`
and the like; keep it while models are built, and give `settings.config` to `deepspeed.initialize`. While it lives with
ZeRO stage 3, `AutoModelForCausalLM.from_config(…)` builds a model without memory (`shoal.deferred()`), whose first
values are made a unit at a time: the same in every world, and others than those of a model that is built whole.
`from_pretrained` reads the whole model on every worker, also in stage 3, and it is sharded when the loop begins; to
read a saved model in parts, build it in `shoal.deferred(weights="folder")`
([Sharded parameters](sharded_parameters.md)).
`is_deepspeed_zero3_enabled()` of transformers stays false: what the library does where it is true, DeepSpeed does. So
change a model (`resize_token_embeddings`, adapters) before `deepspeed.initialize`, and one that is built without memory
not at all; save it by `engine.save_16bit_model`.

## Elasticity

If the section `elasticity` is enabled, batch, micro-batch and lanes are computed as DeepSpeed 0.19.7 computes them. The
batch is the one, among candidates below `max_train_batch_size`, that most numbers of workers divide. The micro-batch is
the largest of `micro_batch_sizes` that leaves each of those workers a lane. Each micro-batch of a step is a lane. In
ZeRO stages 2 and 3, where every lane costs a reduction, there are only as many lanes as keep all those numbers even,
within a sixteenth. Leave the batch keys of the top level out.

    $ shoal estimate --config ds_config.json
    Batch 1680 = 280 lanes × 1 micro-batch × 6 samples
    workers  lanes each  micro-batches a step  uneven by
          1         280                   280          –
          2         140                   140          –
          3          94                    94       0.7%
    …

Shoal trains with any number of workers up to the number of lanes, and does not need whole nodes: the section's numbers
are those among which lanes divide evenly. `min_gpus` and `max_gpus` are the bounds of a job that has none of its own
(`--min-workers`, `--max-workers`, `workers.min`, `workers.max`); a job that is submitted with more or fewer workers is
refused. Version 0.1 does not use a number of workers. Version 0.2 computes the batch for the number that the job was
submitted with (`--workers`, `workers.wanted`; 1 for a script that trains alone), once per run: workers that come and
go, and a changed `workers.wanted`, do not change it. All workers must agree on the number, and manifests of checkpoints
contain it. Give it to workers that no launcher starts as `SHOAL_WANTED_WORKERS`.

"""


def page() -> str:
    """The whole page."""
    return OPENING + "".join((*_surface(), *config_table()))


def _surface() -> Iterator[str]:
    yield "## `deepspeed.initialize`\n\n| argument | use |\n|---|---|\n"
    yield from (f"| `{name}` | {meaning} |\n" for name, meaning in ARGUMENTS.items())
    yield "\nIt returns `(engine, optimizer, loader, scheduler)`.\n"
    yield "\n## The engine\n\n| name | meaning |\n|---|---|\n"
    yield from (f"| `{name}` | {meaning} |\n" for name, meaning in ENGINE.items())
    yield "\nAny other attribute is the model's. These are refused by name:\n\n| name | why |\n|---|---|\n"
    yield from (f"| `{name}` | {why} |\n" for name, why in ABSENT.items())
    yield "\nThe engine of a `PipelineModule` has these, too, and refuses "
    yield f"{', '.join(f'`{name}`' for name in NOT_OF_PIPELINES)}:\n\n| name | meaning |\n|---|---|\n"
    yield from (f"| `{name}` | {meaning} |\n" for name, meaning in PIPELINE.items())
    yield "\n## The module\n\n| name | meaning |\n|---|---|\n"
    yield from (f"| `{name}` | {meaning} |\n" for name, meaning in MODULE.items())
    yield "\nAny other name of DeepSpeed's raises an error that names it.\n"
    yield "\n## DeepSpeed's commands\n\n`python -m shoal.deepspeed [FLAGS] SCRIPT [ARGUMENTS]` is `deepspeed`:\n\n"
    yield "| flag | replaced by |\n|---|---|\n"
    yield from (f"| `{flag}` | {meaning} |\n" for flag, meaning in LAUNCHER.items())
    yield f"| {', '.join(f'`{flag}`' for flag in UNREAD_FLAGS)} | nothing |\n"
    for why in dict.fromkeys(REFUSED_FLAGS.values()):
        yield f"| {', '.join(f'`{flag}`' for flag, one in REFUSED_FLAGS.items() if one == why)} | refused: {why} |\n"
    yield "\n`python -m shoal.deepspeed.env_report` replaces `ds_report` and runs `shoal doctor`. If DeepSpeed is "
    yield "installed too,\nits own commands keep their names.\n"


def config_table() -> Iterator[str]:
    """Why files are refused; every key, and what becomes of it."""
    yield (
        "\n## Why a `ds_config.json` is refused\n\n"
        "All faults of a file are reported at once. Each sentence contains one of the phrases below. Of "
        f"{FILES}\nconfiguration files of public repositories, {OUTCOMES['trains']} train as they are, with a "
        "DataLoader given. The last column\ncounts the others; a file may have several faults.\n\n"
        "| phrase | meaning | files |\n|---|---|---|\n"
    )
    yield from (
        f"| {phrase.strip(' ;')} | {meaning} | {OUTCOMES.get(phrase, 0)} |\n" for phrase, meaning in REASONS.items()
    )
    yield (
        "\nKeys that DeepSpeed does not have (`_comment`, `logging`, …) are ignored, as in DeepSpeed; the log\n"
        "names them, and the section where such a key would be read if there is one. The section `shoal` is Shoal's\n"
        "own, and an unknown key in it is an error.\n"
        "\n## Every key of `ds_config.json`\n\n"
        "*Honoured*: see [Configuration](configuration.md). *Nothing*: accepted without effect; one log line names\n"
        "all such keys of a file. *Refused*: unless it has one of the values shown, which leave the feature off. A\n"
        "name covers all keys below it.\n\n"
        "| key | effect | reason |\n|---|---|---|\n"
    )
    rows = dict.fromkeys(_honoured(), "| honoured | |") | {key: _row(fate) for key, fate in FATES.items()}
    for key, (values, why) in VALUES_REFUSED.items():
        rows[key] = f"| honoured | refused are {_shown(values)}: {why} |"
    yield from (f"| `{key}` {row}\n" for key, row in sorted(rows.items()))


def _honoured() -> Iterator[str]:
    sections = {name for name, field in Document.model_fields.items() if model_in(field) is not None}
    for key in keys_of(Document):
        is_section = any(other.startswith(f"{key}.") for other in keys_of(Document))
        if not is_section and not key.startswith("shoal") and key not in sections:
            yield key


def _row(fate: Fate) -> str:
    match fate:
        case Ignored(why):
            return f"| nothing | {why} |"
        case Renamed(to):
            return f"| honoured | another name of `{to}` |"
        case Unsupported(why, off):
            return f"| refused | off: {_shown(off)}. {_sentence(why)} |"
        case Switched(why, switch, off, in_parts):
            ways = [f"`{switch}` is not given, or {_shown(off)}"] if switch else []
            ways += ["no `enabled` within is true"] if in_parts else []
            return f"| refused | off: {'; '.join(ways)}. {_sentence(why)} |"


def _sentence(why: str) -> str:
    return f"{why[0].upper()}{why[1:]}."


def _shown(values: tuple[object, ...]) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in values)


if __name__ == "__main__":
    sys.stdout.write(page())
