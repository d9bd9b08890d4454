"""What a configuration file may say: DeepSpeed's `ds_config.json` with one more section, `shoal`.

These models are the reference: docs/configuration.md is written from them. `load.py` reads a file into a `Document`;
`training.py` is what comes of it once batch sizes and "auto" are settled. What DeepSpeed knows and Shoal does not is in
`deepspeed.py`. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from shoal_protos.config_file import whole
from shoal_protos.elastic_section import Elasticity
from shoal_protos.memory_estimate import MOST_LANES
from shoal_protos.plan import DEFAULT_MIRROR_PARTNERS
from shoal_protos.shape import DIMENSIONS, MOST_PROCESSES
from shoal_protos.validation import Allowed

Auto = Literal["auto"]
MOST = 10**15
"""Counts and byte sizes stay far within 64 bits, whatever they are multiplied by on the way."""
MOST_MIRRORS = 1_000
MOST_PARTNERS = 64
MOST_THREADS = 1_024
MOST_PATH = 512
NO_NUL = r"^[^\x00]*$"
"""What names a file. A pattern refuses lone surrogates too, which cannot be sent to a controller."""
UNITS: Literal["units"] = "units"
"""In place of class names: the model's units."""

Whole = Annotated[int, BeforeValidator(whole)]
"""2000.0 and 1e5 are whole numbers too."""
Positive = Annotated[Whole, Field(ge=1, le=MOST)]
CountOrAuto = Annotated[Positive | Auto | None, Allowed('a whole number from 1 to 10^15, or "auto"')]
Count = Annotated[Positive | None, Allowed("a whole number from 1 to 10^15")]
Natural = Annotated[Whole, Field(ge=0, le=MOST), Allowed("a whole number from 0 to 10^15")]
Switch = Annotated[bool, Allowed("true or false")]
Name = Annotated[str, Field(min_length=1), Allowed("a string")]
Folder = Annotated[
    Annotated[str, Field(max_length=MOST_PATH, pattern=NO_NUL)] | None,
    Allowed(f"a folder of at most {MOST_PATH} characters"),
]
JOB_NAME = "DeepSpeedJobName"
Parameters = Annotated[dict[str, Any], Allowed("a section of parameters")]


class Section(BaseModel):
    """One section of the file: frozen, and no key but the listed ones."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class Optimizer(Section):
    """`optimizer`: the optimizer that Shoal builds if the script passes none."""

    type: Name
    """Adam, AdamW, SGD, Adagrad, RMSprop or another elementwise class of torch.optim, or Lion, in any case. As in
    DeepSpeed, `Adam` decouples weight decay (it is AdamW) unless `params.adam_w_mode` is false. `Muon`: torch's
    Muon for the matrices of hidden layers, AdamW for all else ([Optimizers](optimizers.md))."""
    params: Parameters = {}
    """Arguments of the class: `lr`, `betas`, `eps`, `weight_decay`, …; also DeepSpeed's `torch_adam` and
    `adam_w_mode`. Missing arguments, or `"auto"` (not for `lr`), have the class's own default; but the `weight_decay`
    of Adam and AdamW is 0, as in DeepSpeed, unless `torch_adam` is true."""


class Scheduler(Section):
    """`scheduler`: the learning-rate schedule that Shoal builds if the script passes none. It advances each step."""

    type: Name
    """DeepSpeed's WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or a class of
    torch.optim.lr_scheduler that needs numbers only."""
    params: Parameters = {}
    """Arguments of the class. `"auto"`: `warmup_min_lr` is 0, `warmup_max_lr` the optimizer's rate, and
    `total_num_steps`, `total_steps`, `total_iters`, `T_max` the job's last step."""


class OffloadOptimizer(Section):
    """`zero_optimization.offload_optimizer`: the place of optimizer state and master weights (docs/offload.md)."""

    device: Annotated[Literal["none", "cpu", "nvme"] | None, Allowed('"none", "cpu" or "nvme"')] = "none"
    """`none`: on the device of the parameters. `cpu`: in host memory, with updates on the CPU; no effect for a model on
    the CPU. `nvme`: in a file in `nvme_path`, in every stage; updates on the CPU pass it through three buffers. The
    bits are those of `cpu`."""
    nvme_path: Annotated[
        Annotated[str, Field(min_length=1, max_length=MOST_PATH, pattern=NO_NUL)] | None,
        Allowed(f"a folder of at most {MOST_PATH} characters"),
    ] = None
    """Folder on a local disk, on every worker. Each worker keeps one anonymous file in it, which is deleted when its
    process ends. Required if `device` is "nvme"."""


