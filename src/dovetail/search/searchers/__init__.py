"""Searchers, which choose the trials to run and those to stop early."""

from dovetail.search.searchers.base import (
    Composed,
    NeverStop,
    Sampler,
    Searcher,
    SearcherConfig,
    StoppingRule,
    Suggestion,
)
from dovetail.search.searchers.halving import AsyncHalving, Bracket, adaptive_brackets, rung_units
from dovetail.search.searchers.pbt import PopulationBasedTraining
from dovetail.search.searchers.registry import SearcherKind, make_searcher, read_searcher, searchers
from dovetail.search.searchers.sampled import CmaSampler, GridSampler, OptunaSampler, RandomSampler

__all__ = [
    "AsyncHalving",
    "Bracket",
    "CmaSampler",
    "Composed",
    "GridSampler",
    "NeverStop",
    "OptunaSampler",
    "PopulationBasedTraining",
    "RandomSampler",
    "Sampler",
    "Searcher",
    "SearcherConfig",
    "SearcherKind",
    "StoppingRule",
    "Suggestion",
    "adaptive_brackets",
    "make_searcher",
    "read_searcher",
    "rung_units",
    "searchers",
]
