"""`shoal token`: a token for the workers of one job, derived from the operators'. No controller is asked."""

from __future__ import annotations

import os

import typer
from shoal_protos.errors import UserError

from shoal_controller.cli.options import Job


def token(job: Job) -> None:
    """Print the token for workers of a job; REST refuses it."""
    from shoal_controller.cli.client import local_folder
    from shoal_controller.tokens import kept_token, token_of_job

    secret = os.environ.get("SHOAL_TOKEN") or kept_token(local_folder())
    if not secret:
        raise UserError(
            f"there is no operators' token to derive one from: set SHOAL_TOKEN to the controller's, or go where "
            f"`shoal run` keeps its own ({local_folder() / 'token'})"
        )
    typer.echo(token_of_job(secret, job))
