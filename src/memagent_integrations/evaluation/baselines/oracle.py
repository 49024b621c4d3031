"""The oracle: a reader that is shown only the passages that hold the answer. What it cannot answer is no fault of reading."""

from __future__ import annotations

from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation.baselines.base import Baseline, Found, Model
from memagent_integrations.evaluation.baselines.prompts import plain
from memagent_integrations.evaluation.samples import Sample


class Oracle(Baseline):
    """One call, with the gold passages; where they do not fit the window, that is a failure."""

    def find(self, sample: Sample, model: Model) -> Found:
        """The answer from the gold passages.

        Raises:
            UsageError: the task has none.
        """
        if not sample.oracle.strip():
            raise UsageError(
                f"the sample {sample.id} has no gold passages, so the oracle cannot read it; leave the oracle out for its task"
            )
        return Found(answer=model.ask(plain(sample.question, sample.oracle)))
