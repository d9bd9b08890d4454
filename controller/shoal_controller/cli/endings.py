"""How a command ends: its exit status, and one sentence on standard error where something was wrong.

Called by main.py around every command. Nothing heavy may be imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import closing
from typing import Any

from shoal_protos.errors import NoController, ShoalError, StoreError, UserError

from shoal_controller.cli.output import echo

DONE, FAILED, WRONG_USE, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 130

EXTRAS = {
    "shoal[controller]": {
        "fastapi", "prometheus_client", "psutil", "pydantic_settings", "uvicorn", "yaml",
    },
    "shoal[kubernetes]": {"aiohttp", "kubernetes_asyncio"},
    "shoal[plot]": {"matplotlib"},
    "shoal[worker]": {"fsspec", "numpy", "safetensors", "torch", "xxhash"},
}  # fmt: skip
"""Which extra brings a missing module."""

Command = Callable[..., Coroutine[Any, Any, int | None] | int | None]


class Interrupted(Exception):
    """By a signal, before there was anything to end, or where it could be ended only in part: a sentence says so."""


def ending(command: Command, flags: dict[str, Any]) -> int:
    """Run a command to its exit status."""
    try:
        return _status(command(**flags)) or DONE
    except (KeyboardInterrupt, Interrupted) as error:
        return say(str(error), INTERRUPTED) if str(error) else INTERRUPTED
    except ModuleNotFoundError as error:
        return say(missing(error), WRONG_USE)
    except UserError as error:
        return say(str(error), WRONG_USE)
    except (NoController, StoreError) as error:
        return say(str(error), UNREACHABLE)
    except ShoalError as error:
        return say(str(error), FAILED)


def _status(answer: Coroutine[Any, Any, int | None] | int | None) -> int | None:
    if answer is None or isinstance(answer, int):
        return answer
    with closing(answer):  # Ctrl-C may come before it has begun
        import asyncio

        return asyncio.run(answer)


def say(sentence: str, code: int) -> int:
    """The sentence goes to standard error, the code is handed back."""
    echo(f"shoal: {sentence}", err=True)
    return code


def missing(error: ModuleNotFoundError) -> str:
    """Which extra to install; a module that no extra brings is our own bug and raises again."""
    name = (error.name or "").partition(".")[0]
    for extra, modules in EXTRAS.items():
        if name in modules:
            return f"this needs {name}, which is not installed: install {extra}"
    raise error
