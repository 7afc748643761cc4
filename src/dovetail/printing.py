"""Safe display of untrusted text on terminals and pages, and quieter loggers."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape

# Control characters (C0, DEL, C1), line separators, marks and overrides of the writing direction, half surrogate pairs.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\N{ARABIC LETTER MARK}\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
# The same without tab, line feed and carriage return.
_UNSAFE_IN_LOGS = re.compile(_UNSAFE.pattern.replace("\x00-\x1f", "\x00-\x08\x0b\x0c\x0e-\x1f"))


def printable(text: str, *, lines: bool = False) -> str:
    r"""Return a text with every control character, and every character that hides text, as a visible escape.

    Args:
        text: Text of unknown origin, such as the name of an experiment.
        lines: Whether line feeds, carriage returns and tabs are unchanged, as in a log.

    Example:
        >>> print(printable("a\x1b[2Jb\n"))
        a\x1b[2Jb\n
    """
    unsafe = _UNSAFE_IN_LOGS if lines else _UNSAFE
    return unsafe.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def page_text(text: str, *, lines: bool = False) -> str:
    """Return a text for an HTML page: with markup escaped, and control characters as visible escapes.

    Example:
        >>> page_text("<b>")
        '&lt;b&gt;'
    """
    return escape(printable(text, lines=lines))


def show_bytes(size: int) -> str:
    """Return a number of bytes with a decimal unit.

    Example:
        >>> show_bytes(1_500_000_000), show_bytes(12)
        ('1.50 GB', '12 B')
    """
    for exponent, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if size >= 10**exponent:
            return f"{size / 10**exponent:,.2f} {unit}"
    return f"{size} B"


@contextmanager
def quiet(*loggers: str, level: int = logging.WARNING) -> Iterator[None]:
    """Hide log lines of other packages below a level.

    Args:
        loggers: The names of the packages' loggers. Each level is restored afterwards.
        level: The lowest level that is still shown; a logger with a higher level is unchanged.

    Example:
        >>> with quiet("optuna"):
        ...     logging.getLogger("optuna").level == logging.WARNING
        True
    """
    levels = {name: logging.getLogger(name).level for name in loggers}
    for name, before in levels.items():
        logging.getLogger(name).setLevel(max(before, level))
    try:
        yield
    finally:
        for name, before in levels.items():
            logging.getLogger(name).setLevel(before)
