"""Optional dependencies: imported when they are used, with an error that names the extra to install."""

from __future__ import annotations

import importlib
from types import ModuleType

from dovetail.errors import MissingExtraError


def require(module: str, extra: str) -> ModuleType:
    """Import and return an optional module, or raise an error with the extra to install.

    Args:
        module: The dotted name of the module.
        extra: The extra of Dovetail that installs it.

    Raises:
        MissingExtraError: The module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # The package is installed, but something that it imports is not: its own error is the right one.
        if error.name is None or not module.startswith(error.name):
            raise
        raise MissingExtraError(
            f"{module.partition('.')[0]} is not installed: pip install 'dovetail[{extra}]'"
        ) from error
