"""Notes that each section of a text is in, or is told not to be in."""

from __future__ import annotations

from langchain_core.messages import AIMessage

from memagent_integrations.langchain.notes import NoteTaking, to_notes
from memagent_integrations.reader import Reader
from memagent_integrations.reader.folding import PassedOver, afold, fold
from memagent_integrations.reader.running import AsyncProgress, Progress


class Folding(NoteTaking):
    """`NoteTaking` for a text that is thrown away: what is not in the notes is afterwards in `passed_over`."""

    passed_over: tuple[PassedOver, ...] = ()  # not in the message, which traces show

    def memorize(self, reader: Reader, progress: Progress) -> AIMessage:
        """Return the notes."""
        folded = fold(reader, self._question, self._document, memory=self._memory, progress=progress)
        self.passed_over = folded.passed_over
        return to_notes(folded.reading)

    async def amemorize(self, reader: Reader, progress: AsyncProgress) -> AIMessage:
        """`memorize`, async."""
        folded = await afold(reader, self._question, self._document, memory=self._memory, progress=progress)
        self.passed_over = folded.passed_over
        return to_notes(folded.reading)