class OffloadParam(Section):
    """`zero_optimization.offload_param`: the place of parameters that a worker keeps in stage 3 (docs/offload.md)."""

    device: Annotated[Literal["none", "cpu"] | None, Allowed('"none" or "cpu"')] = "none"
    """`none`: on the model's device. `cpu`: in host memory, from which a unit is copied to the device while it is
    gathered; it needs stage 3 and `offload_optimizer.device` "cpu" or "nvme". No effect for a model on the CPU."""


class ZeroOptimization(Section):
    """`zero_optimization`: the state that is sharded over the workers."""

    stage: Annotated[Whole, Field(ge=0, le=3), Allowed("0, 1, 2 or 3")] = 0
    """0: every worker keeps all optimizer state. 1: each worker keeps the state of the blocks that it owns or mirrors.
    2: also their gradients; a lane's gradient is sent while its backward runs. 3: also their parameters; a unit of the
    model is gathered while it is used (sharded_parameters.md). The bits are the same in all stages."""
    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    offload_param: OffloadParam = OffloadParam()


class Bf16(Section):
    """`bf16`: training in bfloat16."""

    enabled: Annotated[bool | Auto, Allowed('true, false or "auto"')] = False
    """True: parameters, gradients and floating buffers are bfloat16; sums of gradients and optimizer state are float32,
    and each block's owner and mirrors keep float32 master weights, which begin with the script's own values. "auto" is
    false."""
    auto_cast: Switch = False
    """True: parameters stay float32, and the module's forward runs under `torch.autocast`."""


class Fp16(Section):
    """`fp16`: training in float16, with scaled losses."""

    enabled: Annotated[bool | Auto, Allowed('true, false or "auto"')] = False
    """True: as `bf16.enabled` with float16, and the loss is scaled so that small gradients do not vanish; a step whose
    gradient overflows is skipped. "auto" is false."""
    auto_cast: Switch = False
    """True: parameters stay float32, and the module's forward runs under `torch.autocast`; the loss is scaled."""
    loss_scale: Annotated[float, Field(ge=0), Allowed("a number of at least 0")] = 0.0
    """The scale; 0: it is adjusted during training (dynamic)."""
    initial_scale_power: Annotated[Whole, Field(ge=0, le=64), Allowed("a whole number from 0 to 64")] = 16
    """Of a dynamic scale: it begins with 2 to this power."""
    loss_scale_window: Annotated[Positive, Allowed("a whole number from 1 to 10^15")] = 1000
    """Of a dynamic scale: steps without an overflow after which it doubles."""
    hysteresis: Annotated[Positive, Allowed("a whole number from 1 to 10^15")] = 2
    """Of a dynamic scale: number of overflows that halve it; in stage 0 each one does, as in DeepSpeed."""
    consecutive_hysteresis: Switch = False
    """Of a dynamic scale: whether a step without an overflow restarts the count of `hysteresis`. False: the count
    restarts when the scale doubles."""
    min_loss_scale: Annotated[float, Field(gt=0), Allowed("a number above 0")] = 1.0
    """Of a dynamic scale: its minimum; the job fails if an overflow needs a smaller one, but in stage 0 it stays."""


class ActivationCheckpointing(Section):
    """`activation_checkpointing`: DeepSpeed's section; which modules are checkpointed says
    `shoal.activation_checkpointing`."""

    cpu_checkpointing: Annotated[bool | Auto | None, Allowed('true, false or "auto"')] = False
    """True: the inputs of checkpointed modules are kept in (pinned) host memory until backward. No effect for a model
    on the CPU, and in code compiled by torch.compile. Bits are the same."""


class TensorBoard(Section):
    """`tensorboard`: losses, rates and scales for TensorBoard, written by rank 0 (`pip install tensorboard`)."""

    enabled: Switch = False
    """True: after each step `Train/Samples/train_loss`, `…/lr` and, with fp16, `…/loss_scale` are written, over the
    number of samples trained."""
    output_path: Folder = None
    """Folder that all workers can write, since any of them may become rank 0. None: the working folder."""
    job_name: Name = JOB_NAME
    """Folder within `output_path`."""


class CsvMonitor(Section):
    """`csv_monitor`: the same numbers as text, one file for each, written by rank 0."""

    enabled: Switch = False
    """True: after each step a line of samples trained and value is added to each file."""
    output_path: Folder = None
    """Folder that all workers can write, since any of them may become rank 0. None: the working folder."""
    job_name: Name = JOB_NAME
    """Folder within `output_path`."""


