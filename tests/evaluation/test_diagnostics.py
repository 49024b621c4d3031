from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from memagent_integrations import BackendError, Budgets, Reader, Reading, ScriptedBackend, UsageError
from memagent_integrations.evaluation.diagnostics import FactTrace, Survival, cause, survival, traces
from memagent_integrations.evaluation.samples import Fact, Sample
from memagent_integrations.records import Prompt, Reply, Span, Step

RED = Fact(text="The red key is 7391.", depth=0.2, keys=("7391",))
BLUE = Fact(text="The blue key is 2044.", depth=0.9, keys=("2044",))


def sample(document: Sequence[str], *facts: Fact) -> Sample:
    return Sample(
        id="s1", question="Which keys?", answers=("7391", "2044"), document=lambda: iter(document), facts=facts
    )


def reading(
    spans: Sequence[tuple[int, int]], memories: Sequence[str], answer: str | None = "an answer", *, first: int = 0
) -> Reading:
    """A reading with a step for each span, whose memories are these."""
    before = ["", *memories]
    steps = [
        Step(
            index=first + n,
            phase="memory",
            span=Span(index=n, start=start, end=end, tokens=end - start),
            memory_before=before[n],
            memory=memory,
            reply=Reply(text=memory),
            outcome="updated",
            cut=False,
        )
        for n, ((start, end), memory) in enumerate(zip(spans, memories, strict=True))
    ]
    error = None if answer is not None else BackendError("gone")
    if answer is not None:
        last = memories[-1] if memories else ""
        reply, index = Reply(text=answer), first + len(steps)
        steps.append(
            Step(
                index=index,
                phase="answer",
                span=None,
                memory_before=last,
                memory=last,
                reply=reply,
                outcome="answered",
                cut=False,
            )
        )
    return Reading(
        question="Which keys?",
        answer=answer,
        memory=before[-1],
        steps=tuple(steps),
        model="m",
        budgets=Budgets(chunk_tokens=10),
        error=error,
    )


def five(*memories: str, answer: str | None = "7391") -> tuple[FactTrace, ...]:
    """The traces of RED, which the second of five chunks of 20 characters holds, where the memories are these."""
    return traces(
        reading([(n * 20, n * 20 + 20) for n in range(len(memories))], memories, answer),
        sample(["." * 20, RED.text, "." * 60], RED),
    )


def test_the_way_of_a_fact() -> None:
    (trace,) = five("-", "7391", "key 7391", "-", "-")
    assert (trace.start, trace.read_at, trace.noted_at, trace.lost_at, trace.kept) == (20, 1, 1, 3, 2)
    assert trace.held == (True, True, False, False)
    assert (trace.in_memory, trace.answered) == (False, True)
    (trace,) = five("-", "-", "7391", "-", "7391", answer="none")  # noted late, lost, found again
    assert (trace.read_at, trace.noted_at, trace.lost_at, trace.kept) == (1, 2, None, None)
    assert (trace.in_memory, trace.answered) == (True, False)
    (trace,) = five("-", "-", "7391", "-", "-")
    assert (trace.noted_at, trace.lost_at, trace.kept) == (2, 3, 2)
    (trace,) = five("7391", "-", "-", "-", "-")  # guessed before it was read
    assert (trace.read_at, trace.noted_at, trace.lost_at, trace.kept) == (1, None, None, None)
    (trace,) = five("-")
    assert (trace.read_at, trace.noted_at, trace.lost_at, trace.in_memory, trace.held) == (None, None, None, False, ())


def test_keys_are_whole_words_in_any_case_and_space() -> None:
    fact = Fact(text="Ann Lee went to Köln.", depth=0.0, keys=("ann lee", "köln"))
    for memory, held in [
        ("ANN  LEE: Köln", True),
        ("Ann\nLee (KÖLN)", True),
        ("JoAnn Lee, Köln", False),
        ("Ann Lees, Köln", False),
        ("Ann Lee", False),
    ]:
        (trace,) = traces(reading([(0, 30)], [memory]), sample([fact.text], fact))
        assert trace.held == (held,), memory
    with_key, without = Fact(text="in 2044", depth=0, keys=("2044",)), Fact(text="in 2044", depth=0)
    assert traces(reading([(0, 9)], ["在 2044年 bought"]), sample(["in 2044"], with_key))[0].in_memory
    assert traces(reading([(0, 9)], ["in  2044."]), sample(["in 2044"], without))[0].in_memory  # its text is the key


@pytest.mark.parametrize("size", [1, 2, 7, 19, 20, 21, 50, 10_000])
def test_a_fact_is_found_in_any_pieces_at_its_depth(size: int) -> None:
    text = f"{'x' * 97}{RED.text}{'y' * 300}{BLUE.text}{'z' * 100}{RED.text}z"
    pieces = [text[n : n + size] for n in range(0, len(text), size)]
    first, second, third = RED, BLUE, Fact(text=RED.text, depth=0.99)
    found = traces(reading([], []), sample(pieces, first, second, third))
    assert [trace.start for trace in found] == [text.find(RED.text), text.find(BLUE.text), text.rfind(RED.text)]


