"""What is there to see of a text."""

from __future__ import annotations

import pytest

from memagent_integrations.sanitize import visible

NOTHING = [
    "",
    " \t\n\u00a0\u3000",
    "\u200b\u200b",
    "\ufeff",
    "\u00ad",
    "\u2060 \u2063",
    "\u200e\u200f\u202e",
    "\ufe0f",
    "\u3164\uffa0\u115f",
    "\u2800",
    "\x00\x1b\x7f",
    "\U000e0041\U000e0042",
]


@pytest.mark.parametrize("text", NOTHING, ids=[ascii(text) for text in NOTHING])
def test_what_nobody_sees_is_nothing(text: str) -> None:
    assert not visible(text)
    assert visible(f"{text}x{text}")


@pytest.mark.parametrize("text", [".", "0", "\u0301", "❤️", "\ufffd", "\u0600", "\u2581", "字"])
def test_a_single_sign_is_something(text: str) -> None:
    assert visible(text)
