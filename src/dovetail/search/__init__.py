"""Hyperparameter search: an experiment from a YAML file, its trials, and the store of their results."""

from __future__ import annotations

from dovetail.checks import ConfigErrors
from dovetail.search.experiment import Experiment, SearchResult, search
from dovetail.search.records import ExperimentError, ExperimentRecord, JobRecord, TrialRecord
from dovetail.search.runner import Runner
from dovetail.search.schema import ExperimentConfig, read_experiment
from dovetail.search.store import Store

__all__ = [
    "ConfigErrors",
    "Experiment",
    "ExperimentConfig",
    "ExperimentError",
    "ExperimentRecord",
    "JobRecord",
    "Runner",
    "SearchResult",
    "Store",
    "TrialRecord",
    "read_experiment",
    "search",
]
