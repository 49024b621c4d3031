"""Readings made up for tests of what shows them."""

from __future__ import annotations

from langchain_core.documents import Document

from memagent_integrations import Reader, Reading, ScriptedBackend
from memagent_integrations.records import Budgets, Outcome, Plan, Reply, Source, Span, Step

MEMORIES = [
    "Anna has the key.",
    "Anna has the key. The gate is shut.",
    "Anna has no key! The gate is shut.",
    "Anna has no key! The gate is shut. It rains",
]
MARKUP = "</script><script>alert(1)</script><img src=x onerror=alert(2)> <!-- {{ 7 * 7 }} \u2028 </style>"
LONG_MEMORY = "".join(f"- line {number} of the memory\n" for number in range(80))
PLAN = Plan(chunks=4, calls=5, document_tokens=4000, prompt_tokens=9000, completion_tokens=900)


def make_reading(
    memories: list[str] = MEMORIES, document: str = "A few words of a document. ", question: str = "Who has the key?"
) -> Reading:
    """A reading whose memory after each chunk is the next of these."""
    backend = ScriptedBackend(
        lambda prompt: memories[min(prompt.index, len(memories) - 1)] if prompt.phase == "memory" else "Anna."
    )
    return Reader(backend, chunk_tokens=60, memory_tokens=200).read(question, document * 8 * len(memories))


def make_cited_reading() -> Reading:
    """A reading of two pages of a file, whose final memory has a statement from each and one from neither."""
    texts = ["The key of the gate is hidden under the red stone.", "Anna went to the gate on the 3rd of May, at night."]
    pages = [
        Document(text + " It rained, and the road was empty." * 6, metadata={"source": "tale.pdf", "page_label": label})
        for text, label in zip(texts, ("iv", "5"), strict=True)
    ]
    memories = ["Key: under the red stone.", "- Anna: 3rd of May\n- Key under the red stone\n- Zebras sing."]
    backend = ScriptedBackend([*memories, "under the red stone"])
    return Reader(backend, chunk_tokens=71, memory_tokens=200).read("Where is the key?", pages)


def make_long_reading() -> Reading:
    """A reading of 2,000 steps."""
    facts = [f"fact {n} of the long document is noted here. " for n in range(2000)]
    memories = ["".join(facts[max(n - 40, 0) : n + 1]) for n in range(2000)]
    steps = [
        Step(
            index=n,
            phase="memory",
            span=Span(index=n, start=n, end=n + 1, tokens=1, sources=(Source(document_id="log", start=n, end=n + 1),)),
            memory_before=memories[n - 1] if n else "",
            memory=memories[n],
            reply=Reply(text=memories[n]),
            outcome="updated",
            cut=False,
        )
        for n in range(2000)
    ]
    return Reading(question="q", answer="a", memory=memories[-1], steps=tuple(steps), model="m", budgets=Budgets())


def make_step(
    memory: str,
    before: str = "",
    *,
    index: int = 0,
    outcome: Outcome = "updated",
    cut: bool = False,
    names: tuple[str, ...] = ("a.txt",),
) -> Step:
    """A step that took a second for 1,000 tokens of the documents of these names."""
    sources = tuple(Source(document_id=name, start=1000, end=2500) for name in names)
    return Step(
        index=index,
        phase="memory",
        span=Span(index=index, start=index * 1500, end=(index + 1) * 1500, tokens=1000, sources=sources),
        memory_before=before,
        memory=memory,
        reply=Reply(text=memory, seconds=1),
        outcome=outcome,
        cut=cut,
    )
