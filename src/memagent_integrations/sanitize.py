"""Make text safe for a prompt, where it must not act as a control token or a tag, and for a file in UTF-8."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

_IMITATION = r"""
    < (?= [\s/\\⁄∕⧸]*+ (?:
          \| [^|<>\n]{1,60} \| \s*+ >                             # <|im_start|> and its kin, with bars of any width
        | \| [/"\w-]{1,40} > | [\w"-]{1,40} \| >                  # <|turn> and <turn|>
        | \| dsml \|
        | < [\s/]*+ sys \s*+ > \s*+ >
        | (?: s | [bes]os | pad | unk | mask | sep | cls | [es]op | eo[ah] | (?: bos | eos | eop | mask ) _token
            | think (?:ing)? | tool_ (?: call | response ) s? | arg_ (?: key | value ) | seed: \w{1,20}
            | (?: start | end ) _of_ (?: turn | image | audio | role | text | utterance )
            | (?: start | end ) _function_ (?: call | response | declaration ) | escape
            | (?: image | audio ) _soft_token | unused_?\d+ | extra_id_\d+ | special_\d+ | reserved_\d+
            | fim_\w{3,9} | empty_output | (?: issue | jupyter | commit ) _\w{3,12}
            | file_sep | filename | repo_?name | gh_stars
          ) \s*+ >
        | (?: TAGS ) \b ) )
  | \[ (?= [\s/]*+ (?:
          \| [^]|[\n]{1,60} \| \s*+ \]                             # [|user|]
        | (?: inst | system_prompt | available_tools | tool_calls | tool_results | tool_content | call_id | args
            | model_settings | think | img (?: _break | _end )? | (?: begin_ )? audio | transcribe | control_\d+
            | prefix | middle | suffix | [gs]?mask | bos | eos | eot | pad | unk | cls | sep
          ) \s*+ \] ) )
