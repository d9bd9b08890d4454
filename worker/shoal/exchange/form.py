"""The number of the form in which the workers of a job exchange state.

It covers all that goes from worker to worker: how a group is built, tags and frames, ballots and records, digests,
fills, the small state. A hello's description says it, and the controller puts no two workers into a plan whose numbers
differ: they would misread each other, or wait for ever for what the other never sends.
"""

PEER_FORM = 1
"""Raised as CONTRIBUTING.md, "Numbers of formats", says."""
