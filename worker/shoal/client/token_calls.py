"""The client's methods for tokens: those of people and programs, and those of workers."""

from __future__ import annotations

from collections.abc import Iterator

from shoal_protos.path_part import path_part

from shoal.client.controllers import Controllers
from shoal.client.rest_answers import TokenInfo


class TokenCalls:
    """Part of `Client`."""

    def __init__(self, controllers: Controllers) -> None:
        self._controllers = controllers

    def get_join_token(self, job: str) -> str:
        """The token for workers of this run of a job."""
        return str(self._controllers.of(job).ask("POST", f"/jobs/{path_part(job)}/token", is_repeatable=True)["token"])

    def list_tokens(self) -> Iterator[TokenInfo]:
        """All named tokens, without their secrets, by name."""
        return (TokenInfo.read(one) for one in self._controllers.of().pages("/tokens", "tokens"))

    def create_token(self, name: str, role: str, *, days: int | None = None) -> TokenInfo:
        """Create a named token of role `view`, `operate` or `admin`; the answer has its secret, this once."""
        asked = {"name": name, "role": role, "days": days}
        return TokenInfo.read(self._controllers.of().ask("POST", "/tokens", asked))

    def rotate_token(self, name: str, *, keep_seconds: float | None = None) -> TokenInfo:
        """Give a token a new secret; the old one stays valid for a while."""
        body = {} if keep_seconds is None else {"keep_seconds": keep_seconds}
        return TokenInfo.read(self._controllers.of().ask("POST", f"/tokens/{path_part(name)}/rotate", body))

    def revoke_token(self, name: str) -> TokenInfo:
        """Revoke a token: from now on it opens nothing."""
        return TokenInfo.read(self._controllers.of().ask("DELETE", f"/tokens/{path_part(name)}"))