"""
"""Control tokens of models, from Llama 2 to GPT-OSS, and TAGS, in a text as it reads, in small letters."""
_ANGLES, _SQUARES = "<＜﹤≮", "[［﹇"
_SUSPECT = re.compile(
    "|".join(rf"{bracket}(?=\s*+(?:[^\s!-~]|[/\\|<\"A-Za-z]))" for bracket in _ANGLES)
    + "".join(rf"|\{bracket}(?=\s*+(?:[^\s!-~]|[/|iscatmpbeugISCATMPBEUG]))" for bracket in _SQUARES)
)
"""What may begin one of them; for most texts that is all there is to look for."""
IGNORABLE = (
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
"""The characters that nobody sees, for a class of a regular expression: Default_Ignorable_Code_Point of Unicode."""
_VISIBLE = re.compile(f"[^\\s\\x00-\\x1f\\x7f-\\x9f\u2800\ufff9-\ufffb{IGNORABLE}]")
_ODD = "\\x00-\\x08\\x0e-\\x1b\\x7f-\\x84\\x86-\\x9f\u2800\ufff9-\ufffd\u0300-\u036f\u20d0-\u20ff"
_ODDITY = re.compile(f"[{_ODD}]")
"""What a reader passes over within a word, or takes for its end: the marks over and through letters among it."""
_UNSEEN = re.compile(f"[{IGNORABLE}]+")
_PLAIN = bytes([*range(0x09, 0x0E), *range(0x1C, 0x7F)])
_FEW = 0.05
"""A share of unusual characters that makes it worth while to replace them kind by kind."""
_RUN = re.compile(r"[^\t-\r\x1c-~][^\t-\r\x1c-~＜﹤≮［﹇]{0,63}")
"""Characters whose form is not their own, perhaps; a bracket is the first of its run."""
_TAG = re.compile(r"</?([^\W\d](?:[\w:.-]*\w)?)(?=[\s/>])")
_SURROGATES = re.compile("[\ud800-\udfff]")


def neutralise(text: str) -> str:
    """Return the text without anything that a chat template or tokenizer takes for a control token; as long as before.

    The first character of a control token is replaced by a look-alike: `<|im_end|>` becomes `‹|im_end|>`, and `[INST]`
    becomes `⁅INST]`; so is that of what only reads like one, as `harmless` says. NUL and lone surrogates, which no
    tokenizer accepts, become U+FFFD.
    """
    return harmless(text, ())


def visible(text: str) -> bool:
    """Return whether a text has anything to see: white space, controls and what Unicode lets ignore are nothing."""
    return _VISIBLE.search(text) is not None


def tags_of(template: str) -> tuple[str, ...]:
    """Return the names of the tags in a template, sorted."""
    return tuple(sorted(set(_TAG.findall(template))))


@lru_cache(4)  # a chunk is made harmless when it is cut and when it is shown
def harmless(text: str, tags: tuple[str, ...]) -> str:
    """Return the text, `neutralise`d and unable to open or close any of these tags; as long as before.

    What only reads like a tag cannot do so either: one with white space or marks in it or after it, with characters
    that nobody sees, or in other characters of the same meaning (NFKC).
    """
    text = encodable(text.replace("\0", "\ufffd"))
    if not any(_SUSPECT.match(text, place) for place in _places(text, _ANGLES + _SQUARES)):
        return text
    unusual = text.encode().translate(None, _PLAIN).decode()  # much faster than a pattern
    places = dict(_imitations(text, unusual, tags, ""))
    if _ODDITY.search(unusual):
        places |= _imitations(text, unusual, tags, " ")
    if not places:
        return text
    return "".join([places.get(place, sign) for place, sign in enumerate(text)])


def _imitations(text: str, unusual: str, tags: tuple[str, ...], odd: str) -> Iterator[tuple[int, str]]:
    """Yield where imitations begin in a text that is read with `odd` for each oddity, and what is to stand there.

    `unusual` are the characters of the text that are not plain.
    """
    as_read = _as_read(text, unusual, odd).lower()
    imitation = _imitation(tags)
    starts = [place for place in _places(as_read, "<[") if imitation.match(as_read, place)]
    if not starts:
        return
    ends, read_ends = [0], [0]  # of each run, in the text and in the text as it reads
    for run in _RUN.finditer(text):
        read_ends.append(read_ends[-1] + run.start() - ends[-1] + len(_form(run[0], odd)))
        ends.append(run.end())
    for start in starts:
        before = bisect_right(read_ends, start) - 1
        yield ends[before] + start - read_ends[before], "‹" if as_read[start] == "<" else "⁅"


def _as_read(text: str, unusual: str, odd: str) -> str:
    """Return a text with the form of each of its runs."""
    kinds = set(unusual) if len(unusual) < _FEW * len(text) else None
    if kinds is None or any(map(_is_moved, unicodedata.normalize("NFKD", "".join(kinds)))):
        return _RUN.sub(lambda run: _form(run[0], odd), text)
    for kind in kinds:  # then the form of a run is that of its characters one by one
        text = text.replace(kind, _form(kind, odd))
    return text


def _is_moved(sign: str) -> bool:
    """Return whether a normal form puts this mark into an order with others, and a text as it reads still has it."""
    return unicodedata.combining(sign) > 0 and not _ODDITY.match(sign)


def _places(text: str, signs: str) -> Iterator[int]:
    """Yield where one of these characters stands: much faster than a pattern, because there are few of them."""
    for sign in signs:
        place = text.find(sign)
        while place >= 0:
            yield place
            place = text.find(sign, place + 1)


@lru_cache(1024)
def _form(text: str, odd: str = "") -> str:
    """Return a text as it reads: in plain forms (NFKD), without what nobody sees, with `odd` for each oddity.

    NFKC, the composed form, would make one character of a bracket and a mark after it.
    """
    return _ODDITY.sub(odd, _UNSEEN.sub("", unicodedata.normalize("NFKD", text)))


@lru_cache(256)
def _imitation(tags: tuple[str, ...]) -> re.Pattern[str]:
    names = (r"\s*+".join(map(re.escape, _form(tag).lower())) for tag in tags)
    return re.compile(_IMITATION.replace("TAGS", "|".join(names) or "(?!)"), re.VERBOSE)


def encodable(value: Any) -> Any:
    """Return the value (text, a list, a mapping) with U+FFFD for lone surrogates: models write some, UTF-8 has none."""
    if isinstance(value, str):
        try:
            value.encode()  # much faster than the search
        except UnicodeEncodeError:
            return _SURROGATES.sub("\ufffd", value)
        return value
    if isinstance(value, dict):
        return {key: encodable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encodable(item) for item in value]
    return value
