"""The page about DeepSpeed: what of its Python interface is here, and every key of its configuration.

Written by `python -m shoal.deepspeed.doc_page` (`make docs`) to docs/deepspeed.md from the code's own tables; a test
holds the page to it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from shoal.config.deepspeed_page import config_table
from shoal.deepspeed.surface import ABSENT, ARGUMENTS, ENGINE, LAUNCHER, MODULE, REFUSED_FLAGS, UNREAD_FLAGS

OPENING = """\
# DeepSpeed

<!-- Written by `make docs` from the code; do not edit. -->

A script for DeepSpeed trains elastic with another import, and nothing else.

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

`examples/deepspeed_script.py` is a whole one. Start it with `shoal run --workers 3 script.py`, or alone: both give the
same bits.

## The batch, the data and the end

- **Lanes.** How many parts a step's batch has is the job's, and never the number of workers. Where the configuration
  says neither a micro-batch nor `shoal.lanes`, they are the greatest number up to 8 that divides `train_batch_size /
  gradient_accumulation_steps`, from the file alone; one log line says so. At most so many workers train. With a
  micro-batch they are `train_batch_size / (micro-batch × accumulation)`.
- **Data.** `initialize` takes `training_data`, a dataset or a DataLoader, and returns a loader. Without it, the first
  DataLoader that the script goes over to train (with gradients, and the model in train mode) gives the dataset, the
  `collate_fn` and the ways of reading; it may be made before or after `initialize`, or by `engine.deepspeed_io`.
  Samples are read in Shoal's order, in micro-batches of the configuration's size. The DataLoader must shuffle: a
  `DistributedSampler`, or `shuffle=True`. Loops over other DataLoaders, and loops after `engine.eval()` or in
  `torch.no_grad()`, are left as they are.
- **`len(loader)`** of a DataLoader of your own counts its own batches on one process. For a schedule's length take
  `len(engine.training_dataloader) // engine.gradient_accumulation_steps()` steps of an epoch, once the loop has begun,
  or write the number.
- **Ranks.** `init_distributed` gives `torch.distributed` a group of this process alone, so that a `DistributedSampler`
  can be made. A line that picks samples by a rank that it asked the engine for is refused.
- **The end.** `shoal.max_steps` or `shoal.epochs` may say it. Where neither does, the job ends with its scripts: when
  the script of every member has ended, or called `engine.destroy()`, at the same step. Until then `max_steps` is null
  in REST, and people are shown "open". What a script asks for after its last epoch, such as a checkpoint, is done then.
  Started again from its last checkpoint, a script that passes over all its loops ends its job at once.
- A script that ends at a step while another one goes on with the next fails the job, which names both. A loop that is
  left in the middle of an epoch must be left by `engine.global_steps`, right after `engine.step()` or at the top of the
  body: it is the same on all workers, and a count of batches is not. All else fails the job with the script's line.
  A worker without lanes in the last step, as one that has just joined, gets no further batch, and its loop ends.
- A schedule of the configuration whose length is `"auto"` needs an end that is known: give a number.

## What the loop means on lanes

- A step has `train_batch_size` samples, whatever the number of workers: `lanes × gradient_accumulation_steps`
  micro-batches. A worker trains those of its lanes one after the other, so its loop's body runs several times a step,
  and not equally often on each worker. `engine.step()` ends each; with the last one of a step it updates.
  `engine.is_gradient_accumulation_boundary()` and `engine.was_step_applied()` say so before and after it.
- Count with `engine.global_steps`, never with the loop's own iterations. `len(loader)` is the number of micro-batches
  of one lane in an epoch, so `len(loader) // gradient_accumulation_steps` is the number of steps, as in DeepSpeed.
- `loader` reads the data set in Shoal's order, on `engine.device`. One pass of the loop over it is one epoch. A
  worker that joins in the middle of the third epoch goes through the first two at once (they are empty for it) and
  begins where the others are. What ends a job in the middle of an epoch is `engine.stop()`, `max_steps` in the config,
  or `engine.global_steps` (see above).
- The engine calls optimizer and scheduler. `optimizer.param_groups` are the real ones; `optimizer.state_dict()` is
  refused with a sentence, because the state lies in blocks on all workers.
- `engine.eval()`, a forward without gradients, `engine.train()`: as usual, between two micro-batches. A part of an
  evaluation for each worker gives `with engine.evaluating(): for batch in engine.shard(dataset): …`.

