"""The answer of a streamed reply, piece by piece."""

from __future__ import annotations

import re
from collections.abc import Iterator

from memagent_integrations.prompts import JSON_STARTS, THINKING_TAGS, PromptSet, is_insufficient, may_be_insufficient
from memagent_integrations.sanitize import visible

_UNFINISHED_TAG = re.compile(r"<[/\w-]*\Z")


class AnswerStream:
    """Turns the pieces of a streamed reply into pieces of the answer, without thinking and without tags around it.

    Joined, the pieces are `PromptSet.parse_answer` of the whole reply; a boxed answer comes in one piece at the end.
    There is one exception: when a reply closes a thinking block that the chat template opened, the text before has
    already been yielded, and the whole answer follows it. Pass `thinking=True` if the reply begins inside such a block.
    With `structured` the answer is JSON, as for `parse_answer`. Each character is looked at once.

    With `rereads`, an answer that says that the memory does not suffice has no pieces. The beginning of any other is
    held back until it is certain that it does not say so.
    """

    def __init__(
        self, prompts: PromptSet, *, thinking: bool = False, structured: bool = False, rereads: bool = False
    ) -> None:
        self._prompts, self._structured, self._rereads = prompts, structured, rereads
        self._held: str | None = "" if rereads else None  # the beginning; None if nothing is held back
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
        for text in self._certain(piece):
            if self._held is None:
                yield text
            elif not may_be_insufficient(self._held + text):
                yield self._held + text
                self._held = None
            else:
                self._held += text

    def _certain(self, piece: str) -> Iterator[str]:
        """Take a piece of the reply; yield the text that certainly stands in it outside of thinking and tags."""
        text = self._unfinished + piece
        unfinished = _UNFINISHED_TAG.search(text, max(len(text) - self._longest_tag, 0))
        self._unfinished = unfinished[0] if unfinished else ""
        for part in self._tags.split(text[: len(text) - len(self._unfinished)]):
            if not self._holding:
                yield from self._take(part)

    def finish(self, reply: str) -> Iterator[str]:
        """Take the complete reply; yield the rest of the answer."""
        answer = self._prompts.parse_answer(reply, structured=self._structured)
        sent = "".join(self._sent) if self._held is None else ""
        if answer != sent and not (self._rereads and is_insufficient(answer)):
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
