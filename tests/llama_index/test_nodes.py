"""How nodes are read: order, metadata, overlap, images, readers in all forms; and the source nodes of a response."""

from __future__ import annotations

import base64
import json
import random
import re
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_llm import ANSWER, SIZES, FixedRetriever, fake, pieces_of, scripted, text_read
from llama_index.core import MockEmbedding, SimpleDirectoryReader, StorageContext, VectorStoreIndex
from llama_index.core.evaluation import CorrectnessEvaluator, FaithfulnessEvaluator, RelevancyEvaluator
from llama_index.core.node_parser import HierarchicalNodeParser, SentenceSplitter, get_leaf_nodes
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine
from llama_index.core.readers.base import BaseReader
from llama_index.core.retrievers import AutoMergingRetriever
from llama_index.core.schema import (
    BaseNode,
    Document,
    ImageDocument,
    ImageNode,
    IndexNode,
    MediaResource,
    MetadataMode,
    Node,
    NodeRelationship,
    NodeWithScore,
    QueryBundle,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.storage.docstore import SimpleDocumentStore

from memagent_integrations import MemAgentQueryEngine, MemAgentSynthesizer, ScriptedBackend, UsageError
from memagent_integrations.llama_index import MemAgentWorkflow
from memagent_integrations.records import Prompt

TEXT = "".join(f"Sentence {number} of the book says {number * 37 % 101}. " for number in range(400))
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def documents() -> list[Document]:
    return [
        Document(text="The first log. ", id_="first", metadata={"file": "a.txt"}),
        Document(text="The second log. ", id_="second", metadata={"file": "b.txt"}),
    ]


def scored(nodes: list[Any], *, shuffled: bool = True) -> list[NodeWithScore]:
    """Return the nodes with scores, in the order of the scores."""
    found = [NodeWithScore(node=node, score=1 - number / 10_000) for number, node in enumerate(nodes)]
    if shuffled:
        random.Random(7).shuffle(found)
    return found


def plain(backend: ScriptedBackend, **settings: Any) -> MemAgentSynthesizer:
    return MemAgentSynthesizer(backend, **{"metadata_mode": "none", **SIZES, **settings})


def part(text: str, start: int | None, document: str = "book", **fields: Any) -> TextNode:
    """Return the node of a text that stands at character `start` of a document."""
    end = None if start is None else start + len(text)
    relationships: Any = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=document)}
    return TextNode(
        text=text, **{"start_char_idx": start, "end_char_idx": end, "relationships": relationships, **fields}
    )


def sentences(backend: ScriptedBackend) -> list[int]:
    """Return the numbers of the sentences that the backend was shown."""
    return [int(number) for number in re.findall(r"Sentence (\d+) of", text_read(backend))]


def memagent(response: Any) -> dict[str, Any]:
    details: dict[str, Any] = response.metadata["memagent"]
    return details


@pytest.fixture(scope="module")
def tree() -> list[BaseNode]:
    """Return the nodes of all levels: offsets count from the parent's text."""
    parser = HierarchicalNodeParser.from_defaults(chunk_sizes=[512, 256, 64])
    return parser.get_nodes_from_documents([Document(text=TEXT, id_="book")])


def docstore(nodes: list[BaseNode]) -> SimpleDocumentStore:
    store = SimpleDocumentStore()
    store.add_documents(nodes)
    return store


# Order


def test_leaves_of_a_hierarchy_are_read_in_the_order_of_the_document(tree: list[BaseNode]) -> None:
    backend = scripted()
    response = plain(backend, docstore=docstore(tree)).synthesize("q", scored(get_leaf_nodes(tree)))
    assert [source.node for source in response.source_nodes] == get_leaf_nodes(tree)
    assert text_read(backend).split() == TEXT.split()


def test_a_hierarchy_with_all_its_levels_is_read_once_and_in_order(tree: list[BaseNode]) -> None:
    for given in (tree, scored(list(tree))):
        backend = scripted()
        response = plain(backend).synthesize("q", given)
        assert text_read(backend).split() == TEXT.split()
        assert len(response.source_nodes) == len(tree)


class Merging(AutoMergingRetriever):
    """Retrieves these leaves, and merges them into their parents as it does those of a vector store."""

    def __init__(self, leaves: list[NodeWithScore], tree: list[BaseNode]) -> None:
        storage = StorageContext.from_defaults(docstore=docstore(tree))
        super().__init__(FixedRetriever(leaves), storage)  # type: ignore[arg-type]


def test_what_an_auto_merging_retriever_returns_is_read_in_the_order_of_the_document(tree: list[BaseNode]) -> None:
    leaves = get_leaf_nodes(tree)
    found = scored([*leaves[3:9], leaves[20], *leaves[30:38], leaves[-1]])
    retriever = Merging(found, tree)
    assert any(source.node not in leaves for source in retriever.retrieve("q")), "some were merged"
    own, other = scripted(), scripted()
    MemAgentQueryEngine.from_retriever(retriever, own, **SIZES).query("q")
    synthesizer = MemAgentSynthesizer(other, docstore=docstore(tree), **SIZES)
    RetrieverQueryEngine.from_args(retriever, response_synthesizer=synthesizer, llm=fake()).query("q")
    for backend in (own, other):
        numbers = sentences(backend)
        assert numbers == sorted(numbers)
        assert len(numbers) == len(set(numbers))


