"""The answer of a response as a stream, whose call is made where it is consumed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import aclosing, closing, contextmanager

from llama_index.core.instrumentation.span import active_span_id

from memagent_integrations.llama_index.record import ResponseRecord
from memagent_integrations.reader.unanswered import Unanswered
from memagent_integrations.records import Event


class AnswerTexts:
    """The texts of an answer, for a response; steps and the reading go to its record.

    Nothing runs before the first text is asked for, so it does not matter in which thread or event loop that is. The
    spans of the call are children of the span in which the response was made.
    """

    def __init__(self, unanswered: Unanswered, record: ResponseRecord) -> None:
        self._unanswered, self._record = unanswered, record
        self._span = active_span_id.get()

    def texts(self) -> Generator[str, None, None]:
        """Yield the texts."""
        with closing(self._unanswered.stream()) as events:
            while True:
                with self._in_span():
                    event = next(events, None)
                if event is None:
                    return
                yield from self._taken(event)

    async def atexts(self) -> AsyncGenerator[str, None]:
        """`texts`, async."""
        async with aclosing(self._unanswered.astream()) as events:
            while True:
                with self._in_span():
                    event = await anext(events, None)
                if event is None:
                    return
                for text in self._taken(event):
                    yield text

    def _taken(self, event: Event) -> Iterator[str]:
        """Yield the event if it is text, else give it to the record."""
        if isinstance(event, str):
            yield event
        else:
            self._record.take(event)

    @contextmanager
    def _in_span(self) -> Iterator[None]:
        token = active_span_id.set(self._span)
        try:
            yield
        finally:
            active_span_id.reset(token)
