"""What can go wrong with etcd, as a caller must tell it apart: surely nothing has happened, or nobody knows.

EtcdError                  every sentence names the endpoint
├── Unavailable            no endpoint took it in time; surely nothing has happened, and it may work later
├── UnknownOutcome         a write was sent and not answered; it may have been carried out, or still be
├── Rejected               etcd does not do it; nothing has happened
│   ├── Exhausted          it has no room left, until its operator makes some
│   ├── Denied             wrong user or password, or no right to the keys
│   ├── LeaseNotFound      the lease has expired or was revoked, and its keys with it
│   └── Compacted          the revision asked for is no longer kept
└── Closed                 the client was closed
"""

from __future__ import annotations


class EtcdError(Exception): ...


class Unavailable(EtcdError): ...


class UnknownOutcome(EtcdError): ...


class Rejected(EtcdError): ...


class Exhausted(Rejected): ...


class Denied(Rejected): ...


class LeaseNotFound(Rejected): ...


class Compacted(Rejected):
    def __init__(self, sentence: str, oldest: int = 0) -> None:
        super().__init__(sentence)
        self.oldest = oldest
        """The revision up to which all is gone; 0 where etcd does not say."""


class Closed(EtcdError): ...
