"""Elastic checkpoints (docs/architecture.md, "Checkpoints"): any world reads what any world wrote.

The engine's face of this room. `Saver` writes in the background, `take_snapshot` and `draft_of` are what it writes,
`resolve` finds a checkpoint, and `restore` puts it into a worker's state. `python -m shoal.checkpoint` is for people.
"""
