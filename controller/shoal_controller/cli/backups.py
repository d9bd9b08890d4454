"""`shoal backup` and `shoal restore`: the store of controllers as one file, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal_controller.cli.options import Store
from shoal_controller.cli.output import echo

ToFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="File to write, or a folder for a file named by the time.", show_default=False),
]
FromFile = Annotated[Path, typer.Argument(metavar="FILE", help="File of `shoal backup`.", show_default=False)]


async def backup(
    file: ToFile,
    store: Store = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Include the hashes of named tokens.")] = False,
    keep: Annotated[
        int | None,
        typer.Option("--keep", min=1, metavar="N", help="Delete all but the newest N backups of the folder FILE."),
    ] = None,
) -> None:
    """Write a store to a file that only you can read, beside its controllers. They and the workers go on meanwhile.

    It is as it was at one moment: jobs with their specifications (the values of `env` too), states and events.
    """
    from shoal_protos.errors import UserError

    from shoal_controller.jobs.backups import take_backup, write_backup, write_into_folder
    from shoal_controller.settings import Settings

    settings = Settings(**({"store": store} if store is not None else {}))
    if keep is not None and not file.is_dir():
        raise UserError(
            f"--keep counts the backups of a folder, and {file} is none; name a folder, or leave --keep out"
        )
    found, written = await take_backup(settings.store, settings.etcd, tokens), file
    if file.is_dir():
        written = write_into_folder(found, file, keep)
    else:
        write_backup(found, file)
    echo(f"{written} has {_summary(found.kept.jobs, found.kept.tokens)}")


async def restore(file: FromFile, store: Store = None) -> None:
    """Put a backup into an empty store. Start controllers with it afterwards; workers that live go on with them."""
    import time

    from shoal_controller.jobs.backups import read_backup, restore_into
    from shoal_controller.settings import Settings

    settings = Settings(**({"store": store} if store is not None else {}))
    found = read_backup(file)
    await restore_into(settings.store, settings.etcd, found)
    kept = found.kept
    taken = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(kept.time))
    echo(f"restored {_summary(kept.jobs, kept.tokens)}, as of {taken}; start the controllers with this store now")


def _summary(jobs: int, tokens: int) -> str:
    named = f" and {tokens} named token{'s' if tokens != 1 else ''}" if tokens else ""
    return f"{jobs} job{'s' if jobs != 1 else ''}{named}"
