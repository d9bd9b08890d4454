"""How slowly a job trains whose workers begin on a GPU: each needs some seconds before it says hello."""

SLOWLY = 0.5
"""Seconds per micro-batch: a worker that is added finds the job not over."""
