"""Make text safe for a prompt, where it must not act as a control token or a tag, and for a file in UTF-8."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_CONTROL = re.compile(
    r"""
    < (?= \| [^|<>\n]{1,60} \|>         # <|im_start|> and its kin
        | ｜ [^<>\n]{1,60} ｜>          # the same with full-width bars
        | /? (?: s | bos | eos | pad | unk | mask | sep | cls
               | think(?:ing)? | tool_(?:call|response)s? | fim_\w{3,9}
               | (?:start|end)_of_(?:turn|image|role|text|utterance)
               | empty_output | (?:issue|jupyter|commit)_\w{3,12} | file_sep | repo_name | gh_stars ) >
        | </?SYS>> )
  | \[ (?= /? (?: INST | SYSTEM_PROMPT | AVAILABLE_TOOLS | TOOL_CALLS | TOOL_RESULTS | TOOL_CONTENT
                | MODEL_SETTINGS | THINK | ARGS | IMG ) \] )
    """,
    re.IGNORECASE | re.VERBOSE,
)
IGNORABLE = (
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
"""The characters that nobody sees, for a class of a regular expression: Default_Ignorable_Code_Point of Unicode."""
_VISIBLE = re.compile(f"[^\\s\\x00-\\x1f\\x7f-\\x9f\u2800{IGNORABLE}]")
_UNSENDABLE = re.compile("[\x00\ud800-\udfff]")
_SURROGATES = re.compile("[\ud800-\udfff]")


def neutralise(text: str) -> str:
    """Return the text without anything that a chat template or tokenizer takes for a control token; as long as before.

    The first character of a control token is replaced by a look-alike: `<|im_end|>` becomes `‹|im_end|>`. NUL and lone
    surrogates, which no tokenizer accepts, become U+FFFD.
    """
    return _CONTROL.sub(lambda match: "‹" if match[0] == "<" else "［", _UNSENDABLE.sub("\ufffd", text))


def visible(text: str) -> bool:
    """Return whether a text has anything to see: white space, controls and what Unicode lets ignore are nothing."""
    return _VISIBLE.search(text) is not None


def tags_of(template: str) -> tuple[str, ...]:
    """Return the names of the tags in a template, sorted."""
    return tuple(sorted(set(re.findall(r"</?([A-Za-z_][\w-]*)>", template))))


def harmless(text: str, tags: tuple[str, ...]) -> str:
    """Return the text, `neutralise`d and unable to open or close any of these tags; as long as before."""
    text = neutralise(text)
    return _imitations(tags).sub("‹", text) if tags else text


@cache
def _imitations(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"[<＜](?=[\s/\u200b-\u200d\u2060\ufeff]{{0,9}}(?:{'|'.join(tags)})\b)", re.IGNORECASE)


def encodable(value: Any) -> Any:
    """Return the value (text, a list, a mapping) with U+FFFD for lone surrogates: models write some, UTF-8 has none."""
    if isinstance(value, str):
        return _SURROGATES.sub("\ufffd", value)
    if isinstance(value, dict):
        return {key: encodable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encodable(item) for item in value]
    return value