def test_leaves_whose_parents_are_unknown_stay_together_in_the_order_given(
    tree: list[BaseNode], caplog: pytest.LogCaptureFixture
) -> None:
    backend = scripted()
    plain(backend).synthesize("q", scored(get_leaf_nodes(tree), shuffled=False))
    numbers = sentences(backend)
    assert numbers == sorted(numbers)
    assert "docstore" in caplog.text


def test_nodes_of_nodes_without_a_hierarchy_stay_in_the_order_given() -> None:
    """Offsets that count from a text that is no node here contradict one another."""
    halves = SentenceSplitter(chunk_size=512, chunk_overlap=0).get_nodes_from_documents(
        [Document(text=TEXT, id_="book")]
    )
    nodes = SentenceSplitter(chunk_size=64, chunk_overlap=0).get_nodes_from_documents(halves)
    assert {node.ref_doc_id for node in nodes} == {"book"}
    backend = scripted()
    plain(backend).synthesize("q", scored(nodes, shuffled=False))
    assert text_read(backend).split() == TEXT.split()


@pytest.mark.parametrize("order", ["document", "given"])
async def test_the_order_that_is_given_can_be_kept(order: Any) -> None:
    nodes = [part(f"Part {number}.", 100 * number) for number in range(5)]
    ranked = [NodeWithScore(node=nodes[number], score=1.0) for number in (3, 0, 4, 1, 2)]
    expected = [0, 1, 2, 3, 4] if order == "document" else [3, 0, 4, 1, 2]
    backend = scripted()
    engine = MemAgentQueryEngine.from_retriever(FixedRetriever(ranked), backend, order=order, **SIZES)
    for response in (engine.query("q"), await engine.aquery("q")):
        assert [source.node for source in response.source_nodes] == [nodes[number] for number in expected]
    assert text_read(backend) == "\n\n".join(nodes[number].text for number in expected) * 2
    assert [source.node for source in engine.retrieve(QueryBundle("q"))] == [source.node for source in ranked]


@pytest.mark.parametrize(
    "settings", [{"order": "best"}, {"metadata_mode": "some"}, {"trim_overlap": "no"}, {"order": None}]
)
def test_settings_of_nodes_that_cannot_be(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(settings))):
        MemAgentSynthesizer(scripted(), **settings)


# Source nodes


@pytest.mark.parametrize("streaming", [False, True])
async def test_source_nodes_are_the_nodes_themselves_once_each(streaming: bool) -> None:
    nodes = SentenceSplitter(chunk_size=300, chunk_overlap=40).get_nodes_from_documents(
        [Document(text=TEXT, id_="book", metadata={"page": "4"})]
    )
    given = scored(nodes)
    backend = ScriptedBackend(lambda prompt: ANSWER if prompt.phase == "answer" else "nothing")
    synthesizer = MemAgentSynthesizer(backend, streaming=streaming, **SIZES)
    response, later = synthesizer.synthesize("q", given), await synthesizer.asynthesize("q", given)
    if streaming:
        assert "".join(response.response_gen) == "".join(await pieces_of(later)) == ANSWER  # type: ignore[union-attr, arg-type]
    for each in (response, later):
        assert [source.node for source in each.source_nodes] == nodes, "although a chunk holds less than a node"
        assert all(any(source is one for one in given) for source in each.source_nodes)
    bare = MemAgentSynthesizer(backend, **SIZES).synthesize("q", nodes)
    assert all(source.node is node for source, node in zip(bare.source_nodes, nodes, strict=True))


FACTS = ["The harbour opened in 1871.", "The lighthouse is 42 metres high.", "Captain Nemo sailed on Friday."]


def remembers(answer: str) -> ScriptedBackend:
    """Return a model that remembers the second and the third fact, and answers so."""
    return ScriptedBackend(lambda prompt: answer if prompt.phase == "answer" else " ".join(FACTS[1:]))


