"""Registry of searchers by name, with their options."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dovetail.checks import Key, Problem, Problems, flag, list_of, number, one_of, read_section, text, unit, whole
from dovetail.errors import misspelled_methods
from dovetail.extras import require
from dovetail.registry import Registry
from dovetail.search.searchers.base import Composed, NeverStop, Sampler, Searcher, SearcherConfig
from dovetail.search.searchers.halving import AsyncHalving, Bracket, adaptive_brackets
from dovetail.search.searchers.pbt import PopulationBasedTraining
from dovetail.search.searchers.sampled import CmaSampler, GridSampler, OptunaSampler, RandomSampler
from dovetail.search.space import Space
from dovetail.units import unit_name

Make = Callable[[SearcherConfig, Space, int], Searcher]


@dataclass(frozen=True)
class SearcherKind:
    """How a searcher is built from a configuration.

    Attributes:
        make: Returns the searcher for a configuration, a space and a seed.
        options: The keys of the section `searcher` that are specific to this searcher.
        problems: Yields mistakes that concern several options, with keys from the top of the configuration.
        compares: Whether the searcher compares trials, so that the configuration must set the metric.

    Example:
        >>> def few(config, space, seed):
        ...     return Composed(RandomSampler(space, seed), NeverStop(), max_trials=config.options["tries"])
        >>> kind = SearcherKind(few, {"tries": Key(whole(1), default=3)})
        >>> kind.make(SearcherConfig("few", "loss", options={"tries": 2}), Space({}), 0).suggest(None, 2) is None
        True
    """

    make: Make
    options: Mapping[str, Key] = field(default_factory=dict)
    problems: Callable[[SearcherConfig, Space], Iterator[Problem]] = lambda config, space: iter(())
    compares: bool = True


def make_searcher(config: SearcherConfig, space: Space, seed: int) -> Searcher:
    """Return the searcher of a configuration.

    Raises:
        ConfigErrors: The configuration is not compatible with the space.

    Example:
        >>> space = Space({"size": {"type": "categorical", "vals": [16, 32]}})
        >>> searcher = make_searcher(read_searcher({"name": "grid", "metric": "loss"}), space, seed=0)
        >>> [searcher.suggest(None, number).params for number in range(2)]
        [{'size': 16}, {'size': 32}]
    """
    kind = searchers.get(config.name)
    found = Problems({})
    found.extend(kind.problems(config, space))
    found.raise_any()
    searcher = kind.make(config, space, seed)
    for name, nearest in misspelled_methods(type(searcher), Searcher):
        warnings.warn(
            f"{type(searcher).__name__}.{name} is never called: did you mean {nearest}?", UserWarning, stacklevel=2
        )
    return searcher


def read_searcher(section: Mapping[str, Any], problems: list[Problem] | None = None) -> SearcherConfig:
    """Return the configuration of a searcher.

    Args:
        section: The section `searcher` of a file.
        problems: A list to which mistakes are appended, with their keys in the section; None means to raise them.

    Raises:
        ConfigErrors: The section has mistakes; the message lists all of them.

    Example:
        >>> read_searcher({"name": "random", "metric": "loss", "max_trials": 8}).options
        {'max_trials': 8, 'max_concurrent_trials': 16}
    """
    noted: list[Problem] = []
    name = section.get("name")
    kind = searchers.get(name) if isinstance(name, str) and name in searchers.names() else None
    if kind is not None:
        options = kind.options
        keys = {**COMMON, **options} | ({} if kind.compares else {"metric": Key(text, "")})
    else:
        # Without a known searcher only the names of its options are checked.
        options = {
            name: Key(lambda value: value, None) for known in searchers.names() for name in searchers.get(known).options
        }
        keys = {**options, **COMMON}
    values = read_section(section, keys, noted, IGNORED)
    if kind is not None and "max_time" in options:
        _resolve_time(section, values, noted)
    if problems is None:
        found = Problems({})
        found.extend(noted, "searcher")
        found.raise_any()
    else:
        problems += noted
    return SearcherConfig(
        name=values.get("name", ""),
        metric=values.get("metric", ""),
        smaller_is_better=values["smaller_is_better"],
        # Every report has batches; only searchers that compare trials by another number require it.
        time_metric=values.get("time_metric") or "batches",
        max_length=values["max_length"],
        source_trial_id=values["source_trial_id"],
        options={name: values[name] for name in options if name in values and name != "time_metric"},
    )


def _resolve_time(section: Mapping[str, Any], values: dict[str, Any], problems: list[Problem]) -> None:
    """Set the time of a searcher that compares trials at certain times from the length of the trials."""
    length = values["max_length"]
    if length is not None and values["time_metric"] in (None, unit_name(length)):
        # `max_length: {epochs: 10}` implies both options, unless they are given.
        values["time_metric"] = unit_name(length)
        values["max_time"] = values["max_time"] or length.length
    for name, hint in (
        ("time_metric", "what time is measured in, such as epochs or batches"),
        ("max_time", "the time that the best trials train for, a number of time_metric"),
    ):
        if values[name] is None and section.get(name) is None:
            problems.append(Problem((name,), f"missing: {hint}"))


COMMON = {
    "name": Key(
        lambda value: one_of(*searchers.names())(value),
        hint="one of the searchers, such as single, grid, random or adaptive_asha",
    ),
    "metric": Key(text, hint="the validation metric that trials are compared by, such as validation_loss"),
    "smaller_is_better": Key(flag, True),
    "max_length": Key(unit(1), None),
    "source_trial_id": Key(whole(0), None),
}
"""The keys that every searcher has."""

IGNORED = ("source_checkpoint_uuid", "stop_once")
"""Further keys of Determined's searchers."""


