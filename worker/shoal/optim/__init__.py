"""Optimizers and schedules: which may run in blocks, how a configuration names them, what they read each step."""