class Wandb(Section):
    """`wandb`: the same numbers for Weights & Biases, sent by rank 0 (`pip install wandb`)."""

    enabled: Switch = False
    """True: the numbers of each step are logged; all of a job are one run, whichever worker is rank 0."""
    group: Annotated[str | None, Allowed("a string")] = None
    """Group of runs."""
    team: Annotated[str | None, Allowed("a string")] = None
    """Team (entity) that the run belongs to."""
    project: Name = "deepspeed"
    """Project of the run."""


class Checkpoint(Section):
    """`shoal.checkpoint`: elastic checkpoints."""

    path: Annotated[
        Annotated[str, Field(min_length=1, max_length=MOST_PATH, pattern=NO_NUL)] | None,
        Allowed(f"a path or URL of at most {MOST_PATH} characters"),
    ] = None
    """Folder or URL of the checkpoints: a folder that all workers can access, or an fsspec URL such as
    s3://bucket/jobs/demo (`pip install '.[s3]'`). Variables such as $HOME are expanded. All workers must save to one
    location: another path, or another disk at the same path, is refused. Default: the job's name below
    SHOAL_CHECKPOINT_ROOT, where that is set. None: no checkpoints."""
    every_steps: Count = None
    """Steps between two checkpoints. None: no schedule by steps."""
    every_minutes: Annotated[Annotated[float, Field(gt=0)] | None, Allowed("a number of minutes above 0")] = None
    """Minutes between two checkpoints, by the clock of rank 0. None: no schedule by time."""
    stream: Switch = False
    """True: each worker writes its blocks directly from its own memory, and training waits until they are written.
    False: they are copied into host memory and written in the background. The files are the same."""
    keep: Annotated[Positive, Allowed("a whole number from 1 to 10^15")] = 3
    """Number of newest checkpoints that are kept. There must be room for one more: the oldest one is deleted when the
    new one is complete."""
    keep_every: Count = None
    """Interval of steps whose checkpoints are kept for good. None: none are."""
    resume: Annotated[
        Annotated[Whole, Field(ge=0, le=MOST)] | Annotated[str, Field(pattern=NO_NUL)] | Literal[False],
        Allowed('"latest", a step, a path, or false'),
    ] = "latest"
    """Checkpoint to resume from: the newest if there is one, a step, a path, or false for a fresh start. If there
    are checkpoints and none can be read, only false begins at step 0."""
    allow: Annotated[
        tuple[Literal["new", "missing"], ...], Field(strict=False), Allowed('a list of "new" and "missing"')
    ] = ()
    """Differences between the checkpoint's model and this one that are accepted: `new` tensors, which only the
    model has, `missing` ones, which only the checkpoint has. If there are any, matching tensors are loaded by name and
    training begins at step 0."""


CellSize = Annotated[
    Annotated[Whole, Field(ge=1, le=MOST_PROCESSES)], Allowed(f"a whole number from 1 to {MOST_PROCESSES}")
]


class Cell(Section):
    """`shoal.cell`: the processes that train a lane together, each with its part of the model; a script whose cell has
    several calls `shoal.cell` before it builds the model. The shape of a cell is fixed for the job's life; the number
    of cells follows from the number of workers, which `workers.min` and `workers.max` count."""

    tensor: CellSize = 1
    """Processes among which each layer is divided (tensor parallelism). DeepSpeed's `tensor_parallel.autotp_size` means
    the same."""
    pipeline: CellSize = 1
    """Places of a pipeline, each with a stage of the model or several. DeepSpeed's `pipeline.stages`."""
    context: CellSize = 1
    """Processes among which each sequence is divided (context parallelism). DeepSpeed's `sequence_parallel_size` means
    the same."""
    expert: CellSize = 1
    """Processes among which experts are divided, each with samples of its own. DeepSpeed's
    `expert_parallel.autoep_size`."""
    tight: Annotated[
        tuple[Literal["pipeline", "expert", "context", "tensor"], ...],
        Field(strict=False),
        Allowed(f"a list of {', '.join(DIMENSIONS)}"),
    ] = ()
    """Dimensions within which the processes of a cell must be on one host."""


class Average(Section):
    """`shoal.average`: an exponential moving average of the weights, kept in float32 beside them (api.md)."""

    decay: Annotated[float, Field(gt=0, lt=1), Allowed("a number between 0 and 1, neither of them")]
    """What of the average an update keeps: average = decay × average + (1 - decay) × weights, in the order of
    operations of `torch.optim.swa_utils.get_ema_multi_avg_fn`. Required."""
    every: Annotated[Positive, Allowed("a whole number from 1 to 10^15")] = 1
    """Steps between two updates of the average."""
    from_step: Natural = 0
    """Step after which updates are counted: the first is at step `from_step` + `every`, and makes the weights of that
    step the average. Before it the average is the weights."""