# The table


def _random(config: SearcherConfig, space: Space, seed: int) -> Sampler:
    return RandomSampler(space, seed)


def _tpe(config: SearcherConfig, space: Space, seed: int, kind: str = "TPESampler") -> Sampler:
    startup = config.options.get("num_startup_trials", 10)

    def make(seed: int) -> Any:
        return getattr(require("optuna", "search").samplers, kind)(seed=seed, n_startup_trials=startup)

    return OptunaSampler(space, seed, make, config.smaller_is_better)


def _gp(config: SearcherConfig, space: Space, seed: int) -> Sampler:
    require("scipy", "search")
    return _tpe(config, space, seed, "GPSampler")


def _cma(config: SearcherConfig, space: Space, seed: int) -> Sampler:
    require("cmaes", "search")
    return CmaSampler(space, seed, config.options["population_size"], config.smaller_is_better)


def _sampled(sampler: Callable[[SearcherConfig, Space, int], Sampler]) -> Make:
    """Return a function that builds a searcher whose trials all train to their end."""

    def make(config: SearcherConfig, space: Space, seed: int) -> Searcher:
        return Composed(sampler(config, space, seed), NeverStop(), **_bounds(config, config.options["max_trials"]))

    return make


def _halved(brackets: Callable[[Mapping[str, Any]], list[Bracket]]) -> Make:
    """Return a function that builds a searcher whose trials are compared at rungs."""

    def make(config: SearcherConfig, space: Space, seed: int) -> Searcher:
        options = config.options
        sampler = {"random": _random, "tpe": _tpe}[options["sampler"]](config, space, seed)
        made = brackets(options)
        rule = AsyncHalving(made, options["max_time"], options["divisor"])
        together = sum(bracket.max_concurrent_trials for bracket in made)
        return Composed(sampler, rule, **_bounds(config, together))

    return make


def _single(config: SearcherConfig, space: Space, seed: int) -> Searcher:
    return Composed(RandomSampler(space, seed), NeverStop(), max_trials=1, replaces_invalid=False)


def _grid(config: SearcherConfig, space: Space, seed: int) -> Searcher:
    sampler = GridSampler(space)
    bounds = {**_bounds(config, len(sampler)), "max_trials": len(sampler)}
    return Composed(sampler, NeverStop(), **bounds, replaces_invalid=False)


def _pbt(config: SearcherConfig, space: Space, seed: int) -> Searcher:
    return PopulationBasedTraining(space, seed, smaller_is_better=config.smaller_is_better, **config.options)


def _bounds(config: SearcherConfig, unlimited: int) -> dict[str, Any]:
    """Return the arguments of every composed searcher; `max_concurrent_trials: 0` means the number `unlimited`."""
    named = {name: config.options[name] for name in ("max_trials", "max_concurrent_trials") if name in config.options}
    named["max_concurrent_trials"] = named.get("max_concurrent_trials") or unlimited
    return {**named, "smaller_is_better": config.smaller_is_better}