def test_the_step_that_read_a_fact() -> None:
    def read_at(*spans: tuple[int, int]) -> int | None:
        at_40_to_60 = sample(["." * 40, RED.text, "." * 40], RED)
        (trace,) = traces(reading(spans, ["-"] * len(spans), first=5), at_40_to_60)
        return trace.read_at

    assert read_at((0, 40), (40, 60), (60, 100)) == 6
    assert read_at((0, 50), (50, 100)) == 6  # cut in two, it is read when its end is
    assert read_at((0, 60), (50, 100)) == 5  # the chunk that overlaps holds it again
    assert read_at((0, 40), (60, 100)) is None  # left out of the middle
    assert read_at((0, 40)) is None


def test_a_fact_has_to_stand_in_the_document() -> None:
    with pytest.raises(UsageError, match="sample s1 does not hold the fact 'The red key"):
        traces(reading([(0, 5)], ["m"]), sample(["other"], RED))
    assert traces(reading([(0, 5)], ["m"]), sample(["other"])) == ()


def test_the_survival_of_facts_by_distance() -> None:
    one = five("-", "7391", "7391", "-", "-")
    two = five("-", "-", "7391", "7391", "7391")
    unread = five("-")
    assert survival([one, two, unread]) == (
        Survival(distance=0, n=2, share=0.5),
        Survival(distance=1, n=2, share=1.0),  # one was noted late
        Survival(distance=2, n=2, share=0.5),
        Survival(distance=3, n=2, share=0.5),
    )
    late = traces(reading([(0, 20), (20, 100)], ["-", "7391"]), sample(["." * 40, RED.text, "." * 40], RED))
    assert [(point.n, point.share) for point in survival([one, late])] == [(2, 1.0), (1, 1.0), (1, 0.0), (1, 0.0)]
    assert survival([]) == survival([(), unread]) == ()


@pytest.mark.parametrize(
    ("memories", "answer", "why"),
    [
        (["-", "7391", "7391", "-", "-"], "none", "lost after 2 chunks"),
        (["-", "7391", "-", "-", "-"], "none", "lost after 1 chunk"),
        (["-", "-", "-", "-", "-"], "none", "never noted"),
        (["-", "7391", "7391", "7391", "7391"], "none", "in memory, not in the answer"),
        (["-", "7391", "7391", "7391", "7391"], "it is 7391 or 8", "in the answer, not as asked"),
        (["-"], "none", "not read"),
        (["-", "7391"], None, "failed"),
    ],
)
def test_why_an_answer_is_wrong(memories: list[str], answer: str | None, why: str) -> None:
    spans = [(n * 20, n * 20 + 20) for n in range(len(memories))]
    read = reading(spans, memories, answer)
    assert cause(read, traces(read, sample(["." * 20, RED.text, "." * 60], RED))) == why


def test_of_several_facts_the_first_link_that_broke_is_named() -> None:
    document = [RED.text, BLUE.text, "." * 59]
    spans = [(0, 20), (20, 41), (41, 60), (60, 100)]

    def why(*memories: str) -> str | None:
        read = reading(spans[: len(memories)], memories)
        return cause(read, traces(read, sample(document, RED, BLUE)))

    assert why("7391", "7391 2044", "2044", "-") == "lost after 2 chunks"  # both went after two
    assert why("7391", "2044", "2044", "2044") == "lost after 1 chunk"
    assert why("-", "2044", "-", "-") == "never noted"
    assert why("7391") == "not read"
    assert cause(reading([(0, 20)], ["m"]), ()) is None


def test_with_a_reader_that_reads() -> None:
    """Spans are characters of the text as the reader joins it, so a fact is found in the chunk that it was read in."""
    filler = "Some words that say nothing at all. "
    parts = [filler * 30, RED.text, " ", filler * 50, BLUE.text, " ", filler * 9]

    def document() -> Iterator[str]:
        return iter(parts)

    asked = Sample(id="s", question="Which keys?", answers=("7391", "2044"), document=document, facts=(RED, BLUE))

    def script(prompt: Prompt) -> str:
        text = prompt.messages[0].content
        section = text.partition("<section>")[2].partition("</section>")[0]
        if not section:
            return "2044"
        if "7391" in section:
            return "the red one: 7391"
        if "2044" in section:
            return "blue: 2044"
        return text.partition("<memory>\n")[2].partition("\n<")[0]

    read = Reader(ScriptedBackend(script), chunk_tokens=60, memory_tokens=50).read(asked.question, asked.document())
    red, blue = traces(read, asked)
    whole = "".join(parts)
    for trace in (red, blue):
        step = read.steps[trace.read_at]
        assert trace.fact.text in whole[step.span.start : step.span.end]
        assert trace.noted_at == trace.read_at
    assert red.lost_at == blue.read_at
    assert (blue.in_memory, blue.answered, red.answered) == (True, True, False)
    assert cause(read, (red, blue)) == f"lost after {red.kept} chunks"


def test_a_long_document_is_searched_piece_by_piece() -> None:
    made = 0

    def document() -> Iterator[str]:
        nonlocal made
        for n in range(2000):
            made += 1
            yield f"Line {n} of nothing much. " * 100
            if n == 1000:
                yield RED.text

    facts = (Fact(text=RED.text, depth=0.5),) * 8
    asked = Sample(id="s", question="q", answers=("7391",), document=document, facts=facts)
    found = traces(reading([], []), asked)
    assert made == 2000  # once, for all facts
    assert len({trace.start for trace in found}) == 1
