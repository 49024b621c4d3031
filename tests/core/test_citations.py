"""Citations: the places in the documents that the statements of a memory came from."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document as Page
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode

from memagent_integrations import Citation, Journal, MemAgentError, Reader, Reading, ScriptedBackend, UsageError
from memagent_integrations.journal.recording import step_from_json, step_to_json
from memagent_integrations.lineage import Lineage
from memagent_integrations.records import Budgets, Prompt, Reply, Source, Span, Step
from memagent_integrations.statements import statements

WIND = "The wind went over the hills all day, and nobody came to the house. "
NEEDLE = "One of the special magic numbers for gray-adjective is: 8231764."
OTHER = "One of the special magic numbers for loud-house is: 5550123."
QUESTION = "What is the special magic number for gray-adjective that the text mentions?"
CHUNK = 200


def document(*facts: str) -> str:
    """A section for each fact, as long as a chunk of `read`."""
    count, parts = ScriptedBackend([]).count, []
    for fact in facts:
        size = next(size for size in range(99) if count(f"{fact}\n\n{WIND * (size + 1)}") > CHUNK * 0.96)
        parts.append(f"{WIND * (size // 2)}\n\n{fact}\n\n{WIND * (size - size // 2)}")
    return "\n\n".join(parts)


def read(
    memories: list[str], text: Any, *, answer: str = "8231764", question: str = QUESTION, chunk_tokens: int = CHUNK
) -> Reading:
    """Read with a model that writes these memories, one for each chunk."""

    def reply(prompt: Prompt) -> str:
        return answer if prompt.phase == "answer" else memories[prompt.index]

    reader = Reader(ScriptedBackend(reply), chunk_tokens=chunk_tokens, memory_tokens=400)
    reading = reader.read(question, text)
    assert len(reading.steps) == len(memories) + 1, "a chunk for each memory"
    return reading


def quotes(reading: Reading, text: Any) -> list[str]:
    """The text of each citation."""
    return [citation.quote(text) for citation in reading.citations]


def test_a_statement_is_cited_with_the_sentence_that_it_came_from() -> None:
    text = document(NEEDLE)
    reading = read(["The magic number for gray-adjective is 8231764."], text, chunk_tokens=5000)
    [citation] = reading.citations
    assert citation.statement == "The magic number for gray-adjective is 8231764."
    assert (citation.document_id, citation.step, citation.page) == ("text-1", 0, None)
    assert citation.quote(text) == NEEDLE == text[citation.start : citation.end]


REWRITTEN = {
    "verbatim": NEEDLE,
    "in other words": "The text says that gray-adjective has the special number 8231764.",
    "as a key": "gray-adjective: 8231764",
    "the value alone": "8231764",
    "a list": f"- It was windy.\n- **{NEEDLE}**\n* Nobody came.",
    "a numbered list": f"1. It was windy.\n2. {NEEDLE}",
    "in capitals": NEEDLE.upper(),
    "in lower case, without signs": "one of the special magic numbers for gray adjective is 8231764",
    "merged with another": "The numbers are 8231764 for gray-adjective and 5550123 for loud-house.",
    "the number grouped": "The special magic number for gray-adjective is 8,231,764.",
    "in German": "Die besondere Zahl für gray-adjective lautet 8231764.",
}


@pytest.mark.parametrize("last", REWRITTEN.values(), ids=list(REWRITTEN))
def test_the_place_is_kept_through_rewriting(last: str) -> None:
    text = document("", OTHER, NEEDLE, "", "", "")
    both = f"{OTHER} {NEEDLE}"
    reading = read(["Nothing yet.", OTHER, both, both, last, last], text)
    assert reading.citations[0].quote(text) == NEEDLE


def test_the_place_is_kept_through_many_rewritings_one_after_the_other() -> None:
    forms = [form for form in REWRITTEN.values() if form != "8231764"]
    memories = [NEEDLE, *forms, *reversed(forms), *forms]
    reading = read(memories, text := document(NEEDLE, *[""] * (len(memories) - 1)))
    assert reading.citations[0].quote(text) == NEEDLE


def test_a_merged_statement_has_the_place_of_each_part_and_a_part_has_its_own_again() -> None:
    text = document(OTHER, NEEDLE, "", "")
    merged = "Magic numbers: 5550123 for loud-house, and 8231764 for gray-adjective."
    reading = read([OTHER, f"{OTHER} {NEEDLE}", merged, merged], text)
    assert quotes(reading, text) == [NEEDLE, OTHER]
    split = "gray-adjective: 8231764\nloud-house: 5550123"
    reading = read([OTHER, f"{OTHER} {NEEDLE}", merged, split], text)
    assert [(citation.statement, citation.quote(text)) for citation in reading.citations] == [
        ("gray-adjective: 8231764", NEEDLE),
        ("loud-house: 5550123", OTHER),
    ]


def test_several_facts_that_one_sentence_takes_from_one_section_have_their_places() -> None:
    text = document(OTHER, NEEDLE)
    reading = read(["The numbers are 8231764 and 5550123."], text, chunk_tokens=5000)
    assert sorted(quotes(reading, text)) == sorted([NEEDLE, OTHER])


def test_a_statement_that_grows_keeps_its_place_and_adds_the_newer() -> None:
    text = document("The rent of the flat is 1,200 a month.", "The rent is due on the 3rd, by bank transfer.")
    first, second = "Rent: 1,200 a month.", "Rent: 1,200 a month, due on the 3rd."
    reading = read([first, second], text, question="When is rent due?", answer="on the 3rd")
    assert quotes(reading, text) == [
        "The rent is due on the 3rd, by bank transfer.",
        "The rent of the flat is 1,200 a month.",
    ]


def test_a_value_that_a_later_section_changes_has_the_place_of_the_change() -> None:
    text = document("The balance of Anna is 500 coins.", "The balance of Anna is 700 coins.")
    old, new = "Balance of Anna: 500.", "Balance of Anna: 700."
    reading = read([old, new], text, question="What is the balance of Anna?", answer="700")
    assert reading.citations[0].quote(text) == "The balance of Anna is 700 coins."


def test_facts_of_one_kind_keep_their_own_places() -> None:
    facts = [f"One of the special magic numbers for key-{name} is: {number}." for name, number in VALUES.items()]
    memories = ["\n".join(facts[: number + 1]) for number in range(len(facts))]
    text = document(*facts)
    reading = read(memories, text, question="key-delta?", answer="4440004")
    places = {citation.statement: citation.quote(text) for citation in reading.citations}
    assert places == {fact: fact for fact in facts}
    assert "delta" in reading.citations[0].statement


VALUES = {"alpha": 1110001, "beta": 2220002, "gamma": 3330003, "delta": 4440004}


def test_statements_that_the_answer_rests_on_come_first_then_those_of_the_question() -> None:
    facts = ["Bob sold the boat in May.", "Anna hid the red key under the stone.", "The key is made of silver."]
    text = document(*facts)
    reading = read([" ".join(facts)], text, question="What is the key made of?", answer="silver", chunk_tokens=5000)
    assert quotes(reading, text) == [facts[2], facts[1], facts[0]]


def test_a_fact_in_two_sentences_is_one_passage() -> None:
    fact = "Anna went to Paris in May. She bought a silver key there."
    text = document(fact)
    reading = read(["In May, Anna bought a silver key in Paris."], text, chunk_tokens=5000)
    assert quotes(reading, text) == [fact]


def test_lines_that_are_broken_anywhere_are_one_sentence() -> None:
    text = f"{WIND}\nIn that year the old\nlighthouse of Skagen was sold\nto a merchant. {WIND}"
    reading = read(["The lighthouse of Skagen was sold to a merchant."], text, chunk_tokens=5000)
    assert quotes(reading, text) == ["In that year the old\nlighthouse of Skagen was sold\nto a merchant."]


SPACELESS = {
    "Chinese": (
        "山上刮了一整天的风,没有人来。小屋里很安静,只有一只猫在睡觉。",
        "安娜把银钥匙藏在石头下面。",
        ["银钥匙在石头下面,是安娜藏的。", "钥匙:石头下面(安娜)"],
    ),
    "Japanese": (
        "丘の上では一日中風が吹いていた。家には誰も来なかった。",
        "アンナは銀の鍵を石の下に隠した。",
        ["銀の鍵はアンナが石の下に隠した。", "鍵:石の下(アンナ)"],
    ),
    "Korean": (
        "하루 종일 언덕 위로 바람이 불었다. 집에는 아무도 오지 않았다. ",
        "안나는 은열쇠를 돌 밑에 숨겼다.",
        ["은열쇠는 안나가 돌 밑에 숨겼다.", "은열쇠: 안나, 돌 밑"],
    ),
    "Hindi": (
        "पहाड़ियों पर दिन भर हवा चलती रही। घर में कोई नहीं आया। ",
        "अन्ना ने चांदी की चाबी पत्थर के नीचे छिपाई।",
        ["चांदी की चाबी अन्ना ने पत्थर के नीचे छिपाई।", "चाबी: पत्थर के नीचे"],
    ),
}


@pytest.mark.parametrize(("filler", "fact", "memories"), SPACELESS.values(), ids=list(SPACELESS))
def test_other_scripts(filler: str, fact: str, memories: list[str]) -> None:
    parts = [f"{filler * 4}{fact}\n{filler * 4}", filler * 8]
    script = ScriptedBackend(lambda prompt: fact if prompt.phase == "answer" else memories[min(prompt.index, 1)])
    reader = Reader(script, memory_tokens=400)
    text = "\n\n".join(parts)
    count = max(map(reader.count, parts))
    reading = reader.changed(chunk_tokens=count + 2).read(fact, text)
    assert len(reading.steps) >= 3
    assert reading.citations[0].quote(text) == fact


def test_a_statement_that_no_text_says_has_no_place() -> None:
    reading = read(["The answer was not found. Zebras juggle quinces."], document(NEEDLE))
    assert reading.citations == ()


def test_what_was_in_the_memory_before_the_reading_has_no_place() -> None:
    reader = Reader(ScriptedBackend(["Anna owns the key. gray-adjective: 8231764"] * 2), chunk_tokens=400)
    text = f"{WIND * 3}{NEEDLE} Anna slept, and the key was lost."
    reading = reader.memorize(QUESTION, text, memory="The key belongs to Anna: Anna owns it.")
    assert [citation.statement for citation in reading.citations] == ["gray-adjective: 8231764"]


def test_a_reading_without_a_change_has_no_citations() -> None:
    prompts = Reader(ScriptedBackend([])).prompts.default(no_change=True)
    backend = ScriptedBackend(lambda prompt: "NO CHANGE" if prompt.phase == "memory" else "none")
    reading = Reader(backend, chunk_tokens=400, prompts=prompts).read(QUESTION, document(NEEDLE))
    assert [step.passages for step in reading.steps[:-1]] == [()] * (len(reading.steps) - 1)
    assert reading.citations == ()


# where the place is


@pytest.mark.parametrize("overlap", [0, 100])
@pytest.mark.parametrize("chunk_tokens", [50, 90, 200, 5000])
def test_the_place_is_right_for_any_size_of_chunk(chunk_tokens: int, overlap: int) -> None:
    text = document(OTHER, NEEDLE)
    backend = ScriptedBackend(lambda prompt: NEEDLE if prompt.phase == "answer" or _shows(prompt, NEEDLE) else "None.")
    settings = {"chunk_tokens": chunk_tokens, "overlap_tokens": min(overlap, chunk_tokens // 2)}
    reading = Reader(backend, memory_tokens=100, **settings).read(QUESTION, text)
    assert reading.citations[0].quote(text) == NEEDLE


def _shows(prompt: Prompt, fact: str) -> bool:
    return fact in prompt.messages[-1].content


@pytest.mark.parametrize("empty", [0, 3])
def test_of_several_documents_in_a_chunk_the_right_one_is_cited(empty: int) -> None:
    texts = [WIND, "", f"{WIND}{OTHER}", *[""] * empty, f"{NEEDLE} {WIND}", WIND]
    pages = [Page(page_content=text, metadata={"source": f"{n}.txt"}) for n, text in enumerate(texts)]
    for chunk_tokens in (5000, 75):
        citation = _noting(pages, chunk_tokens).citations[0]
        assert citation.document_id == f"{3 + empty}.txt"
        assert citation.quote(pages) == NEEDLE


def _noting(text: Any, chunk_tokens: int) -> Reading:
    """Read with a model that notes the needle."""
    backend = ScriptedBackend(
        lambda prompt: NEEDLE if prompt.phase == "answer" or _shows(prompt, NEEDLE) else "Nothing yet."
    )
    return Reader(backend, chunk_tokens=chunk_tokens, memory_tokens=100).read(QUESTION, text)


@pytest.mark.parametrize(
    ("metadata", "page"),
    [({"page": 3, "page_label": "iv"}, "iv"), ({"page": 0}, "0"), ({"page_label": "7"}, "7"), ({"page": ""}, None)],
)
def test_the_page_is_the_one_that_the_metadata_name(metadata: dict[str, Any], page: str | None) -> None:
    pages = [Page(page_content=WIND, metadata={"source": "a.pdf", "page": 99})]
    pages.append(Page(page_content=NEEDLE, metadata={"source": "a.pdf", **metadata}))
    assert _noting(pages, 5000).citations[0].page == page
    nodes = [TextNode(text=each.page_content, metadata=each.metadata) for each in pages]
    assert _noting(nodes, 5000).citations[0].page == page


def test_nodes_are_cited_by_their_document_and_their_place_in_it() -> None:
    whole = f"{WIND * 4}{NEEDLE} {WIND * 4}"
    starts = [0, 100, 200, 300, 400]
    parent = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="doc")}
    nodes = [
        TextNode(text=whole[at : at + 160], start_char_idx=at, end_char_idx=at + 160, relationships=parent)
        for at in starts
    ]
    citation = _noting(nodes, 5000).citations[0]
    assert (citation.document_id, whole[citation.start : citation.end]) == ("doc", citation.quote(nodes))
    assert "8231764" in citation.quote(nodes)


# the text on request


def documents(tmp_path: Path) -> dict[str, Any]:
    """The same text in all kinds of documents."""
    text = document(NEEDLE)
    file = tmp_path / "a.txt"
    file.write_text(text, encoding="utf-8")

    class Loader:
        def lazy_load(self) -> Iterator[Page]:
            yield Page(page_content=text, metadata={"source": "a"})

    return {
        "str": text,
        "file": file,
        "lines": text.splitlines(keepends=True),
        "page": Page(page_content=text),
        "node": TextNode(text=text),
        "loader": Loader(),
        "several": [file, Page(page_content=text), text],
    }


@pytest.mark.parametrize("kind", ["str", "file", "lines", "page", "node", "loader", "several"])
def test_a_quote_is_the_text_of_the_place(kind: str, tmp_path: Path) -> None:
    source = documents(tmp_path)[kind]
    assert _noting(source, 5000).citations[0].quote(source) == NEEDLE


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("too short", "text-1 ends before character"),
        ([Page(page_content=NEEDLE * 9, metadata={"source": "other"})], "text-1 is not in it .*pass the Path"),
        (iter(["text"]), "use up this iterator"),
        (None, "NoneType is not a document"),
    ],
)
def test_a_quote_from_another_document_is_an_error(source: Any, message: str) -> None:
    citation = _noting(document(NEEDLE), 5000).citations[0]
    with pytest.raises(UsageError, match=message):
        citation.quote(source)


def test_of_documents_cut_from_one_without_their_places_the_right_one_is_quoted() -> None:
    pages = [Page(page_content=text, metadata={"source": "a"}) for text in (WIND * 9, f"{NEEDLE} {WIND}", OTHER * 9)]
    reading = _noting(pages, 5000)
    assert reading.citations[0].quote(pages) == NEEDLE


# readings that come from elsewhere


def test_citations_follow_from_the_json_of_a_reading() -> None:
    reading = read(["Nothing yet.", NEEDLE], document("", NEEDLE))
    assert Reading.from_json(reading.to_json()).citations == reading.citations != ()
    assert Reading.from_json(reading.to_json()) == reading
    assert json.loads(reading.to_json())["citations"] == [vars(citation) for citation in reading.citations]


def test_citations_follow_from_a_journal(tmp_path: Path) -> None:
    text = document(OTHER, NEEDLE)
    backend = ScriptedBackend(lambda prompt: NEEDLE if prompt.phase == "answer" or _shows(prompt, NEEDLE) else "Hm.")
    with Journal(tmp_path / "runs.db") as journal:
        reading = Reader(backend, chunk_tokens=200, journal=journal).read(QUESTION, text, run="mine")
        assert journal.reading("mine").citations == reading.citations != ()
        again = Reader(ScriptedBackend([]), chunk_tokens=200, journal=journal).read(QUESTION, text, run="mine")
    assert again.citations == reading.citations


def test_a_record_of_an_older_version_gives_the_chunk() -> None:
    memories = ["Nothing yet.", "The number for gray-adjective is 8231764.", "gray-adjective: 8231764"]
    reading = read(memories, document("", NEEDLE, ""))
    steps = []
    for step in reading.steps:
        saved = json.loads(step_to_json(step))
        del saved["passages"]
        for source in saved["span"]["sources"] if saved["span"] else ():
            del source["page"], source["offset"]
        steps.append(step_from_json(json.dumps(saved)))
    [citation] = replace(reading, steps=tuple(steps)).citations
    span = reading.steps[1].span
    assert span
    assert (citation.start, citation.end, citation.step) == (span.start, span.end, 1)


def test_what_a_person_wrote_has_no_place_and_the_rest_keeps_its_own(tmp_path: Path) -> None:
    text = document(OTHER, NEEDLE, "")
    both = f"{OTHER} {NEEDLE}"
    model: Callable[[Prompt], str] = lambda prompt: (  # noqa: E731
        "8231764" if prompt.phase == "answer" else both if both in str(prompt) or _shows(prompt, NEEDLE) else OTHER
    )
    with Journal(tmp_path / "runs.db") as journal:
        reader = Reader(ScriptedBackend(model), chunk_tokens=400, journal=journal)
        reading = reader.read(QUESTION, text, run="mine")
        step = next(step.index for step in reading.steps if NEEDLE in step.memory)
        branch = journal.edit("mine", step, memory=f"{NEEDLE} The hills are blue, and the wind is 77 knots.")
        edited = reader.read(QUESTION, text, run=branch)
        recalled = journal.reading(branch)
    assert {citation.statement for citation in recalled.citations} >= {NEEDLE}
    assert not any("77 knots" in citation.statement for citation in recalled.citations)
    assert recalled.citations == edited.citations


def test_a_failed_reading_cites_what_it_has() -> None:
    text = document(NEEDLE)
    reader = Reader(ScriptedBackend([NEEDLE, ""]), chunk_tokens=5000)
    with pytest.raises(MemAgentError) as caught:
        reader.read(QUESTION, text)
    assert caught.value.reading is not None
    assert quotes(caught.value.reading, text) == [NEEDLE]


# what it takes

WORDS = st.lists(
    st.sampled_from(
        ["Anna", "key", "8231764", "1,200", "3rd", "钥匙", "ー", "\u0301", ".", "。", "- ", "1. ", "\n", " "]
    )
).map("".join)


@pytest.mark.fuzz
@given(memories=st.lists(WORDS, max_size=4), sections=st.lists(WORDS, min_size=4, max_size=4), person=st.booleans())
def test_any_text_has_a_lineage(memories: list[str], sections: list[str], person: bool) -> None:
    lineage, before, steps = Lineage(), "", []
    for number, (memory, section) in enumerate(zip(memories, sections, strict=False)):
        passages = lineage.find(memory, section)
        assert all(section[each.start : each.end].strip() for each in passages)
        assert len(set(passages)) == len(passages)
        reply = Reply(text=memory, edited=memory if person else None)
        step = replace(made_step(memory, before, section), index=number, passages=passages, reply=reply)
        lineage.follow(step)
        steps.append(step)
        before = memory
    assert Lineage.of(steps).statements == lineage.statements
    assert list(lineage.statements) == list(dict.fromkeys(each.text for each in statements(before)))


HOSTILE = {
    "a memory that repeats itself": ("The grass is green. " * 2000, "The grass is green. " * 1000),
    "lines that share their words": (
        "".join(f"The grass {n} is green and blue. " for n in range(2000)),
        "".join(f"The grass {n} is green and red. " for n in range(2000)),
    ),
    "one giant sentence": ("word " * 4000 + "8231764 ", "word " * 4000),
    "a giant word": ("x" * 40_000, "y" * 40_000 + "x" * 40_000),
    "digits and commas": ("1," * 20_000 + "a", "1," * 20_000 + "b"),
    "dots": ("." * 40_000, ". " * 20_000),
    "line ends": ("\n" * 40_000 + "a", "\r\n \n" * 20_000),
    "bullets": ("- " * 20_000 + "x", "1. " * 20_000 + "x"),
    "quotes": ("." + '"' * 40_000, "!" + ")" * 40_000),
    "Chinese without an end": ("钥匙在石头下面" * 3000, "石头下面有钥匙" * 3000),
    "abbreviations behind much space": (" " * 100_000 + "A. " * 4000, " " * 100_000 + "A. " * 4000),
    "numbers behind much space": (" " * 100_000 + "1. " * 4000, " " * 100_000 + "1. 2. 3. " * 2000),
    "accents": ("a" + "\u0301" * 40_000, "\u0301a" * 20_000),
}


@pytest.mark.parametrize(("memory", "section"), HOSTILE.values(), ids=list(HOSTILE))
def test_hostile_text_takes_no_long_time(memory: str, section: str) -> None:
    for before in ("", memory[: len(memory) // 2], memory[::-1]):
        lineage = Lineage(before)
        begun = time.process_time()
        passages = lineage.find(memory, section)
        lineage.follow(made_step(memory, before, section))
        assert time.process_time() - begun < 3, "seconds, hundreds of times what it takes"
        assert all(0 <= passage.start < passage.end <= len(section) for passage in passages)


def made_step(memory: str, before: str, section: str) -> Step:
    """A step that made this memory."""
    span = Span(index=0, start=0, end=len(section), tokens=1)
    return Step(
        index=0,
        phase="memory",
        span=span,
        memory_before=before,
        memory=memory,
        reply=Reply(text=memory),
        outcome="updated",
        cut=False,
    )


def test_the_citations_of_a_long_reading_take_no_long_time() -> None:
    lines = [f"Fact {n} of the log: the value of item {n * 7} is {n * 7919}." for n in range(2000)]
    memories = ["\n".join(lines[max(n - 40, 0) : n + 1]) for n in range(2000)]
    steps = [
        replace(
            made_step(memories[n], memories[n - 1] if n else "", lines[n]),
            index=n,
            span=Span(index=n, start=n, end=n + 1, tokens=1, sources=(Source(document_id="log", start=n, end=n + 1),)),
        )
        for n in range(2000)
    ]
    reading = Reading(question="q", answer="a", memory=memories[-1], steps=tuple(steps), model="m", budgets=Budgets())
    begun = time.process_time()
    assert {(citation.statement, citation.step) for citation in reading.citations} >= {(lines[n], n) for n in [1999]}
    assert time.process_time() - begun < 10


def test_a_citation_is_a_record_without_text_of_the_document() -> None:
    [citation] = _noting(document(NEEDLE), 5000).citations
    assert citation == Citation(**json.loads(json.dumps(vars(citation))))
    assert citation.statement == NEEDLE, "what the model wrote"
    with pytest.raises(AttributeError):
        citation.start = 0  # type: ignore[misc]
