"""The oracle: it sees only the passages that hold the answer. Questions it fails are not lost by reading."""

from __future__ import annotations

from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation.baselines.base import Answer, Baseline, Model
from memagent_integrations.evaluation.baselines.prompts import plain
from memagent_integrations.evaluation.samples import Sample


class Oracle(Baseline):
    """One call with the gold passages. It fails where they do not fit the window."""

    def find_answer(self, sample: Sample, model: Model) -> Answer:
        """Return the answer from the gold passages.

        Raises:
            UsageError: the sample has no gold passages.
        """
        if not sample.oracle.strip():
            raise UsageError(
                f"the sample {sample.id} has no gold passages, so the oracle cannot read it; "
                "leave the oracle out for its task"
            )
        return Answer(text=model.ask(plain(sample.question, sample.oracle)))
