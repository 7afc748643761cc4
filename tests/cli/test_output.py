"""Text from files on a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.checkpoint import save
from dovetail.printing import printable

_EVIL = "\x1b]0;owned\x07\x1b[2J\x9b1m\x7f\r\n\u202e[red]\ud800"
_SHOWN = r"\x1b]0;owned\x07\x1b[2J\x9b1m\x7f\r\n\u202e[red]\ud800"
# The part of it that can be the name of a file.
_NAME = "\x1b]0;owned\x07\x1b[2J\x7f\r\n\u202e[red]"


def test_control_characters_are_printed_visibly() -> None:
    assert printable(_EVIL) == _SHOWN
    assert printable("größer 🎉 [bold] \\x1b") == "größer 🎉 [bold] \\x1b"


@given(st.text(st.characters()))
def test_printable_text_has_no_control_character_and_can_be_encoded(text: str) -> None:
    shown = printable(text)
    shown.encode()
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in shown)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder with two checkpoints, whose names and summaries are escape sequences, and a damaged one."""
    for number in (1, 2):
        summary = {"step": number, _EVIL: _EVIL, "metrics": {_EVIL: 0.5}, "nested": {_EVIL: [_EVIL]}}
        save(tmp_path / f"{_NAME}{number}", {_EVIL: 1}, summary=summary)
    (save(tmp_path / f"damaged{_NAME}", {}) / "manifest.json").unlink()
    return tmp_path


def _commands(folder: Path) -> list[list[Any]]:
    second = folder / f"{_NAME}2"
    return [
        ["inspect", second],
        ["inspect", second, "--json"],
        ["verify", second],
        ["verify", folder / f"damaged{_NAME}"],
        ["list", folder],
        ["list", folder, "--json"],
        ["export", second, "-o", folder / f"{_NAME}.pt"],
        ["prune", folder, "--keep-best", 1, "--metric", _EVIL],
        ["prune", folder, "--keep-best", 1, "--metric", "lose"],
    ]


@pytest.mark.parametrize("number", range(9))
def test_checkpoint_commands_print_no_control_characters(run: Any, hostile: Path, number: int) -> None:
    _, out, err = run("checkpoint", *_commands(hostile)[number])
    assert len(out + err) > 50
    for line in (out + err).split("\n"):
        assert printable(line) == line
    assert r"\x1b]0;owned" in out + err or r"\u001b]0;owned" in out + err
    # Markup is shown, not obeyed.
    assert "[red]" in out + err


def test_warnings_of_a_command_print_no_control_characters(run: Any, hostile: Path) -> None:
    code, out, err = run("checkpoint", "prune", hostile, "--keep-last", 1, "--dry-run")
    assert code == 0
    assert r"damaged\x1b]0;owned" in err
    assert "\x1b" not in out + err
