from __future__ import annotations

from typing import Any

from llama_index.core.schema import NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode

from memagent_integrations import Reader, ScriptedBackend
from memagent_integrations.documents import pieces
from memagent_integrations.places import in_document_order, place_of

TEXT = "abcdefghijklmnopqrstuvwxyz"


def node(name: str, text: str, start: int | None, parent: TextNode | None = None, **fields: Any) -> TextNode:
    relationships: Any = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="book")}
    if parent:
        relationships[NodeRelationship.PARENT] = RelatedNodeInfo(node_id=parent.node_id)
    end = None if start is None else start + len(text)
    return TextNode(
        id_=name, text=text, **{"start_char_idx": start, "end_char_idx": end, "relationships": relationships, **fields}
    )


FIRST, SECOND = node("first", TEXT[:13], 0), node("second", TEXT[13:], 13)
CHILD = node("child", TEXT[15:20], 2, SECOND)
GRANDCHILD = node("grandchild", TEXT[16:18], 1, CHILD)
NODES = {each.node_id: each for each in (FIRST, SECOND, CHILD, GRANDCHILD)}


def test_offsets_in_a_parent_count_from_the_document_where_the_parents_are_known() -> None:
    for each in NODES.values():
        place = place_of(each, NODES.get)
        assert (place.document_id, place.fits) == ("book", True)
        assert TEXT[place.start :].startswith(each.text)


def test_offsets_in_a_parent_that_is_not_known_count_from_its_text() -> None:
    assert (place_of(CHILD).document_id, place_of(CHILD).start) == ("second", 2)
    known = {"child": CHILD}
    assert (place_of(GRANDCHILD, known.get).document_id, place_of(GRANDCHILD, known.get).start) == ("second", 3)


def test_offsets_that_count_from_the_document_although_there_is_a_parent() -> None:
    absolute = node("absolute", TEXT[15:20], 15, SECOND)
    place = place_of(absolute, NODES.get)
    assert (place.document_id, place.start) == ("book", 15)


def test_a_node_that_does_not_know_its_place_is_a_document_of_its_own() -> None:
    for each in (node("lost", "abc", None), node("wrong", "abc", 4, end_char_idx=99)):
        place = place_of(each)
        assert (place.document_id, place.start, place.fits) == (each.node_id, 0, False)


def test_nodes_of_a_hierarchy_come_in_the_order_of_their_text() -> None:
    shuffled = [GRANDCHILD, SECOND, CHILD, FIRST]
    assert in_document_order(shuffled) == [FIRST, SECOND, CHILD, GRANDCHILD]
    assert in_document_order([CHILD, FIRST], NODES.get) == [FIRST, CHILD]


def test_a_hierarchy_that_is_its_own_parent_has_an_end() -> None:
    odd = node("odd", "abc", 0)
    odd.relationships[NodeRelationship.PARENT] = RelatedNodeInfo(node_id="odd")
    assert place_of(odd, {"odd": odd}.get).start == 0


def test_a_reader_without_settings_reads_a_hierarchy_in_order_too() -> None:
    nodes = [NodeWithScore(node=each, score=0.5) for each in (SECOND, CHILD, FIRST)]
    backend = ScriptedBackend(["note", "answer"])
    Reader(backend).read("q", nodes)
    content = backend.prompts[0].messages[0].content
    assert content.index(FIRST.text) < content.index(SECOND.text)
    assert [piece.text for piece in pieces(nodes) if piece.document_id] == [FIRST.text, SECOND.text, CHILD.text]
