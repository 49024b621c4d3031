"""The places that an answer rests on, as lines for standard output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from memagent_integrations.citations import Citation
from memagent_integrations.cli.streams import one_line
from memagent_integrations.errors import MemAgentError
from memagent_integrations.records import Reading


def cited(reading: Reading, files: Sequence[str]) -> Iterator[str]:
    """Yield a line for each place that a reading of these files cites, and one with what stands there."""
    places: dict[tuple[str, int, int], Citation] = {}
    for citation in reading.citations:
        places.setdefault((citation.document_id, citation.start, citation.end), citation)
    known = {str(Path(file)) for file in files}
    for number, citation in enumerate(places.values(), start=1):
        page = f", page {citation.page}" if citation.page else ""
        yield one_line(f"[{number}] {citation.document_id}{page}, characters {citation.start:,}-{citation.end:,}")
        yield f"    {one_line(_text(citation, known))}"


def _text(citation: Citation, files: set[str]) -> str:
    """Return what stands at a place; what the model noted of it, if the document cannot be read again."""
    try:
        return citation.quote(Path(citation.document_id)) if citation.document_id in files else citation.statement
    except MemAgentError:  # the file has changed meanwhile, or it was a pipe
        return citation.statement
