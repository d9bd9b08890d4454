"""What recovery.py compares with: torchrun's elastic restart on the same model, tuned for speed.

Four agents of one process each, a c10d rendezvous in a store process of its own (the node that hosts it must not die),
DDP with bucket views, `torch.save` every 10 steps. `kill -9` of one worker, as of Shoal's: its agent lives and starts
another one; or of a node, the agent too. Run as a script it is what torchrun's workers run; `trial` is one restart.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import model
import psutil
import torch
import torch.distributed as dist
from steps import Step, StepLog, done, normal_step
from torch import nn
from torch.utils.data import default_collate

SAVE_EVERY = 10
STEPS_BEFORE = 2 * SAVE_EVERY + 5
STEPS_AFTER = 6
"""So many steps of the new world say what is normal."""
INTO_THE_STEP = 0.1
"""Part of a step after which a process is killed: in its forward."""
PATIENCE_SECONDS = 120.0
"""For the first world's steps, and for the restart: several times what they take beside nothing else."""
ATTEMPTS = 2
AGENT_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "",
    # with torch 2.13 a restarted world otherwise finds the old one's addresses in the agents' store, and hangs
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
STORE = """
import sys, threading
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
print(store.port, flush=True)
threading.Event().wait()
"""


# ---- what torchrun runs


def train(size: str, folder: Path) -> None:
    """An ordinary restartable DDP script that notes its steps as train.py does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gpt, dataset = model.build(size), model.Windows()
    optimizer, begun = model.adamw(gpt), 0
    saved = folder / "checkpoint.pt"
    if saved.exists():
        kept = torch.load(saved)
        gpt.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        begun = kept["step"]
    parallel = nn.parallel.DistributedDataParallel(gpt, gradient_as_bucket_view=True)
    rank, world = dist.get_rank(), dist.get_world_size()
    file = os.open(folder / "steps.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for step in range(begun, 1_000_000):
        first = (step * world + rank) * model.MICRO_BATCH % (len(dataset) - model.MICRO_BATCH)
        batch = default_collate([dataset[first + index] for index in range(model.MICRO_BATCH)])
        optimizer.zero_grad()
        parallel(**batch).backward()
        optimizer.step()
        line = {"time": time.time(), "worker": f"r{rank}", "step": step + 1, "generation": world, "lanes": 1}
        os.write(file, json.dumps(line).encode() + b"\n")
        if (step + 1) % SAVE_EVERY == 0 and rank == 0:
            kept = {"model": gpt.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(kept, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)


# ---- one restart


class NoWorld(Exception):
    """torchrun's agents built no world that trains: how far they came."""


def trial(size: str, workers: int, node: bool) -> tuple[float, float]:
    """(seconds from the kill to the first step of the new world, seconds of its normal step). `node`: the agent dies
    with its worker, and the new world is smaller by one. Raises `NoWorld`.

    Agents that come further apart than the last call begin a world of fewer, and the one that comes too late makes them
    restart: with torch 2.13 that may hang for ever. So there is another attempt.
    """
    for attempt in range(1, ATTEMPTS):
        try:
            return _attempt(size, workers, node)
        except NoWorld as error:
            print(f"torchrun, attempt {attempt} of {ATTEMPTS}: {error}", file=sys.stderr, flush=True)
    return _attempt(size, workers, node)


def _attempt(size: str, workers: int, node: bool) -> tuple[float, float]:
    folder = Path(tempfile.mkdtemp(prefix="torchrun-bench-"))
    store = subprocess.Popen([sys.executable, "-c", STORE], stdout=subprocess.PIPE)
    assert store.stdout is not None
    port = int(store.stdout.readline())
    agents = [_agent(size, folder, port, workers, number) for number in range(workers)]
    log = StepLog(folder / "steps.jsonl")
    try:
        log.until(f"{STEPS_BEFORE} steps", lambda s: done(s, workers, workers)[STEPS_BEFORE:], PATIENCE_SECONDS)
        time.sleep(INTO_THE_STEP * normal_step(done(log.look(), workers, workers)[-STEPS_AFTER:]))
        left = workers - 1 if node else workers
        killed = time.time()
        (_kill if node else _kill_worker)(agents[-1])
        times = log.until("the restart", lambda steps: _restarted(steps, killed, left), PATIENCE_SECONDS)
        return times[0] - killed, normal_step(times)
    except BaseException as error:
        for text in sorted(folder.glob("*.log")):
            print(f"---- {text.name}\n{text.read_text()[-2000:]}", file=sys.stderr)
        if isinstance(error, TimeoutError):
            raise NoWorld(f"torchrun's {workers} agents: {error}; {_how_far(log.look())}") from None
        raise
    finally:
        for agent in agents:
            _kill(agent)
        store.kill()
        store.wait()
        shutil.rmtree(folder)


def _how_far(steps: list[Step]) -> str:
    """The last step of each size of world."""
    last = {step.generation: step.step for step in sorted(steps, key=lambda step: step.step)}
    return ", ".join(f"step {step} in a world of {world}" for world, step in last.items()) or "no step in any world"


def _restarted(steps: list[Step], killed: float, workers: int) -> list[float]:
    found = done([step for step in steps if step.time > killed and step.generation == workers], 0, workers)
    return found if len(found) > STEPS_AFTER else []


def _kill_worker(agent: subprocess.Popen[bytes]) -> None:
    for process in psutil.Process(agent.pid).children(recursive=True):
        process.kill()


def _kill(agent: subprocess.Popen[bytes]) -> None:
    """`kill -9` of a node: the agent and its worker, which is in a session of its own."""
    if agent.poll() is None:
        _kill_worker(agent)
        agent.kill()
    agent.wait()


def _agent(size: str, folder: Path, port: int, workers: int, number: int) -> subprocess.Popen[bytes]:
    """One node of one process."""
    script = [str(Path(__file__).resolve()), size, str(folder)]
    command = agent_command(f"{workers - 1}:{workers}", port, folder, script)
    with (folder / f"agent{number}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **AGENT_ENVIRONMENT})


def agent_command(nodes: str, port: int, logs: Path, script: list[str], last_call: int = 3) -> list[str]:
    """torchrun on a node of one process, tuned for speed. `last_call`: how long it waits for more nodes, seconds."""
    tuned = (
        f"is_host=false,join_timeout=60,last_call_timeout={last_call},keep_alive_interval=1,keep_alive_max_attempt=3"
    )
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "bench", "--rdzv-conf", tuned,
        "--max-restarts", "1000", "--monitor-interval", "0.1", "--local-addr", "127.0.0.1", "--log-dir", str(logs),
        *script,
    ]  # fmt: skip


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]))
