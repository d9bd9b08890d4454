"""`shoal token`: the named tokens of people and programs, and the token of a run's workers (`shoal token JOB`)."""

from __future__ import annotations

from typing import Annotated

import typer
from shoal_protos.path_part import path_part
from typer.core import TyperGroup

from shoal_controller.access.callers import Role
from shoal_controller.cli.options import DEFAULT_URL, Form, Job, Output, Url
from shoal_controller.cli.output import echo


class JobOrCommand(TyperGroup):
    """`shoal token JOB` and `shoal token -- JOB` are `shoal token job JOB`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if args and (args[0] == "--" or not (args[0].startswith("-") or args[0] in self.commands)):
            args = ["job", *args]
        return super().parse_args(ctx, args)


Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the token.", show_default=False)]


async def job_(job: Job, url: Url = DEFAULT_URL) -> None:
    """Print the token for workers of this run of a job; REST refuses it."""
    from shoal_controller.cli.runs import client_of

    async with client_of(url, job) as client:
        echo(await client.join_token(job))


async def create(
    name: Name,
    role: Annotated[Role, typer.Option("--role", help="Role; each one includes those before it.")],
    days: Annotated[
        int | None, typer.Option("--days", min=1, help="How long it is valid. Default: until revoked.")
    ] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Create a token and print it, this once."""
    from shoal_controller.cli.runs import client_of

    async with client_of(url) as client:
        echo((await client.change_token("POST", body={"name": name, "role": role.value, "days": days}))["token"])


async def list_(url: Url = DEFAULT_URL, output: Output = Form.TABLE) -> None:
    """List the named tokens, without their secrets."""
    from shoal_controller.cli.runs import client_of
    from shoal_controller.cli.tables import listed, tokens_table

    async with client_of(url) as client:
        listed("tokens", await client.tokens(), tokens_table, output)


async def rotate(
    name: Name,
    keep_seconds: Annotated[
        float, typer.Option("--keep-seconds", min=0, help="How long the old secret stays valid.")
    ] = 3600.0,
    url: Url = DEFAULT_URL,
) -> None:
    """Give a token a new secret and print it, this once."""
    from shoal_controller.cli.runs import client_of

    async with client_of(url) as client:
        echo((await client.change_token("POST", f"/{path_part(name)}/rotate", {"keep_seconds": keep_seconds}))["token"])


async def revoke(name: Name, url: Url = DEFAULT_URL) -> None:
    """Revoke a token: from now on it opens nothing."""
    from shoal_controller.cli.runs import client_of

    async with client_of(url) as client:
        await client.change_token("DELETE", f"/{path_part(name)}")
