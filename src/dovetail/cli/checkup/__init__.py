"""Checks of whether this machine has what Dovetail needs, one `Check` for each thing.

Everything is tried, not guessed: files are written and renamed, a group of two meets on the loopback, the store is
opened. Nothing is left behind.
"""
