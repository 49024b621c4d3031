"""Where the nodes of LlamaIndex stand in their documents, and the order that follows from it.

Nodes are recognised by their attributes, so that LlamaIndex need not be installed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from memagent_integrations.errors import UsageError

Find = Callable[[str], Any]
"""Returns the node with an id, or None."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a node's text begins: character `start` of the document `document_id`.

    `fits` is false if the node does not know its place, or if its text is not as long as its offsets say.
    """

    document_id: str
    start: int
    fits: bool


def is_node(item: Any) -> bool:
    """Return whether an object is a node, with a score or without."""
    return hasattr(item, "get_content") or is_scored(item)


def is_scored(item: Any) -> bool:
    """Return whether an object is a retrieved node with its score."""
    return hasattr(item, "node") and hasattr(item, "score")


def node_of(item: Any) -> Any:
    """Return the node of a scored node; any other object as it is."""
    return item.node if is_scored(item) else item


def text_of(node: Any) -> str:
    """Return the text of a node, without metadata.

    Raises:
        UsageError: it is no text.
    """
    text = node.get_content()
    if not isinstance(text, str):
        raise UsageError(f"the content of the node {getattr(node, 'node_id', '')} is {type(text).__name__}, not text")
    return text


def document_id_of(node: Any) -> str:
    """Return the id of the document that a node is a part of; its own if it is a part of none."""
    return str(getattr(node, "ref_doc_id", None) or getattr(node, "node_id", ""))


def place_of(node: Any, find: Find | None = None) -> Place:
    """Return where a node stands. One that does not know it is a document of its own.

    Offsets of a node with a parent (hierarchical nodes) count from the parent's text: `find` looks up the parents. If
    one is not found, its text is the document.
    """
    start, own = getattr(node, "start_char_idx", None), str(getattr(node, "node_id", ""))
    if not isinstance(start, int):
        return Place(document_id=own, start=0, fits=False)
    end, text = getattr(node, "end_char_idx", None), text_of(node)
    if end is not None and end - start != len(text):
        return Place(document_id=own, start=0, fits=False)
    document_id, start = _counted_from(node, text, start, find or (lambda _: None))
    return Place(document_id=document_id, start=start, fits=True)


def _counted_from(node: Any, text: str, start: int, find: Find) -> tuple[str, int]:
    """Return what the offsets of a node count from, its document or a parent that is not found, and its start there."""
    child, seen = node, {str(getattr(node, "node_id", ""))}
    while (relation := getattr(child, "parent_node", None)) and relation.node_id not in seen:
        seen.add(relation.node_id)
        parent = find(relation.node_id)
        if parent is None:
            return str(relation.node_id), start
        base = getattr(parent, "start_char_idx", None)
        if not text_of(parent).startswith(text, start):
            break  # the offsets do not count from this parent
        if not isinstance(base, int):
            return str(relation.node_id), start
        child, start = parent, start + base
    return document_id_of(node), start


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """A node to be put in order. `start` counts characters from `base`: its document, or a parent; None: unknown."""

    item: Any
    document_id: str
    base: str
    start: int | None


def in_document_order(items: Sequence[Any], find: Find | None = None) -> list[Any]:
    """Return nodes, scored or not, in the order of their text; a node comes before the smaller ones inside it.

    Documents come in the order in which they first appear. So do the nodes of a document that do not know their place,
    or whose offsets contradict one another.
    """
    known = {str(getattr(node_of(item), "node_id", "")): node_of(item) for item in items}

    def find_any(node_id: str) -> Any:
        return known.get(node_id) or (find(node_id) if find else None)

    entries = [_entry(item, find_any) for item in items]
    located = {entry.document_id for entry in entries if entry.start is not None}
    documents: dict[str, list[_Entry]] = {}
    for number, entry in enumerate(entries):
        key = entry.document_id if entry.document_id in located else f"\0{number}"
        documents.setdefault(key, []).append(entry)
    unsure = [entries[0].document_id for entries in documents.values() if len({entry.base for entry in entries}) > 1]
    if unsure:
        _log.warning(
            "the order of the nodes of %s is not known: their offsets count from parents that are not among them; "
            "give MemAgentSynthesizer the docstore that has them (docstore=...)",
            ", ".join(unsure[:3]),
        )
    return [entry.item for entries in documents.values() for entry in _ordered(entries)]


def _entry(item: Any, find: Find) -> _Entry:
    node, start = node_of(item), getattr(node_of(item), "start_char_idx", None)
    document_id = base = document_id_of(node)
    if isinstance(start, int):
        base, start = _counted_from(node, text_of(node), start, find)
    return _Entry(item=item, document_id=document_id, base=base, start=start if isinstance(start, int) else None)


def _ordered(entries: list[_Entry]) -> list[_Entry]:
    """Return the nodes of one document by their start, or as they are if that is in order or cannot be."""
    bases: dict[str, list[_Entry]] = {}
    for entry in entries:
        if entry.start is not None:
            bases.setdefault(entry.base, []).append(entry)
    unknown = [entry for entry in entries if entry.start is None]
    ordered = [entry for group in bases.values() for entry in _by_start(group)]
    is_in_order = ordered == [entry for entry in entries if entry.start is not None]
    return entries if is_in_order else ordered + unknown


def _by_start(group: list[_Entry]) -> list[_Entry]:
    """Return the entries by their start, or as they are if two of them that overlap differ there."""
    ordered = sorted(group, key=lambda entry: (entry.start, -len(text_of(node_of(entry.item)))))
    places = [
        (entry.start or 0, text_of(node_of(entry.item))) for entry in ordered if place_of(node_of(entry.item)).fits
    ]
    contradict = any(not _agree(text[after - start :], other) for (start, text), (after, other) in pairwise(places))
    return group if contradict else ordered


def _agree(before: str, after: str) -> bool:
    """Return whether two texts that begin at the same place are the same as far as both go."""
    shared = min(len(before), len(after))
    return before[:shared] == after[:shared]
