"""The parts that LangChain's default splitter makes of a document, in tokens of the evaluated model."""

from __future__ import annotations

from langchain_text_splitters import RecursiveCharacterTextSplitter

from memagent_integrations.errors import EmptyDocument
from memagent_integrations.evaluation.baselines.base import Model
from memagent_integrations.evaluation.samples import Sample

_OVERLAP = 200  # the splitter's default


def split(sample: Sample, size: int, model: Model) -> list[str]:
    """Return the document in overlapping parts of at most `size` tokens. It is held whole, as in common use.

    Raises:
        EmptyDocument: it has no text.
    """
    text = "".join(sample.document())
    if not text.strip():
        raise EmptyDocument
    splitter = RecursiveCharacterTextSplitter(
        chunk_size=size, chunk_overlap=min(_OVERLAP, size // 2), length_function=model.count
    )
    return splitter.split_text(text)
