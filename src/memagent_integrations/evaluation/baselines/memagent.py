"""MemAgent, the reader of this package, with each prompt layout."""

from __future__ import annotations

from typing import get_args

from memagent_integrations.errors import ContextOverflow, UsageError
from memagent_integrations.evaluation.baselines.base import Answer, Baseline, Model
from memagent_integrations.evaluation.samples import Sample
from memagent_integrations.prompts import PromptSet
from memagent_integrations.reader import Reader
from memagent_integrations.records import Layout

_NO_CHANGE, _PARALLEL, _REREAD = "no-change", "parallel", "reread"


class MemAgent(Baseline):
    """Reads section by section and answers from the memory.

    Options, by commas: a layout, "no-change", "parallel", "reread".

    Without a layout and "no-change" it has the prompts of the setup, which may be a policy's.
    """

    def configure(self, options: str) -> None:
        """Create the reader that the options describe.

        Raises:
            UsageError: an option is unknown, or the budgets do not fit the window.
        """
        selected = set(options.split(",")) - {""}
        layouts: list[Layout] = [layout for layout in get_args(Layout) if layout in selected]
        known = (*get_args(Layout), _NO_CHANGE, _PARALLEL, _REREAD)
        if len(layouts) > 1 or not selected <= set(known):
            raise UsageError(
                f"unknown reader {self.name!r}; memagent takes one layout, {_NO_CHANGE}, {_PARALLEL}, {_REREAD}, or "
                f"several of these ({', '.join(known)})"
            )
        prompts = self.setup.prompts
        if selected - {_PARALLEL, _REREAD}:
            no_change = _NO_CHANGE in selected
            prompts = PromptSet.default(layout=layouts[0] if layouts else "section-first", no_change=no_change)
        model = self.setup.model
        self._reader = Reader(
            model.backend,
            prompts=prompts,
            window=model.window,
            on_lost_section="skip",  # a lost section costs points, not the sample
            strategy="parallel" if _PARALLEL in selected else "sequential",
            reread=int(_REREAD in selected),
            **vars(self.setup.budgets),
        )
        try:
            self._reader.plan("?", "?")
        except ContextOverflow as error:  # report it once, not for every sample
            raise UsageError(str(error)) from error

    def find_answer(self, sample: Sample, model: Model) -> Answer:
        """Read the document and return the answer with the reading."""
        reading = self._reader.changed(backend=model.meter).read(sample.question, sample.document())
        return Answer(text=reading.answer or "", reading=reading)
