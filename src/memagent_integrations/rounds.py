"""Prompts that are asked side by side, although a loop yields them one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from memagent_integrations.errors import MemAgentError

if TYPE_CHECKING:
    from memagent_integrations.records import Prompt, Reply


class Round:
    """The prompts of a round, none of which depends on the reply to another, and the replies that are there already.

    A prompt carries its round. Who makes the call for it makes those for the prompts after it too, and keeps their
    outcomes here until the loop yields them. So every driver asks them side by side, and knows nothing of it.
    """

    def __init__(self) -> None:
        self.prompts: Sequence[Prompt] = ()
        self._asked: set[int] = set()
        self._outcomes: dict[int, Reply | MemAgentError] = {}

    def to_ask(self, prompt: Prompt) -> list[Prompt]:
        """Return the prompts to ask now: none if the outcome is there, or the one alone if it is asked again."""
        if prompt.index in self._outcomes:
            return []
        following = [] if prompt.index in self._asked else [each for each in self.prompts if each.index > prompt.index]
        new = [replace(each, deadline=prompt.deadline, context=prompt.context) for each in following]
        together = [prompt, *(each for each in new if each.index not in self._asked)]
        self._asked.update(each.index for each in together)
        return together

    def keep(self, prompts: Sequence[Prompt], outcomes: Sequence[Reply | MemAgentError]) -> None:
        """Keep the outcomes of these prompts."""
        self._outcomes.update(zip((prompt.index for prompt in prompts), outcomes, strict=True))

    def take(self, prompt: Prompt) -> Reply | MemAgentError:
        """Return the outcome of a prompt; it is not kept any longer."""
        return self._outcomes.pop(prompt.index)
