"""The answer of a streamed reply, piece by piece."""

from __future__ import annotations

import re
from collections.abc import Iterator

from memagent_integrations.prompts import JSON_STARTS, THINKING_TAGS, PromptSet
from memagent_integrations.sanitize import visible

_UNFINISHED_TAG = re.compile(r"<[/\w-]*\Z")


class AnswerStream:
    """Turns the pieces of a streamed reply into pieces of the answer, without thinking and without tags around it.

    Joined, the pieces are `PromptSet.parse_answer` of the whole reply; a boxed answer comes in one piece at the end.
    There is one exception: when a reply closes a thinking block that the chat template opened, the text before has
    already been yielded, and the whole answer follows it. Pass `thinking=True` if the reply begins inside such a block.
    With `structured` the answer is JSON, as for `parse_answer`. Each character is looked at once.
    """

    def __init__(self, prompts: PromptSet, *, thinking: bool = False, structured: bool = False) -> None:
        self._prompts, self._structured = prompts, structured
        self._tags = re.compile(rf"(</?(?:think(?:ing)?{''.join('|' + tag for tag in prompts.tags)})>)")
        self._longest_tag = max(len(tag) for tag in ("thinking", *prompts.tags)) + 3
        # the tags that end the thinking block that we are in; none outside of one
        self._closing_tags: tuple[str, ...] = tuple(THINKING_TAGS.values()) if thinking else ()
        self._unfinished = ""  # the end of the text, if it may be the beginning of a tag
        self._gap: list[str] = []  # space and tags, which belong to the answer only if text follows
        self._unseen = ""  # the beginning of the answer, as long as there is nothing to see in it
        self._sent: list[str] = []
        self._holding = prompts.answer_format == "boxed"  # whether to yield nothing more before the end

    def feed(self, piece: str) -> Iterator[str]:
        """Take a piece of the reply; yield the text that certainly belongs to the answer."""
        text = self._unfinished + piece
        unfinished = _UNFINISHED_TAG.search(text, max(len(text) - self._longest_tag, 0))
        self._unfinished = unfinished[0] if unfinished else ""
        for part in self._tags.split(text[: len(text) - len(self._unfinished)]):
            if not self._holding:
                yield from self._take(part)

    def finish(self, reply: str) -> Iterator[str]:
        """Take the complete reply; yield the rest of the answer."""
        answer, sent = self._prompts.parse_answer(reply, structured=self._structured), "".join(self._sent)
        if answer != sent:
            yield answer.removeprefix(sent) if answer.startswith(sent) else f"\n\n{answer}"

    def _take(self, part: str) -> Iterator[str]:
        """Take a tag or the text between two tags."""
        if self._closing_tags:
            self._closing_tags = () if part in self._closing_tags else self._closing_tags
        elif self._structured and self._sent:  # what stands in the strings of JSON is no tag
            yield self._send(part)
        elif part in THINKING_TAGS:
            self._closing_tags = (THINKING_TAGS[part],)
        elif part in THINKING_TAGS.values():  # the chat template opened this block
            self._holding = bool(self._sent)
            self._gap, self._unseen = [], ""
        elif not part.strip() or self._tags.fullmatch(part):
            self._gap.append(part)
        elif not (self._sent or self._structured or visible(part)):  # no answer if nothing else follows
            self._unseen = "".join([self._unseen, *self._gap, part]) if self._unseen else part.lstrip()
            self._gap = []
        elif self._structured and not part.lstrip().startswith(JSON_STARTS):  # thinking, its block opened unseen
            self._closing_tags = tuple(THINKING_TAGS.values())
        else:
            yield self._send(part)

    def _send(self, part: str) -> str:
        """Return the next piece of the answer, without the space at its end, which is kept for the piece after it."""
        piece = "".join([self._unseen, *self._gap, part]) if self._sent or self._unseen else part.lstrip()
        self._unseen = ""
        self._gap = [piece[len(piece.rstrip()) :]]
        self._sent.append(piece.rstrip())
        return self._sent[-1]
