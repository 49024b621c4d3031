"""What a policy wrote, as tokens with their log-probabilities: the rows that training is made of."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from memagent_integrations.records import Reply


@dataclass(frozen=True, kw_only=True)
class Sampled(Reply):
    """A reply as token ids: its prompt, what was written (with the end-of-text token), and the log-probability of each.

    Training uses these and never the text, which a tokenizer may split in another way than it was written.
    """

    prompt_ids: array[int] = field(repr=False)
    output_ids: array[int] = field(repr=False)
    logprobs: array[float] = field(repr=False)
