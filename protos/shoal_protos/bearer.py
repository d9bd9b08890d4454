"""Which tokens an `Authorization: Bearer` header can carry. For both sides.

What cannot be sent is refused before it is: the libraries that send it repeat it in their errors.
"""

from __future__ import annotations

UNSENDABLE = "SHOAL_TOKEN has characters that an HTTP header cannot carry; use printable ones"


def is_sendable(token: str) -> bool:
    """Whether it arrives as it is: printable ASCII without blanks around it."""
    return token.isascii() and token.isprintable() and token == token.strip()