class Shoal(Section):
    """`shoal`: settings that DeepSpeed does not have."""

    lanes: Annotated[
        Annotated[Whole, Field(ge=1, le=MOST_LANES)] | None, Allowed(f"a whole number from 1 to {MOST_LANES}")
    ] = None
    """Micro-batches of one optimizer step that workers share; fixed for the job's life, so batch size, learning rate
    and data order never depend on the number of workers. Not given: train_batch_size /
    (train_micro_batch_size_per_gpu × micro_batches_per_lane); without a micro-batch size the greatest number up to 8
    that divides train_batch_size / micro_batches_per_lane."""
    micro_batches_per_lane: Count = None
    """Micro-batches that a lane accumulates in one step. Not given: gradient_accumulation_steps, else the number that
    follows from the other sizes, else 1."""
    mirrors: Annotated[Whole, Field(ge=0, le=MOST_MIRRORS), Allowed(f"a whole number from 0 to {MOST_MIRRORS}")] = 1
    """Copies of every block's optimizer state besides the owner's: the number of workers that may die at once without
    losing a step. At most the number of other workers; stage 0 mirrors everything everywhere."""
    mirrors_on: Annotated[Literal["device", "host"], Allowed('"device" or "host"')] = "device"
    """Memory that keeps what a worker mirrors, where the model is on an accelerator. `host`: pinned memory of the host,
    from which it goes through the device piece by piece when it is updated, with the same bits: the device holds no
    more than with `mirrors` 0, and steps take longer ([Devices](devices.md#mirrors-on-the-host)). With a model on the
    CPU all memory is the host's, and `host` has no effect but a warning."""
    mirror_partners: Annotated[
        int, Field(ge=1, le=MOST_PARTNERS), Allowed(f"a whole number from 1 to {MOST_PARTNERS}")
    ] = DEFAULT_MIRROR_PARTNERS
    """Number of workers that share the mirrors of one worker's blocks; at least `mirrors`, and all others if there are
    no more. Few: two workers that die at once seldom lose a block, and after a loss few take over and own more until
    the next fills are done. Many: the loss is spread evenly at once, and any two that die at once lose some blocks."""
    seed: Annotated[Whole, Field(ge=0, lt=2**64), Allowed("a whole number from 0 to 2^64 - 1")] = 0
    """Seed of the data order and of every lane's random numbers. The script initializes the weights."""
    max_steps: Count = None
    """Optimizer steps after which the job ends. With `epochs` too, whichever comes first."""
    epochs: Count = None
    """Passes over the dataset after which the job ends. Samples that do not fill the last step of an epoch are
    dropped."""
    torch_threads: Annotated[
        Annotated[Whole, Field(ge=1, le=MOST_THREADS)] | None, Allowed(f"a whole number from 1 to {MOST_THREADS}")
    ] = None
    """Threads of PyTorch's kernels on the CPU; part of the numeric identity, other counts give other bits.
    Not given: 1."""
    fill_bytes_per_step: Natural = 0
    """Bytes per step that a worker receives while blocks are filled during training. 0: the planner decides, about a
    tenth of a step, and half of one while blocks have a single copy."""
    elementwise: Switch = False
    """True: an optimizer that cannot be tested at the start is accepted as elementwise, with a warning. No effect for
    an optimizer that can be tested."""
    whole: Annotated[tuple[Name, ...], Field(strict=False), Allowed("a list of class names")] = ()
    """Classes of optimizers that update whole tensors, each at one worker ([Optimizers](optimizers.md)). Not given:
    those that cannot run on blocks."""
    units: Annotated[tuple[Name, ...], Field(strict=False), Allowed("a list of class names")] = ()
    """Classes of the modules that are units: parts of the model whose parameters are stored together and are never in
    one bucket with others. Other units are another layout, whose checkpoints do not fit. Not given: the model's
    `_no_split_modules`, else the children of its outermost `nn.ModuleList`s and `nn.Sequential`s."""
    activation_checkpointing: Annotated[
        Literal["units"] | Annotated[tuple[Name, ...], Field(strict=False)], Allowed('"units" or a list of class names')
    ] = ()
    """Modules that keep only their inputs for backward, which computes their activations again: less memory, about a
    third more time, the same bits. `"units"`: every unit that is a module (see `units`). Class names: the outermost
    modules of these classes. Not given: none."""
    stop_on_nan: Switch = True
    """True: the job fails before the update of a step whose loss or gradient is not finite, and names step, parameter
    and lane, or the lanes of a sum: in stages 2 and 3 that of all. False: the step is committed; the 1st, 10th, 100th,
    … such step is an event."""
    mixed_numerics: Switch = False
    """True: workers whose numeric identity differs may join; the run is shown as not bit-exact."""
    exact: Switch = True
    """On CUDA: deterministic algorithms on, autotuning off. False: PyTorch's settings are not changed."""
    backend: Annotated[Literal["auto", "gloo"], Allowed('"auto" or "gloo"')] = "auto"
    """Transport of gradients and parameters between devices: `auto` is NCCL if every worker of a world has a CUDA
    device of its own, otherwise gloo through host memory; `gloo` is always gloo. Votes and small messages use gloo
    (devices.md)."""
    corruption_steps: Natural = 1000
    """Steps within which the copies of every block, its owner's and its mirrors', are compared, a few blocks at each
    step; all blocks are compared at each save. 0: off, as in a job that is not bit-exact (`mixed_numerics`, or `exact`
    false)."""
    on_corruption: Annotated[Literal["restore", "pause", "continue"], Allowed('"restore", "pause" or "continue"')] = (
        "restore"
    )
    """Reaction to copies that differ. `restore`: all go back to the newest checkpoint whose copies were compared
    when it was saved (without one the job pauses); `pause`: the job pauses; `continue`: it is only reported."""
    on_slow: Annotated[Literal["share", "name", "replace"], Allowed('"share", "name" or "replace"')] = "share"
    """Reaction to a worker whose lanes take longer than those of the others. `share`: lanes are shared by speed, which
    changes no bit. `name`: it is only reported. `replace`: as `share`, and a worker that takes 1.5 times as long for 5
    minutes is drained, at most one an hour; a launcher starts another (lanes.md)."""
    check_collectives: Switch = False
    """True: the processes of a cell compare every collective before they use what comes, and a script that makes
    different ones fails the job with a sentence. False: they do so in the first step of each world, and then with the
    first collective of each micro-batch and of each evaluation. No effect where a cell is one process."""
    average: Average | None = None
    cell: Cell = Cell()
    checkpoint: Checkpoint = Checkpoint()