@pytest.mark.parametrize("order", ["document", "given"])
@pytest.mark.parametrize("streaming", [False, True])
async def test_the_nodes_that_the_answer_rests_on_come_first(order: Any, streaming: bool) -> None:
    nodes = [part(fact, 100 * number, metadata={"page_label": f"{number + 1}"}) for number, fact in enumerate(FACTS)]
    more = NodeWithScore(node=TextNode(text="seen elsewhere"))
    synthesizer = MemAgentSynthesizer(
        remembers("Captain Nemo sailed on Friday."), order=order, streaming=streaming, **SIZES
    )
    given = scored(nodes, shuffled=False)
    response = synthesizer.synthesize("Who sailed?", given, [more])
    later = await synthesizer.asynthesize("Who sailed?", given, [more])
    if streaming:
        list(response.response_gen)  # type: ignore[union-attr, arg-type]
        await pieces_of(later)
    for each in (response, later):
        shown = [source.node for source in each.source_nodes]
        expected = [nodes[2], nodes[1], nodes[0]] if order == "document" else nodes
        assert shown == [*expected, more.node]
        first = memagent(each)["citations"][0]
        assert (first["statement"], first["page"], first["node_ids"]) == (FACTS[2], "3", [nodes[2].node_id])
        assert (first["document_id"], first["start"], first["end"]) == ("book", 200, 200 + len(FACTS[2]))
        json.dumps(memagent(each))


def test_a_citation_can_be_quoted_from_the_nodes() -> None:
    nodes = [part(fact, 100 * number, metadata={"page_label": "7"}) for number, fact in enumerate(FACTS)]
    reading = MemAgentSynthesizer(remembers(FACTS[1]), **SIZES).reading("How high?", nodes)
    assert reading.citations[0].quote(nodes) == FACTS[1]


def test_citations_point_into_light_nodes_and_texts_too() -> None:
    for source in (iter([part(fact, 100 * number, id_=fact) for number, fact in enumerate(FACTS)]), iter(FACTS)):
        response = MemAgentSynthesizer(remembers(FACTS[1]), **SIZES).synthesize("How high?", source)
        first = response.source_nodes[0].node
        assert first.node_id == memagent(response)["citations"][0]["node_ids"][0]
        assert first.node_id in (FACTS[1], "text-1")


def test_steps_say_which_characters_of_each_node_they_read() -> None:
    nodes = SentenceSplitter(chunk_size=300, chunk_overlap=40).get_nodes_from_documents(
        [Document(text=TEXT, id_="book", metadata={"page": "4"})]
    )
    by_id = {node.node_id: node.get_content() for node in nodes}
    backend = scripted()
    response = MemAgentSynthesizer(backend, **SIZES).synthesize("q", scored(nodes))
    *updates, answer = memagent(response)["steps"]
    assert answer["nodes"] == []
    for step, prompt in zip(updates, backend.prompts, strict=False):
        assert step["nodes"]
        for line in step["nodes"]:
            assert by_id[line["node_id"]][line["start"] : line["end"]] in prompt.messages[0].content
    read = "".join(by_id[line["node_id"]][line["start"] : line["end"]] for step in updates for line in step["nodes"])
    assert read.split() == TEXT.split(), "all of it, and what two nodes share once"


def test_a_node_given_twice_is_read_once_and_is_one_source() -> None:
    backend, node = scripted(), TextNode(text="Once only.")
    response = plain(backend).synthesize(
        "q", [NodeWithScore(node=node, score=0.9), NodeWithScore(node=node, score=0.1)]
    )
    assert text_read(backend) == "Once only."
    assert [source.score for source in response.source_nodes] == [0.9]


def test_light_source_nodes_hold_no_text_but_all_else() -> None:
    nodes = [part(f"Part {number}. ", 8 * number, metadata={"page": number}) for number in range(4)]
    response = MemAgentSynthesizer(scripted(), include_text=False, **SIZES).synthesize("q", scored(nodes))
    light: list[Any] = [source.node for source in response.source_nodes]
    assert [(node.node_id, node.text, node.metadata, node.ref_doc_id) for node in light] == [
        (node.node_id, "", node.metadata, "book") for node in nodes
    ]
    assert [(node.start_char_idx, node.end_char_idx) for node in light] == [(8 * n, 8 * n + 8) for n in range(4)]


def test_light_source_nodes_of_an_iterator_do_not_hold_the_texts() -> None:
    def stream(number_of_nodes: int) -> Iterator[TextNode]:
        for number in range(number_of_nodes):
            yield part(f"{number:06} " * 2000, number * 20_000, id_=f"n{number}")

    def script(prompt: Prompt) -> str:
        backend.prompts.clear()
        return "note"

    backend = ScriptedBackend(script, window=100_000)
    synthesizer = MemAgentSynthesizer(backend, chunk_tokens=20_000, memory_tokens=50)
    synthesizer.synthesize("q", stream(2))
    tracemalloc.start()
    try:
        response = synthesizer.synthesize("q", stream(300))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(response.source_nodes) == 300
    assert held / 300 < 4_000, f"{held / 300:.0f} bytes for each node, whose text has 14,000"


