"""Add-ons that track a run with Weights & Biases or Neptune."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.tracking import Logger, NeptuneLogger, Tracker, WandBLogger
from dovetail.trainers.addons.core import AddOnBase


class _WebLoggerAddon(AddOnBase):
    """Base of the web loggers: the keyword `web_logger`, and one tracker for all web loggers of the class.

    This class occurs once in the method resolution order, after all web loggers. It therefore reads the settings of all
    of them.
    """

    service: ClassVar[str] = ""

    def __init__(self, *args: Any, web_logger: Any, **kwargs: Any) -> None:
        kinds = {kind.service: kind for kind in type(self).__mro__ if issubclass(kind, _WebLoggerAddon)}
        mounted = {service: kinds[service] for service in sorted(kinds) if service}
        if not isinstance(web_logger, Mapping):
            expected = ", ".join(f"{service!r}: {{…}}" for service in mounted)
            raise ConfigError(f"web_logger: expected settings as {{{expected}}}, got {web_logger!r}")
        for service in web_logger:
            if service not in mounted:
                raise UnknownNameError("web_logger", service, mounted)
        for service, kind in mounted.items():
            if not isinstance(web_logger.get(service), Mapping):
                raise ConfigError(
                    f"web_logger: {kind.__name__} needs its settings as {{{service!r}: {{…}}}}, "
                    f"got {web_logger.get(service)!r}"
                )
        settings = {service: dict(web_logger[service]) for service in mounted}
        # `config` of `wandb.init` are the hyperparameters of the run, which the tracker passes to every logger.
        config = settings.get("wandb", {}).pop("config", {})
        if not isinstance(config, Mapping):
            raise ConfigError(f"web_logger: wandb: config: expected hyperparameters by name, got {config!r}")
        loggers = (kind._make_logger(**settings[service]) for service, kind in mounted.items())
        self.tracker = Tracker(*loggers, hyperparameters=config)
        super().__init__(*args, **kwargs)
        # The context exists only after the constructor of the trainer.
        self.context.callbacks.add(self.tracker)

    @staticmethod
    def _make_logger(**settings: Any) -> Logger:
        raise NotImplementedError


class WandBLoggerAddon(_WebLoggerAddon):
    """Tracks training with Weights & Biases.

    Args:
        web_logger: `{"wandb": {…}}` with the arguments of `dovetail.tracking.WandBLogger`, and `config` with further
            hyperparameters. Settings of another web logger are in the same dictionary.

    Attributes:
        tracker: The tracker, for your own figures and numbers; one for all web loggers.

    Example:
        >>> from dovetail.trainers import Trainer
        >>> trainer = Trainer.add_on(WandBLoggerAddon)(web_logger={"wandb": {"project": "digits", "mode": "offline"}})
        >>> trainer.tracker.loggers[0].project
        'digits'
    """

    service = "wandb"

    @staticmethod
    def _make_logger(**settings: Any) -> Logger:
        return WandBLogger(**settings)


class NeptuneLoggerAddon(_WebLoggerAddon):
    """Tracks training with Neptune, whose service closed in March 2026; use `mode="offline"`, or your own server.

    Args:
        web_logger: `{"neptune": {…}}` with the arguments of `dovetail.tracking.NeptuneLogger`; `project_name` and
            `api_tkn` are other names for `project` and `api_token`. Settings of another web logger are in the same
            dictionary.

    Attributes:
        tracker: The tracker, for your own figures and numbers; one for all web loggers.

    Example:
        >>> from dovetail.trainers import Trainer
        >>> trainer = Trainer.add_on(NeptuneLoggerAddon)(
        ...     web_logger={"neptune": {"project_name": "team/digits", "mode": "offline"}}
        ... )
        >>> trainer.tracker.loggers[0].project
        'team/digits'
    """

    service = "neptune"

    @staticmethod
    def _make_logger(**settings: Any) -> Logger:
        return NeptuneLogger(**{_ZAE_NAMES.get(name, name): value for name, value in settings.items()})


_ZAE_NAMES = {"project_name": "project", "api_tkn": "api_token"}