class Document(Section):
    """The file's top level."""

    train_batch_size: CountOrAuto = None
    """Samples of one optimizer step over all lanes: train_micro_batch_size_per_gpu × lanes × micro_batches_per_lane.
    Missing sizes follow from the others."""
    train_micro_batch_size_per_gpu: CountOrAuto = None
    """Samples of one forward pass."""
    gradient_accumulation_steps: CountOrAuto = None
    """DeepSpeed's name for shoal.micro_batches_per_lane."""
    gradient_clipping: Annotated[
        Annotated[float, Field(ge=0)] | Auto | None, Allowed('a number of at least 0, or "auto"')
    ] = None
    """Largest norm of the step's gradient; longer ones are scaled down to it. 0, "auto" and none: no clipping."""
    communication_data_type: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"] | None, Allowed('"fp32", "bf16", "fp16" or "auto"')
    ] = None
    """Dtype in which gradients travel; only the present one is allowed. Gradients of half-precision parameters travel
    in half precision, sums of several in float32; all are added up in float32."""
    steps_per_print: CountOrAuto = None
    """Steps between two lines of progress (step, loss, rates, loss scale, samples per second) in rank 0's log. None,
    "auto": no lines."""
    wall_clock_breakdown: Annotated[bool | Auto | None, Allowed('true, false or "auto"')] = False
    """True: rank 0 times reading, forward, backward and step of its own micro-batches; progress lines have the times
    (every 10 steps if `steps_per_print` is not set), and so have TensorBoard and the other trackers."""
    dump_state: Annotated[bool | Auto | None, Allowed('true, false or "auto"')] = False
    """True: one line in each worker's log has the settings at the start: the whole configuration, the model's size, the
    optimizer's groups."""
    optimizer: Optimizer | None = None
    scheduler: Scheduler | None = None
    bf16: Bf16 = Bf16()
    fp16: Fp16 = Fp16()
    zero_optimization: ZeroOptimization = ZeroOptimization()
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    tensorboard: TensorBoard = TensorBoard()
    csv_monitor: CsvMonitor = CsvMonitor()
    wandb: Wandb = Wandb()
    elasticity: Elasticity | None = None
    shoal: Shoal = Shoal()