async def test_evaluators_see_what_was_read() -> None:
    contexts: list[str] = []

    def script(text: str) -> str:
        if "<section>" in text:
            return "one note"
        contexts.append(text)
        return "4.0\nBecause." if "Reference Answer" in text else "YES"

    llm = fake(script)
    nodes = [part("The gate is red.", 0), part("The wall is blue.", 20)]
    response = MemAgentSynthesizer(scripted(), **SIZES).synthesize("q", scored(nodes))
    for evaluator in (FaithfulnessEvaluator(llm=llm), RelevancyEvaluator(llm=llm), CorrectnessEvaluator(llm=llm)):
        contexts.clear()
        result = await evaluator.aevaluate_response(query="Which colour?", response=response, reference="red")
        assert result.passing
        if not isinstance(evaluator, CorrectnessEvaluator):
            assert all(node.text in "".join(contexts) for node in nodes)


def test_the_sources_of_a_citation_engine_keep_their_numbers() -> None:
    nodes = [
        part("The gate is red. " * 20, 0, "a"),
        part("The wall is blue. " * 20, 0, "b"),
        part("The sky. ", 900, "a"),
    ]
    backend = scripted()
    engine = CitationQueryEngine(
        FixedRetriever([NodeWithScore(node=node, score=0.5) for node in nodes]),
        llm=fake(),
        response_synthesizer=plain(backend),
        citation_chunk_size=40,
        citation_chunk_overlap=0,
    )
    response = engine.query("q")
    assert len(response.source_nodes) > 5
    for number, source in enumerate(response.source_nodes, 1):
        assert source.node.get_content().startswith(f"Source {number}:\n")
    read = text_read(backend)
    assert [f"Source {number}:" in read for number in range(1, len(response.source_nodes) + 1)].count(False) == 0


def test_texts_that_are_no_nodes_are_sources_too() -> None:
    response = MemAgentSynthesizer(scripted(), **SIZES).synthesize("q", ["a line\n", "another\n"])
    assert [(source.node.node_id, source.text) for source in response.source_nodes] == [("text-1", "a line\nanother\n")]
    assert memagent(response)["steps"][0]["nodes"] == [{"node_id": "text-1", "start": 0, "end": 15}]


# Metadata


def test_metadata_stands_in_the_prompt_as_llama_index_shows_it() -> None:
    nodes = [
        TextNode(text="It was fair.", metadata={"ship": "Alma", "secret": "x"}, excluded_llm_metadata_keys=["secret"]),
        TextNode(
            text="It rained.",
            metadata={"ship": "Berta", "day": "2"},
            metadata_template="{key}={value}",
            metadata_separator="; ",
            text_template="<{metadata_str}> {content} (end)",
        ),
        Document(text="A storm.", metadata={"ship": "Clara"}),
        TextNode(text="No metadata."),
    ]
    backend = scripted()
    MemAgentSynthesizer(backend, **SIZES).synthesize("q", nodes)
    assert text_read(backend) == "\n\n".join(node.get_content(metadata_mode=MetadataMode.LLM) for node in nodes)
    assert "ship=Berta; day=2" in text_read(backend)
    assert "secret" not in text_read(backend)


@pytest.mark.parametrize(
    ("mode", "shown"),
    [
        ("none", "It was fair."),
        (MetadataMode.NONE, "It was fair."),
        ("all", "a: 1\nb: 2\n\nIt was fair."),
        (MetadataMode.EMBED, "b: 2\n\nIt was fair."),
        ("llm", "a: 1\n\nIt was fair."),
    ],
)
def test_which_metadata_is_shown_is_a_setting(mode: Any, shown: str) -> None:
    node = TextNode(
        text="It was fair.",
        metadata={"a": 1, "b": 2},
        excluded_llm_metadata_keys=["b"],
        excluded_embed_metadata_keys=["a"],
    )
    backend = scripted()
    MemAgentQueryEngine.from_nodes([node], backend, metadata_mode=mode, **SIZES).query("q")
    assert text_read(backend) == shown


def test_metadata_stands_before_a_node_once_and_moves_no_offset() -> None:
    node = part(TEXT, 0, metadata={"page_label": "7"}, id_="long")
    backend, synthesizer = scripted(), None
    synthesizer = MemAgentSynthesizer(backend, **SIZES)
    chunks = list(synthesizer.reader.chunks(TEXT))
    response = synthesizer.synthesize("q", [node])
    assert text_read(backend) == f"page_label: 7\n\n{TEXT}"
    lines = [line for step in memagent(response)["steps"] for line in step["nodes"]]
    assert len(lines) >= len(chunks) > 3
    assert "".join(TEXT[line["start"] : line["end"]] for line in lines) == TEXT
    assert TEXT[lines[1]["start"] : lines[1]["end"]] in backend.prompts[1].messages[0].content


def test_a_template_that_does_not_show_the_text_is_refused() -> None:
    node = TextNode(text="It was fair.", metadata={"a": 1}, text_template="{metadata_str}", id_="n1")
    with pytest.raises(UsageError, match="text_template of the node n1"):
        MemAgentSynthesizer(scripted(), **SIZES).synthesize("q", [node])


# Overlap


