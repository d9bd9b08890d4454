"""The URL of a controller's REST API as somebody gave it, for the `shoal` command and for `shoal.client`."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

import httpx

from shoal_protos.errors import UserError


def split_url(url: str) -> tuple[SplitResult, str]:
    """Its parts, and its host. Raises `UserError`, which does not repeat a password."""
    if "@" in url:
        raise UserError("the controller's URL has a user or a password in it; set SHOAL_TOKEN instead")
    expected = "expected something like http://127.0.0.1:7070"
    try:
        parts, _ = urlsplit(url), httpx.URL(url).host  # each refuses what the other takes
        _ = parts.port  # which is looked at only now
    except (ValueError, httpx.InvalidURL) as error:
        raise UserError(f"the controller's URL is {url!r} ({error}); {expected}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"the controller's URL is {url!r}; {expected}")
    return parts, parts.hostname
