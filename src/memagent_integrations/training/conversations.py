"""What a policy wrote, with the probabilities that it wrote it with: the rows that training is made of."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from memagent_integrations.records import Reply


@dataclass(frozen=True, kw_only=True)
class Sampled(Reply):
    """A reply as tokens: those of its prompt, those that were written, the end of the text among them, and the log-probability of each of these.

    Training takes these and never the text, which may be tokenized in another way than it was written.
    """

    prompt_ids: array[int] = field(repr=False)
    output_ids: array[int] = field(repr=False)
    logprobs: array[float] = field(repr=False)
