"""Sums of a host: which member adds up which partial sums before they leave their host, so that the host sends one.

Where the lanes of a host's workers are fewer subtrees together than apart, what goes to an owner on another host is
added up by one of them, each for a part of the owners; what goes to an owner on the same host goes to it at once. Where
nothing joins, all send as if each were on a host of its own. Whoever adds, the same pairs of the one tree are added.
Pure; derived once for a world.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from shoal_protos.runs import Runs, Span

from shoal.core.tree import subtrees

Source = tuple[Span, int]
"""A subtree of lanes, and the rank that sends its sum."""


class HostSums:
    """Who adds up what for whom.

    `lane_spans`: by rank, the whole subtrees of lanes that it trains; `hosts`: by rank, empty where no two share one;
    `owners`: the ranks that own blocks.
    """

    def __init__(
        self, lane_spans: Sequence[Sequence[Span]], hosts: Sequence[int], owners: Sequence[int], lanes: int
    ) -> None:
        self.lane_spans, self._hosts = lane_spans, hosts or range(len(lane_spans))
        self._crews: dict[int, list[int]] = {}
        for rank, spans in enumerate(lane_spans):
            if spans:
                self._crews.setdefault(self._hosts[rank], []).append(rank)
        together = {host: subtrees(Runs(self._spans(crew)), lanes) for host, crew in self._crews.items()}
        self._joint = {
            host: spans for host, spans in together.items() if len(spans) < len(self._spans(self._crews[host]))
        }
        self._adders = {host: self._share(host, owners) for host in self._joint}
        self._adds_for: list[list[int]] = [[] for _ in lane_spans]
        for adders in self._adders.values():
            for owner, adder in adders.items():
                self._adds_for[adder].append(owner)
        self._received = [len(self.sources(rank)) - len(spans) for rank, spans in enumerate(lane_spans)]
        self._gathered = [len(self._spans(self.crew(rank))) for rank in range(len(lane_spans))]

    def _spans(self, crew: Sequence[int]) -> list[Span]:
        return list(chain.from_iterable(self.lane_spans[rank] for rank in crew))

    def _share(self, host: int, owners: Sequence[int]) -> dict[int, int]:
        """Who of a host adds up for which owner: each for neighbours, whose blocks mostly lie side by side."""
        crew, outside = self._crews[host], [owner for owner in owners if self._hosts[owner] != host]
        return {owner: crew[at * len(crew) // len(outside)] for at, owner in enumerate(outside)}

    def crew(self, rank: int) -> Sequence[int]:
        """Who trains on its host."""
        return self._crews.get(self._hosts[rank], ())

    def adder(self, rank: int, owner: int) -> int | None:
        """Who adds up what this rank has for an owner; None: it is sent to the owner at once."""
        return self._adders.get(self._hosts[rank], {}).get(owner)

    def adds_for(self, rank: int) -> Sequence[int]:
        """The owners for which it adds up what its host has."""
        return self._adds_for[rank]

    def gathered(self, rank: int) -> list[Source]:
        """What it adds up for each of them, its own sums among it."""
        return [(span, peer) for peer in self.crew(rank) for span in self.lane_spans[peer]]

    def sources(self, owner: int) -> list[Source]:
        """Whose sums reach an owner, its own among them: every lane once."""
        found: list[Source] = []
        for host, crew in self._crews.items():
            adder = self._adders.get(host, {}).get(owner)
            if adder is None:
                found += [(span, rank) for rank in crew for span in self.lane_spans[rank]]
            else:
                found += [(span, adder) for span in self._joint[host]]
        return found

    def most_held(self, sizes: Sequence[int], scattered: Sequence[int]) -> int:
        """Elements that messages take on the member that holds most: what it gets, and what it packs to send.

        By owner: the elements that it owns, and those of them that do not lie in one range.
        """
        total, total_scattered, most = sum(sizes), sum(scattered), 0
        for rank, spans in enumerate(self.lane_spans):
            count, joint = len(spans), len(self._joint.get(self._hosts[rank], ()))
            added, added_scattered = _sum(sizes, self._adds_for[rank]), _sum(scattered, self._adds_for[rank])
            received = sizes[rank] * self._received[rank] + added * (self._gathered[rank] - count)
            sent, sent_scattered = total - sizes[rank] - added, total_scattered - scattered[rank] - added_scattered
            packed = count * (sent if count > 1 else sent_scattered) + joint * (added if joint > 1 else added_scattered)
            most = max(most, received + packed)
        return most


def _sum(values: Sequence[int], of: Iterable[int]) -> int:
    return sum(values[index] for index in of)