@pytest.mark.parametrize("order", ["document", "given"])
@pytest.mark.parametrize("as_iterator", [False, True])
def test_text_that_two_nodes_share_is_read_once(order: Any, as_iterator: bool) -> None:
    nodes = SentenceSplitter(chunk_size=200, chunk_overlap=60).get_nodes_from_documents(
        [Document(text=TEXT, id_="book")]
    )
    assert sum(len(node.get_content()) for node in nodes) > 1.2 * len(TEXT)
    found = scored(nodes, shuffled=not as_iterator)
    backend = scripted()
    plain(backend, order=order).synthesize("q", iter(found) if as_iterator else found)
    assert sorted(text_read(backend).split()) == sorted(TEXT.split())


def test_overlap_can_be_kept() -> None:
    nodes = SentenceSplitter(chunk_size=200, chunk_overlap=60).get_nodes_from_documents(
        [Document(text=TEXT, id_="book")]
    )
    backend = scripted()
    plain(backend, trim_overlap=False).synthesize("q", nodes)
    assert text_read(backend) == "\n\n".join(node.get_content() for node in nodes)


@pytest.mark.parametrize(
    ("nodes", "read"),
    [
        ([part("abcdefgh", 0), part("efghijkl", 4)], "abcdefghijkl"),
        ([part("abcdefgh", 0), part("cdef", 2)], "abcdefgh"),
        ([part("abcdefgh", 0), part("abcdefgh", 0)], "abcdefgh"),
        ([part("abcdefgh", 0), part("ijkl", 8)], "abcdefghijkl"),
        ([part("abcdefgh", 0), part("klmn", 10)], "abcdefgh\n\nklmn"),
        ([part("abcdefgh", 0), part("EFGHijkl", 4)], "abcdefgh\n\nEFGHijkl"),
        ([part("abcdefgh", 0), part("efghijkl", 4, "other")], "abcdefgh\n\nefghijkl"),
        ([part("abcdefgh", None), part("efghijkl", None)], "abcdefgh\n\nefghijkl"),
        ([part("abcdefgh", 0), part("efghijkl", 4, end_char_idx=99)], "abcdefgh\n\nefghijkl"),
        ([part("abcdefgh", 0), part("efghijkl", 4, end_char_idx=None)], "abcdefghijkl"),
        ([part("abcdefgh", 0, end_char_idx=5), part("efghijkl", 4)], "abcdefgh\n\nefghijkl"),
    ],
)
def test_only_text_that_is_the_same_is_left_out(nodes: list[TextNode], read: str) -> None:
    backend = scripted()
    response = plain(backend).synthesize("q", nodes)
    assert text_read(backend) == read
    assert len(response.source_nodes) == 2


def repetitive() -> list[str]:
    return [
        "The same line. " * 300,
        "".join(f"Row of zeros.\n{'0 ' * 40}\n" for _ in range(40)),
        TEXT[:500] + "Nothing happened on this day. " * 100 + TEXT[500:900] + "Nothing happened on this day. " * 100,
    ]


@pytest.mark.parametrize("text", repetitive())
def test_no_repetition_is_lost_where_offsets_were_found_too_early(text: str) -> None:
    """LlamaIndex looks for a node's text behind the start of the node before, and finds an earlier repetition."""
    nodes = SentenceSplitter(chunk_size=64, chunk_overlap=20).get_nodes_from_documents(
        [Document(text=text, id_="book")]
    )
    for given, order in ((nodes, "document"), (nodes, "given"), (nodes[::-1], "document")):
        backend = scripted()
        plain(backend, order=order).synthesize("q", given)
        read = text_read(backend)
        for line in set(re.findall(r"[A-Z][^.]*\.", text)):
            assert read.count(line) >= text.count(line)


def test_the_last_words_are_read_although_they_stand_in_the_node_before_too() -> None:
    first, last = part("Yes. Is that all? It is.", 0, id_="a"), part("Yes.", 0, id_="b")
    last.relationships[NodeRelationship.PREVIOUS] = RelatedNodeInfo(node_id="a")
    backend = scripted()
    plain(backend).synthesize("q", [first, last])
    assert text_read(backend) == "Yes. Is that all? It is.\n\nYes."


@pytest.mark.parametrize(
    ("nodes", "read"),
    [
        ([part("efghijkl", 4), part("abcdefgh", 0)], "efghijkl\n\nabcd"),
        ([part("efgh", 4), part("abcdefghijkl", 0)], "efgh\n\nabcd\n\nijkl"),
        ([part("efgh", 4), part("abcdefgh", 0), part("efghijkl", 4)], "efgh\n\nabcd\n\nijkl"),
    ],
)
def test_overlap_in_any_order_is_read_once(nodes: list[TextNode], read: str) -> None:
    backend = scripted()
    plain(backend, order="given").synthesize("q", nodes)
    assert text_read(backend) == read


