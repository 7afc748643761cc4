"""Processes, signals, cores, seeds and the connection to Ray, shared by all packages."""