def _one_bracket(options: Mapping[str, Any]) -> list[Bracket]:
    # Without a limit, use the number that one trial needs to reach the last rung, as in Determined.
    enough = min(options["divisor"] ** (options["num_rungs"] - 1), options["max_trials"])
    return [Bracket(options["num_rungs"], options["max_trials"], options["max_concurrent_trials"] or enough)]


def _adaptive(options: Mapping[str, Any]) -> list[Bracket]:
    named = ("max_trials", "max_time", "mode", "divisor", "max_rungs", "max_concurrent_trials", "bracket_rungs")
    return adaptive_brackets(**{name: options[name] for name in named})


def _hyperband(options: Mapping[str, Any]) -> list[Bracket]:
    # Hyperband has a bracket for every number of rungs, with trials in proportion to divisor^(rungs - 1) / rungs.
    return _adaptive({**options, "mode": "conservative", "bracket_rungs": ()})


def _cma_problems(config: SearcherConfig, space: Space) -> Iterator[Problem]:
    if not any(parameter.is_numeric for parameter in space.parameters.values()):
        yield Problem(
            ("searcher", "name"),
            "cmaes needs a hyperparameter of type int, double or log, got none; tpe and random need no numbers",
        )


_CONCURRENT = {"max_concurrent_trials": Key(whole(0), 16)}
_TRIALS = {"max_trials": Key(whole(1), hint="how many trials to run"), **_CONCURRENT}
_STARTUP = {"num_startup_trials": Key(whole(1), 10)}
_TIME = {"max_time": Key(whole(1), None), "time_metric": Key(text, None)}
# CMA-ES draws a whole population for every suggestion.
_LARGEST = 10_000
_CMA = {**_TRIALS, "population_size": Key(whole(4, _LARGEST), None)}
_DIVISOR = whole(2, 1000)
_RUNGS = whole(1, 50)
_SAMPLER = {"sampler": Key(one_of("random", "tpe"), "random")}

_HALVING = {**_TRIALS, **_TIME, "divisor": Key(_DIVISOR, 4), **_SAMPLER, "num_rungs": Key(_RUNGS)}
_ADAPTIVE = {
    **_TRIALS,
    **_TIME,
    "divisor": Key(_DIVISOR, 4),
    **_SAMPLER,
    "mode": Key(one_of("aggressive", "standard", "conservative"), "standard"),
    "max_rungs": Key(_RUNGS, 5),
    "bracket_rungs": Key(list_of(_RUNGS), ()),
}
_HYPERBAND = {**_TRIALS, **_TIME, "divisor": Key(_DIVISOR, 3), **_SAMPLER, "max_rungs": Key(_RUNGS, 5)}
_PBT = {
    **_TIME,
    "max_trials": Key(whole(1), None),
    "max_concurrent_trials": Key(whole(0), None),
    "population_size": Key(whole(2, _LARGEST), 16),
    "num_rounds": Key(whole(1, 10_000), 10),
    "truncate_fraction": Key(number(0, 0.5), 0.2),
    "perturb_factors": Key(list_of(number(0), least=1), (0.8, 1.2)),
    "resample_probability": Key(number(0, 1), 0.25),
}


def _built_in() -> dict[str, SearcherKind]:
    return {
        "single": SearcherKind(_single, compares=False),
        "grid": SearcherKind(_grid, _CONCURRENT, lambda config, space: space.grid_problems(), compares=False),
        "random": SearcherKind(_sampled(_random), _TRIALS, compares=False),
        "tpe": SearcherKind(_sampled(_tpe), {**_TRIALS, **_STARTUP}),
        "gp": SearcherKind(_sampled(_gp), {**_TRIALS, **_STARTUP}),
        "cmaes": SearcherKind(_sampled(_cma), _CMA, _cma_problems),
        "async_halving": SearcherKind(_halved(_one_bracket), _HALVING),
        "adaptive_asha": SearcherKind(_halved(_adaptive), _ADAPTIVE),
        "hyperband": SearcherKind(_halved(_hyperband), _HYPERBAND),
        "pbt": SearcherKind(_pbt, _PBT),
    }


searchers: Registry[SearcherKind] = Registry("searcher", _built_in)
"""The searchers by name."""
