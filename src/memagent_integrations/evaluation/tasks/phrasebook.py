"""Sentences about people, firms, books and towns in many wordings, from `prose.toml`.

A split is one half of that file. The two halves share no sentence, no question and no name.
"""

from __future__ import annotations

import random
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import accumulate
from typing import Any, Literal

from pydantic import TypeAdapter

Split = Literal["training", "evaluation"]

_YEARS = range(1860, 2020)  # in which a firm was founded or a book published
_FIRST_STATE = (1930, 1990)  # years in which the first of several states begins
_STATE_YEARS = (2, 11)  # least and most years of a state
_PARTS = {  # kinds of names that have two parts: where each part is
    "firm": ("firm", "firm_ending"),
    "school": ("school", "school_ending"),
    "book": ("book", "book_ending"),
}
_PRONOUNS = {
    "she": {"he": "she", "him": "her", "his": "her", "man": "woman"},
    "he": {"he": "he", "him": "him", "his": "his", "man": "man"},
    "it": {"he": "it", "him": "it", "his": "its"},
}


@dataclass(frozen=True, kw_only=True)
class Wording:
    """Templates that tell a relation in one way: see the head of `prose.toml`."""

    told: tuple[str, ...]
    pronoun: tuple[str, ...]
    asked: tuple[str, ...]
    later: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Relation:
    """A relation between a `subject` and an `object`, which are kinds of names or values, and its wordings."""

    name: str
    subject: str
    object: str
    wordings: tuple[Wording, ...]
    phrases: tuple[str, ...] = ()
    latest: Wording | None = None
    also: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Phrasebook:
    """One split of `prose.toml`."""

    relations: tuple[Relation, ...]
    leads: dict[str, tuple[str, ...]]
    tails: tuple[str, ...]
    names: dict[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Entity:
    """A name or a value of a kind. `pronoun` is she, he or it; `surname` is empty for all but people."""

    name: str
    kind: str = ""
    pronoun: str = "it"
    surname: str = ""


_PHRASEBOOK = TypeAdapter(Phrasebook)


@cache
def phrasebook(split: Split) -> Phrasebook:
    """Return one split of `prose.toml`."""
    page = tomllib.loads(resources.files(__package__).joinpath("prose.toml").read_text(encoding="utf-8"))

    def own(tables: dict[str, Any]) -> dict[str, Any]:
        return {name: table[split] for name, table in tables.items()}

    relations = [
        {
            "name": name,
            "subject": relation["subject"],
            "object": relation["object"],
            "wordings": relation[split],
            "phrases": relation.get("phrases", {}).get(split, ()),
            "latest": relation.get("latest", {}).get(split),
            "also": relation.get("also", ()),
        }
        for name, relation in page["relations"].items()
    ]
    book = {"relations": relations, "leads": own(page["leads"]), "tails": page["tails"][split]}
    return _PHRASEBOOK.validate_python({**book, "names": own(page["names"])})


class Cast:
    """The names and values of one document, none of which is given twice."""

    def __init__(self, book: Phrasebook, rng: random.Random) -> None:
        self._book, self._rng = book, rng
        self._unused: dict[str, list[str]] = {}
        self._leads: dict[str, list[str]] = {}

    def new(self, kind: str, *, unlike: Entity | None = None) -> Entity:
        """Return a new entity of a kind; a person is of the other sex than `unlike`."""
        if kind == "person":
            return self._person(unlike)
        if kind in _PARTS:
            head, ending = _PARTS[kind]
            last = self._next(ending) if kind == "book" else self._rng.choice(self._book.names[ending])
            return Entity(name=f"{self._next(head)} {last}", kind=kind)
        return Entity(name=self._next(kind), kind=kind)

    def years(self, number: int) -> list[int]:
        """Return years of one life in ascending order."""
        start = self._rng.randrange(*_FIRST_STATE)
        return list(accumulate((self._rng.randint(*_STATE_YEARS) for _ in range(number - 1)), initial=start))

    def lead(self, subject: Entity) -> str:
        """Return a sentence that names a subject and tells nothing; the same template comes again after all others."""
        unused = self._leads.setdefault(subject.kind, [])
        if not unused:
            unused.extend(self._book.leads[subject.kind])
            self._rng.shuffle(unused)
        return render(unused.pop(), subject)

    def _person(self, unlike: Entity | None) -> Entity:
        pronoun = self._rng.choice(("she", "he"))
        if unlike:
            pronoun = "he" if unlike.pronoun == "she" else "she"
        first, surname = self._next("women" if pronoun == "she" else "men"), self._next("surnames")
        return Entity(name=f"{first} {surname}", kind="person", pronoun=pronoun, surname=surname)

    def _next(self, category: str) -> str:
        """Return a name of a category that was not given before."""
        if category not in self._unused:
            names = list(map(str, _YEARS)) if category == "year" else list(self._book.names[category])
            self._rng.shuffle(names)
            self._unused[category] = names
        return self._unused[category].pop()


def render(template: str, subject: Entity, value: Entity | None = None, *, year: int | None = None) -> str:
    """Return a template with its names filled in; its first letter is a capital."""
    text = fill(template, subject, value, year=year)
    return text[0].upper() + text[1:]


def fill(template: str, subject: Entity, value: Entity | None = None, *, year: int | None = None) -> str:
    """Return a template with its names filled in."""
    pronouns = _PRONOUNS[subject.pronoun]
    slots: dict[str, Any] = {"S": subject.name, "year": year, **pronouns}
    slots |= {slot.capitalize(): word.capitalize() for slot, word in pronouns.items()}
    if value:
        article = "an" if value.name[0] in "aeiou" else "a"
        spouse = "wife" if value.pronoun == "she" else "husband"
        slots |= {"O": value.name, "a O": f"{article} {value.name}", "spouse": spouse}
    return template.format_map(slots)
