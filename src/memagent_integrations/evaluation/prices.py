"""What tokens cost in money."""

from __future__ import annotations

from dataclasses import dataclass

from memagent_integrations.checks import check_number, drop_none
from memagent_integrations.records import Usage


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices of a million tokens, in any currency.

    `cached` is that of prompt tokens from a cache; None where they cost what the others cost.

    Raises:
        UsageError: a price is not a number from 0 to a billion.
    """

    prompt: float
    completion: float
    cached: float | None = None

    def __post_init__(self) -> None:
        check_number(most=1e9, **drop_none(**vars(self)))

    def cost(self, usage: Usage) -> float | None:
        """Return what the tokens cost; None where their number is unknown.

        Prompt tokens of which it is unknown whether they came from a cache cost the full price; of a server that counts
        more of them than there were, all came from it.
        """
        if usage.prompt_tokens is None or usage.completion_tokens is None:
            return None
        cached = 0 if self.cached is None else min(usage.cached_tokens or 0, usage.prompt_tokens)
        prompt = (usage.prompt_tokens - cached) * self.prompt + cached * (self.cached or 0)
        return (prompt + usage.completion_tokens * self.completion) / 1e6
