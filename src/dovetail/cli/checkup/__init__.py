"""Checks of this machine for `dovetail doctor`, with one `Check` per item.

Every check is a real operation: files are written and renamed, a group of two connects over the loopback, the store is
opened. No files are left behind.
"""
