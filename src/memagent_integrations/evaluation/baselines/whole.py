"""The whole document in the model's own window, without cutting, where it fits."""

from __future__ import annotations

from dataclasses import replace

from memagent_integrations.errors import ContextOverflow, EmptyDocument
from memagent_integrations.evaluation.baselines.base import Answer, Baseline, DocumentTooLong, Model
from memagent_integrations.evaluation.baselines.cut import beginning
from memagent_integrations.evaluation.baselines.prompts import plain
from memagent_integrations.evaluation.samples import Sample


class Whole(Baseline):
    """One call with the whole document, in the window that the backend has of itself, if it tells one."""

    def configure(self, options: str) -> None:
        """Take the backend's own window in place of the one that the readers are compared in."""
        super().configure(options)
        model = self.setup.model
        self.setup = replace(self.setup, model=replace(model, window=model.backend.window or model.window))

    def find_answer(self, sample: Sample, model: Model) -> Answer:
        """Return the answer; a document that does not fit is read only up to where that is certain.

        Raises:
            DocumentTooLong: it does not fit.
        """
        room = model.room(plain(sample.question, ""))
        try:
            text = beginning(iter(sample.document()), room, model.count)
            if model.count(text) > room:
                raise ContextOverflow(
                    f"the document has more than the {room} tokens that fit the window of {model.window}"
                )
            if not text.strip():
                raise EmptyDocument
            return Answer(text=model.ask(plain(sample.question, text)))
        except ContextOverflow as error:
            raise DocumentTooLong(str(error)) from error
