"""Checkpoints: written atomically, verified by checksum, never unpickled.

A checkpoint is a directory with three files: `tensors.safetensors`, `state.json` for everything else, and
`manifest.json` with a format version, a summary and the SHA-256 of the other files and of itself. If several processes
hold parts of tensors, each adds a file, and `shards.json` is the index of these files. This module does not import
torch; only saving and loading need it.
"""

from __future__ import annotations

from dovetail.checkpoint.background import AsyncWriter
from dovetail.checkpoint.files import StoredFile
from dovetail.checkpoint.manifest import FORMAT_VERSION, CheckpointInfo
from dovetail.checkpoint.model_file import export_model, load_model_file
from dovetail.checkpoint.retention import TrialCheckpoint, experiment_retention, prune, retain
from dovetail.checkpoint.store import (
    CheckpointWarning,
    inspect,
    latest,
    list_checkpoints,
    load,
    load_latest,
    save,
    verify,
)

__all__ = [
    "FORMAT_VERSION",
    "AsyncWriter",
    "CheckpointInfo",
    "CheckpointWarning",
    "StoredFile",
    "TrialCheckpoint",
    "experiment_retention",
    "export_model",
    "inspect",
    "latest",
    "list_checkpoints",
    "load",
    "load_latest",
    "load_model_file",
    "prune",
    "retain",
    "save",
    "verify",
]
