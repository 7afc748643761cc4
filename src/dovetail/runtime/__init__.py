"""Processes, signals, cores, seeds and the Ray connection: one of each, for every package above."""