def test_nodes_that_share_an_id_are_told_apart_by_their_place() -> None:
    """A node parser may be given an `id_func` that numbers nothing."""
    nodes = [
        part("Yes.", 0, id_="a"),
        part(" No.", 4, id_="a"),
        part("Yes.", 8, id_="a"),
        part("Yes.", 0, "b", id_="a"),
    ]
    backend = scripted()
    response = plain(backend).synthesize("q", nodes)
    assert text_read(backend) == "Yes. No.Yes.\n\nYes."
    assert [source.node.ref_doc_id for source in response.source_nodes] == ["book", "book", "book", "b"]
    assert len(response.source_nodes) == 4


@pytest.mark.parametrize(
    ("nodes", "read"),
    [
        ([part("one", 0), part(" ", 3), part("two", 4)], "one two"),
        ([part("one", 0), part("ne\n\n", 1), part("two", 5)], "one\n\ntwo"),
        ([part("  ", 0), part("one", 2)], "  one"),
        ([part("one", 0), part("\n", 3), part("# two", 4)], "one\n# two"),
    ],
)
def test_space_between_nodes_is_a_part_of_the_text(nodes: list[TextNode], read: str) -> None:
    backend = scripted()
    plain(backend).synthesize("q", nodes)
    assert text_read(backend) == read


def test_a_text_that_was_cut_anywhere_is_read_as_it_was() -> None:
    for seed in range(60):
        chance = random.Random(seed)
        ends = ["", "海", " \n", "\n\n", "  "]
        text = "".join(f"{number * 7919:x}{chance.choice(ends)}" for number in range(100))
        cuts = [0, *sorted(chance.sample(range(20, len(text) - 20, 20), 15)), len(text)]
        nodes = [part(text[start : end + 6], start) for start, end in pairwise(cuts)]
        nodes.append(part(text[cuts[3] + 5 : cuts[3] + 12], cuts[3] + 5))
        chance.shuffle(nodes)
        backend = scripted()
        plain(backend).synthesize("q", nodes)
        assert text_read(backend) == text


@pytest.mark.parametrize(
    "make", [lambda node: node, lambda node: NodeWithScore(node=node), lambda node: [node, part("x", 0)]]
)
def test_a_node_whose_content_is_no_text_is_named(make: Callable[[TextNode], Any]) -> None:
    nameless = TextNode.model_construct(id_="n1", text=None)
    with pytest.raises(UsageError, match="the content of the node n1 is NoneType, not text"):
        MemAgentQueryEngine.from_nodes(make(nameless), llm=scripted()).query("q")


# What a source may be


class Reader(BaseReader):
    """Has only the methods that are named."""

    def __init__(self, *methods: str) -> None:
        for name in methods:
            setattr(self, name, getattr(self, f"own_{name}"))

    def own_lazy_load_data(self) -> Iterator[Document]:
        yield from documents()

    def own_load_data(self) -> list[Document]:
        return documents()

    def own_iter_data(self) -> Iterator[list[Document]]:
        yield from ([document] for document in documents())

    async def own_alazy_load_data(self) -> Any:
        return iter(documents())

    async def own_aload_data(self) -> list[Document]:
        return documents()


async def astream(*items: Any) -> AsyncIterator[Any]:
    for item in items:
        yield item


SOURCES: dict[str, Callable[[], Any]] = {
    "load_data()": lambda: Reader("load_data").load_data(),
    "lazy_load_data()": lambda: Reader("lazy_load_data").lazy_load_data(),
    "iter_data()": lambda: Reader("iter_data").iter_data(),  # type: ignore[attr-defined]
    "reader with load_data": lambda: Reader("load_data"),
    "reader with lazy_load_data": lambda: Reader("lazy_load_data"),
    "reader with iter_data": lambda: Reader("iter_data"),
    "list of lists": lambda: [[document] for document in documents()],
    "tuple": lambda: tuple(documents()),
    "nodes with scores": lambda: [NodeWithScore(node=document, score=0.5) for document in documents()],
    "aload_data()": lambda: Reader("aload_data").aload_data(),
    "alazy_load_data()": lambda: Reader("alazy_load_data").alazy_load_data(),
    "reader with aload_data": lambda: Reader("aload_data"),
    "reader with alazy_load_data": lambda: Reader("alazy_load_data"),
    "async iterator of lists": lambda: astream(*([document] for document in documents())),
}


@pytest.mark.parametrize("name", SOURCES)
async def test_a_source_keeps_its_metadata_in_every_form(name: str) -> None:
    backend = scripted()
    engine = MemAgentQueryEngine.from_documents(SOURCES[name](), backend, **SIZES)
    response = await engine.aquery("q")
    assert [source.node.metadata for source in response.source_nodes] == [{"file": "a.txt"}, {"file": "b.txt"}]
    assert [source.node.node_id for source in response.source_nodes] == ["first", "second"]
    assert "file: b.txt" in text_read(backend)
    if not name.removeprefix("reader with ").startswith("a"):
        backend = scripted()
        response = MemAgentQueryEngine.from_documents(SOURCES[name](), backend, **SIZES).query("q")
        assert [source.node.metadata for source in response.source_nodes] == [{"file": "a.txt"}, {"file": "b.txt"}]