## Checkpoints

`engine.save_checkpoint(folder, tag, client_state)` saves an elastic checkpoint, readable by a world of any size.
`folder` must be `shoal.checkpoint.path` of the configuration or lie in it: all workers know the place before the
first step. Called right after a step it saves that step, beside training; after the loop the call waits for it. `tag`
and `client_state` are saved with it: plain values and tensors.

A job goes on from its newest checkpoint by itself (`shoal.checkpoint.resume`), in the middle of an epoch if need be.
`engine.load_checkpoint(folder)`, called before the loop, returns that checkpoint's path and its `client_state`, or
`(None, {})`. After it, the first pass over `loader` is the epoch of that checkpoint, for a script that counts its
epochs on from there; without the call the passes count from the first epoch.

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

The section `elasticity`, where it is on, determines batch, micro-batch and lanes as DeepSpeed 0.19.7 computes them: of
some candidates below `max_train_batch_size` the batch that most numbers of workers divide, and the largest of
`micro_batch_sizes` that leaves each of them a lane. There is a lane for each micro-batch of a step; in ZeRO stages 2
and 3, where every lane costs a reduction, as few lanes as keep all those numbers even, within a sixteenth. The batch
keys of the top level are left out then.

    $ shoal estimate --config ds_config.json
    Batch 1680 = 280 lanes × 1 micro-batch × 6 samples
    workers  lanes each  micro-batches a step  uneven by
          1         280                   280          –
          2         140                   140          –
          3          94                    94       0.7%
    …

Shoal trains by any number of workers up to that of the lanes, and needs no whole nodes: the section's numbers are
those among which lanes divide evenly. `min_gpus` and `max_gpus` are the bounds of a job that has none of its own
(`--min-workers`, `--max-workers`, `workers.min`, `workers.max`), and a job that is submitted with more or fewer
workers is refused. Version 0.1 needs no number of workers. Version 0.2 makes the batch for the number that the job was
submitted with (`--workers`, `workers.wanted`; 1 for a script that trains alone), once for a run: workers that come and
go, and a changed `workers.wanted`, do not change it. The number is part of what all workers must agree on, and of the
manifests of checkpoints. Workers that no launcher starts are told it by `SHOAL_WANTED_WORKERS`.

"""


def page() -> str:
    """The whole page."""
    return OPENING + "".join((*_surface(), *config_table()))


def _surface() -> Iterator[str]:
    yield "## `deepspeed.initialize`\n\n| argument | what becomes of it |\n|---|---|\n"
    yield from (f"| `{name}` | {meaning} |\n" for name, meaning in ARGUMENTS.items())
    yield "\nIt returns `(engine, optimizer, loader, scheduler)`.\n"
    yield "\n## The engine\n\n| name | meaning |\n|---|---|\n"
    yield from (f"| `{name}` | {meaning} |\n" for name, meaning in ENGINE.items())
    yield "\nAny other attribute is the model's. These are refused by name:\n\n| name | why |\n|---|---|\n"
    yield from (f"| `{name}` | {why} |\n" for name, why in ABSENT.items())
    yield "\n## The module\n\n| name | meaning |\n|---|---|\n"
    yield from (f"| `{name}` | {meaning} |\n" for name, meaning in MODULE.items())
    yield "\nWhat DeepSpeed has besides is not there, and says so by name.\n"
    yield "\n## DeepSpeed's commands\n\n`python -m shoal.deepspeed [FLAGS] SCRIPT [ARGUMENTS]` is `deepspeed`:\n\n"
    yield "| flag | what becomes of it |\n|---|---|\n"
    yield from (f"| `{flag}` | {meaning} |\n" for flag, meaning in LAUNCHER.items())
    yield f"| {', '.join(f'`{flag}`' for flag in UNREAD_FLAGS)} | nothing |\n"
    for why in dict.fromkeys(REFUSED_FLAGS.values()):
        yield f"| {', '.join(f'`{flag}`' for flag, one in REFUSED_FLAGS.items() if one == why)} | refused: {why} |\n"
    yield "\n`python -m shoal.deepspeed.env_report` is `ds_report`: it becomes `shoal doctor`. Where DeepSpeed is "
    yield "installed too,\nits own commands keep their names.\n"


if __name__ == "__main__":
    sys.stdout.write(page())
