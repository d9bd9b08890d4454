"""The page about DeepSpeed: what of its Python interface is here, and every key of its configuration.

Written by `python -m shoal.deepspeed.doc_page` (`make docs`) to docs/deepspeed.md from the code's own tables; a test
holds the page to it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from shoal.config.deepspeed_page import config_table
from shoal.deepspeed.surface import ABSENT, ARGUMENTS, ENGINE, MODULE

OPENING = """\
# DeepSpeed

<!-- Written by `make docs` from the code; do not edit. -->

A script for DeepSpeed trains elastic with another import, its data set handed to `initialize`, and two things that
DeepSpeed takes from how it was started: how many micro-batches a step has (`lanes`), and where the job ends.

```python
import shoal.deepspeed as deepspeed                                    # was: import deepspeed

engine, optimizer, loader, scheduler = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config="ds_config.json",
    training_data=dataset, shoal={"lanes": 8, "epochs": 3},
)
for epoch in range(3):
    for batch in loader:
        loss = engine(**batch)
        engine.backward(loss)
        engine.step()
```

`examples/deepspeed_script.py` is a whole one. Start it with `shoal run --workers 3 script.py`, or alone.

## What the loop means on lanes

- A step has `train_batch_size` samples, whatever the number of workers: `lanes × gradient_accumulation_steps`
  micro-batches. A worker trains those of its lanes one after the other, so its loop's body runs several times a step,
  and not equally often on each worker. `engine.step()` ends each; with the last one of a step it updates.
  `engine.is_gradient_accumulation_boundary()` and `engine.was_step_applied()` say so before and after it.
- Count with `engine.global_steps`, never with the loop's own iterations. `len(loader)` is the number of micro-batches
  of one lane in an epoch, so `len(loader) // gradient_accumulation_steps` is the number of steps, as in DeepSpeed.
- `loader` reads the data set in Shoal's order, on `engine.device`. One pass of the loop over it is one epoch. A
  worker that joins in the middle of the third epoch goes through the first two at once (they are empty for it) and
  begins where the others are. Go through each epoch to its end: what ends a job early is `engine.stop()`, or
  `max_steps` in the config.
- The engine calls optimizer and scheduler. `optimizer.param_groups` are the real ones; `optimizer.state_dict()` is
  refused with a sentence, because the state lies in blocks on all workers.
- `engine.eval()`, a forward without gradients, `engine.train()`: as usual, between two micro-batches. A part of an
  evaluation for each worker gives `with engine.evaluating(): for batch in engine.shard(dataset): …`.

## Checkpoints

`engine.save_checkpoint(folder, tag, client_state)` saves an elastic checkpoint, readable by a world of any size.
`folder` must be `shoal.checkpoint.path` of the configuration or lie in it: all workers know the place before the
first step. In the loop it is saved beside training, after the step that follows; after the loop the call waits for
it. `tag` and `client_state` are saved with it: plain values and tensors.

A job goes on from its newest checkpoint by itself (`shoal.checkpoint.resume`), in the middle of an epoch if need be.
`engine.load_checkpoint(folder)`, called before the loop, returns that checkpoint's path and its `client_state`, or
`(None, {})`. After it, the first pass over `loader` is the epoch of that checkpoint, for a script that counts its
epochs on from there; without the call the passes count from the first epoch.

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
those among which lanes divide evenly. What bounds a running job are its own `--min` and `--max`; the command names
those of the section, and a job that is submitted with more or fewer workers is refused. Version 0.1 needs no number of
workers. Version 0.2 makes the batch for the number that the job was submitted with (`--workers`, `workers.wanted`; 1
for a script that trains alone), once for a run: workers that come and go, and a changed `workers.wanted`, do not
change it. The number is part of what all workers must agree on, and of the manifests of checkpoints. Workers that no
launcher starts are told it by `SHOAL_WANTED_WORKERS`.

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


if __name__ == "__main__":
    sys.stdout.write(page())
