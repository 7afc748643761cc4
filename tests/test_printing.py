"""Text from files, as terminals and pages show it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.printing import page_text, printable

UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("größer 数 🙂", "größer 数 🙂"),
        ("\x1b[2J", r"\x1b[2J"),
        ("\x9b31m\x7f", r"\x9b31m\x7f"),
        ("a\r\n\tb", r"a\r\n\tb"),
        ("\u202eevil\u2066", r"\u202eevil\u2066"),
        ("\ud800", r"\ud800"),
    ],
)
def test_control_characters_are_printed_visibly(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_log_keeps_its_lines() -> None:
    assert printable("a\n\tb\r\x1b", lines=True) == "a\n\tb\r\\x1b"


@given(st.text(st.characters(codec=None)))
def test_printable_text_contains_nothing_unsafe(text: str) -> None:
    assert not UNSAFE.search(printable(text))
    assert not UNSAFE.search(printable(text, lines=True).translate({9: None, 10: None, 13: None}))
    page_text(text).encode("utf-8")


def test_a_page_shows_markup_as_text() -> None:
    assert page_text("<b>\x1b&\n") == r"&lt;b&gt;\x1b&amp;\n"
    assert page_text("a\nb", lines=True) == "a\nb"