def test_a_directory_reader_is_read_file_by_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"What stands in {name}.")
    reader = SimpleDirectoryReader(str(tmp_path))
    for source in (reader, reader.iter_data(), reader.load_data()):
        backend = scripted()
        response = MemAgentQueryEngine.from_documents(source, backend, **SIZES).query("q")
        assert [source.node.metadata["file_name"] for source in response.source_nodes] == ["a.txt", "b.txt"]
        assert f"file_path: {tmp_path / 'a.txt'}" in text_read(backend)


def empty_sources() -> dict[str, Any]:
    return {"list": [], "iterator": iter([]), "list of lists": [[], []], "reader": Empty(), "tuple": ()}


class Empty(BaseReader):
    def load_data(self, *_: Any, **__: Any) -> list[Document]:
        return []


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", empty_sources())
async def test_no_nodes_are_an_empty_response_in_every_form(name: str, streaming: bool) -> None:
    async def answers(ask: Callable[[Any], Any]) -> list[str]:
        said = []
        for method in (ask(empty_sources()[name]).query, ask(empty_sources()[name]).aquery):
            response: Any = method("q")
            response = await response if method.__name__ == "aquery" else response
            text = await response.get_response() if hasattr(response, "aprint_response_stream") else response
            said.append(str(text))
        return said

    backend = scripted()
    settings: Any = {"streaming": streaming, "empty_response": "Nothing found.", **SIZES}
    assert (
        await answers(lambda source: MemAgentQueryEngine.from_nodes(source, backend, **settings))
        == ["Nothing found."] * 2
    )
    assert backend.prompts == []
    synthesizer = MemAgentSynthesizer(backend, **settings)
    assert str(synthesizer.synthesize("q", empty_sources()[name])) == "Nothing found."


async def test_an_empty_async_iterator_is_an_empty_response() -> None:
    synthesizer = MemAgentSynthesizer(scripted(), **SIZES)
    assert str(await synthesizer.asynthesize("q", astream())) == "Empty Response"


def test_nodes_without_any_text_are_an_error() -> None:
    for nodes in ([TextNode(text="")], [NodeWithScore(node=Document())], [TextNode(text=" \n")]):
        with pytest.raises(UsageError, match="empty"):
            MemAgentSynthesizer(scripted(), **SIZES).synthesize("q", nodes)


def test_an_empty_node_among_others_loses_nothing() -> None:
    nodes = [TextNode(text="One."), TextNode(text="", metadata={"ship": "Alma"}), Document(), TextNode(text="Two.")]
    backend = scripted()
    response = MemAgentSynthesizer(backend, **SIZES).synthesize("q", [NodeWithScore(node=node) for node in nodes])
    assert text_read(backend) == "One.\n\nship: Alma\n\nTwo."
    assert [source.node for source in response.source_nodes] == nodes


def images(tmp_path: Path) -> list[tuple[BaseNode, str]]:
    path = tmp_path / "pixel.png"
    path.write_bytes(base64.b64decode(PIXEL))
    return [
        (ImageNode(text="A caption.", image_path="plans/gate.png"), "gate.png"),
        (ImageNode(text="A caption.", image_url="https://example.org/gate.png"), "example.org/gate.png"),
        (ImageNode(text="A caption.", image=PIXEL), "image"),
        (ImageDocument(text="A caption.", image_path=str(path)), "pixel.png"),
        (
            Node(
                text_resource=MediaResource(text="A caption."),
                image_resource=MediaResource(data=PIXEL.encode(), mimetype="image/png"),
            ),
            "image/png",
        ),
        (Document(text="A caption.", audio_resource=MediaResource(path=Path("talk.mp3"))), "talk.mp3"),
        (Document(text="A caption.", video_resource=MediaResource(path=Path("film.mp4"))), "film.mp4"),
    ]


@pytest.mark.parametrize("number", range(7))
async def test_images_are_never_dropped_in_silence(
    number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node, name = images(tmp_path)[number]
    backend = scripted()
    for nodes in ([node], [NodeWithScore(node=node)], iter([node]), [TextNode(text="Other."), node]):
        caplog.clear()
        response = MemAgentSynthesizer(backend, include_text=True, **SIZES).synthesize("q", nodes)
        assert name in caplog.text
        assert node.node_id in caplog.text
        assert [line["node_id"] for line in memagent(response)["not_read"]] == [node.node_id]
        assert name in memagent(response)["not_read"][0]["holds"]
        assert response.source_nodes[-1].node is node, "the image is where it was"
    assert text_read(backend).count("A caption.") == 4
    caplog.clear()
    await MemAgentSynthesizer(backend, **SIZES).asynthesize("q", astream(node))
    assert name in caplog.text


def test_an_image_without_text_is_an_error_that_names_it() -> None:
    with pytest.raises(UsageError, match=r"n1 .*gate.png"):
        MemAgentSynthesizer(scripted(), **SIZES).synthesize("q", [ImageNode(image_path="gate.png", id_="n1")])


def test_a_query_with_an_image_is_not_taken_for_one_without(caplog: pytest.LogCaptureFixture) -> None:
    query = QueryBundle("What is this?", image_path="plans/gate.png")
    response = MemAgentSynthesizer(scripted(), **SIZES).synthesize(query, [TextNode(text="One.")])
    assert "plans/gate.png" in caplog.text
    assert "plans/gate.png" in str(memagent(response)["not_read"])


def test_an_index_node_is_read_with_the_node_that_it_stands_for(caplog: pytest.LogCaptureFixture) -> None:
    whole = TextNode(text="The whole chapter.", id_="whole")
    backend = scripted()
    nodes = [
        IndexNode(text="A summary.", index_id="whole", obj=whole),
        IndexNode(text="", index_id="x", obj="A text."),
        IndexNode(text="A pointer.", index_id="y"),
        IndexNode(text="An engine.", index_id="z", obj=FixedRetriever([])),
    ]
    response = MemAgentSynthesizer(backend, **SIZES).synthesize("q", nodes)
    assert text_read(backend) == "A summary.\n\nThe whole chapter.\n\nA text.\n\nA pointer.\n\nAn engine."
    assert response.source_nodes[1].node is whole
    assert "FixedRetriever" in caplog.text


def test_index_nodes_are_followed_to_the_last_node_that_they_stand_for(caplog: pytest.LogCaptureFixture) -> None:
    inner = IndexNode(text="a chapter", index_id="c", id_="inner", obj=TextNode(text="the words", id_="words"))
    outer = IndexNode(text="a book", index_id="b", id_="outer", obj=NodeWithScore(node=inner, score=0.5))
    backend = scripted()
    response = plain(backend).synthesize("q", [NodeWithScore(node=outer, score=0.7)])
    assert text_read(backend) == "a book\n\na chapter\n\nthe words"
    assert [(source.node.node_id, source.score) for source in response.source_nodes] == [
        ("outer", 0.7),
        ("inner", 0.7),
        ("words", 0.7),
    ]
    assert not caplog.records


def test_index_nodes_that_stand_for_one_another_are_read_once() -> None:
    first, second = (IndexNode(text=text, index_id=text, id_=text) for text in ("one", "two"))
    first.obj, second.obj = second, first
    backend = scripted()
    plain(backend).synthesize("q", [first])
    assert text_read(backend) == "one\n\ntwo"


def test_what_an_engine_reports_of_its_reading_is_not_read_with_its_answer() -> None:
    """LlamaIndex makes a node of the response of an engine behind an `IndexNode`, with the response's metadata."""
    chapter = MemAgentQueryEngine.from_nodes(part("The code is 7.", 0), llm=ScriptedBackend(["7", "seven"]), **SIZES)
    behind = IndexNode(text="about codes", index_id="codes", obj=chapter)
    retriever = VectorStoreIndex(objects=[behind], embed_model=MockEmbedding(embed_dim=8)).as_retriever()
    backend = scripted()
    response = MemAgentQueryEngine.from_retriever(retriever, llm=backend, **SIZES).query("q")
    assert "seven" in text_read(backend)
    assert "memagent" not in text_read(backend)
    assert "memagent" in response.source_nodes[0].metadata


def test_an_engine_asked_for_its_nodes_returns_what_it_reads() -> None:
    engine = MemAgentQueryEngine.from_documents(Reader("iter_data"), scripted(), **SIZES)
    nodes = engine.retrieve(QueryBundle("q"))
    assert [source.node.node_id for source in nodes] == ["first", "second"]
    assert str(engine.synthesize(QueryBundle("q"), nodes)) == ANSWER


async def test_a_workflow_reads_nodes_by_the_same_rules() -> None:
    nodes = [part("efghijkl ", 4), part("abcdefgh", 0, metadata={"ship": "Alma"}), part("mnop", 13)]
    backend = scripted()
    result = await MemAgentWorkflow(backend, load=lambda _: nodes, **SIZES).run(question="q", document="log")
    assert text_read(backend) == "ship: Alma\n\nabcdefghijkl mnop"
    assert result.steps[0]["nodes"] == [
        {"node_id": node.node_id, "start": start, "end": len(node.text)}
        for node, start in ((nodes[1], 0), (nodes[0], 4), (nodes[2], 0))
    ]
    backend = scripted()
    settings: Any = {"order": "given", "trim_overlap": False, "metadata_mode": "none", **SIZES}
    await MemAgentWorkflow(backend, load=lambda _: nodes, **settings).run(question="q", document="log")
    assert text_read(backend) == "\n\n".join(node.text for node in nodes)
    with pytest.raises(UsageError, match="order"):
        MemAgentWorkflow(backend, order="best")  # type: ignore[arg-type]
