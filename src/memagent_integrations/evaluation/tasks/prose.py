"""Facts in prose: sentences about invented people, firms, books and towns, strewn through essays or books.

Each document has passages of one to three sentences: the facts that are asked for, the same relations of others, and
other facts. `direct` asks in the words of the fact, `reworded` in other words. `hops` asks for a fact about what
another fact names; the document tells that one first, so that a reader knows what to note. `latest` asks for the last
of two or three states, `absent` for what the document does not tell.

`prose_*` hides the facts in essays. `prose_train_*`, for training, hides them in books, and asks several questions
about each document; its sentences, questions and names are others (`prose.toml`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.haystacks import Cycled, filled, stream
from memagent_integrations.evaluation.samples import Fact, Sample, Task
from memagent_integrations.evaluation.tasks.phrasebook import (
    Cast,
    Entity,
    Relation,
    Split,
    Wording,
    fill,
    phrasebook,
    render,
)
from memagent_integrations.evaluation.tasks.settings import RULER_LENGTHS, TRAINING_LENGTHS, sample_id
from memagent_integrations.tokens import Counter

NOT_TOLD = "The text does not say."
"""The right answer to a question about what the document does not tell."""

_QUESTIONS = 4  # about each document for training
_PLAIN, _LED = 0.4, 0.7  # below the first: no pronoun; below the second: a pronoun after a lead; else after a fact
_TAILED = 0.2  # share of the passages with a last sentence that tells nothing
_NAMED = ("person", "firm", "school", "book", "town")  # objects that a pronoun after them could mean


@dataclass(frozen=True, kw_only=True)
class Passage:
    """One to three sentences of the document. `fact` is the part that tells a fact, and `value` its object."""

    text: str
    fact: str
    value: str


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question about a story.

    Attributes:
        question: the question.
        answers: as of `Sample`.
        relation: what it asks for; of two hops, the second.
        facts: the passages that answer it.
        superseded: those that tell earlier states of what it asks for.
        about: the passage about its subject, if none answers it.
    """

    question: str
    answers: tuple[str, ...]
    relation: str
    facts: tuple[Passage, ...] = ()
    superseded: tuple[Passage, ...] = ()
    about: tuple[Passage, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Story:
    """The passages of a document in their order, and the questions about them."""

    passages: tuple[Passage, ...]
    questions: tuple[Asked, ...]


@dataclass(kw_only=True)
class _Group:
    """Chains of passages that have to be told in their order, and questions about them."""

    chains: list[tuple[Passage, ...]] = field(default_factory=list)
    questions: list[Asked] = field(default_factory=list)


class _Teller:
    """Tells the facts of one document: two groups that are asked about, and others."""

    def __init__(self, split: Split, key: str) -> None:
        self.rng, self._book = random.Random(key), phrasebook(split)
        self._cast = Cast(self._book, self.rng)
        self._sides: dict[str, list[Relation]] = {}
        self._sides_told: set[tuple[Entity, str]] = set()

    def direct(self, *, reworded: bool = False) -> Iterator[_Group]:
        """Yield facts of three subjects, another fact about one of them, and questions for the three."""
        for relation in self._asked_about(self.rng.sample(self._book.relations, 2)):
            group = _Group()
            pairs = self._pairs(relation, 3)
            for subject, value in pairs:
                wording = self.rng.choice(relation.wordings)
                passage = self._passage(relation, wording, subject, value)
                asked = self._other(relation, wording) if reworded else wording
                question = render(self.rng.choice(asked.asked), subject, value)
                group.chains.append((passage,))
                group.questions.append(_answered(question, relation, value, facts=(passage,)))
            if side := self._side_passage(self.rng.choice(pairs)[0]):
                group.chains.append((side,))
            yield group

    def hops(self) -> Iterator[_Group]:
        """Yield two chains of two facts, the second about what the first names, and questions for the second."""
        relations = self._book.relations
        pairs = [(one, two) for one in relations for two in relations if one.phrases and two.subject == one.object]
        chosen = self.rng.sample([(one, two) for one, two in pairs if one != two], 2)
        self._asked_about([relation for pair in chosen for relation in pair])
        for first, second in chosen:
            group = _Group()
            for subject, middle in self._pairs(first, 2):
                value = self._value(second, middle)
                facts = (self._told(first, subject, middle), self._told(second, middle, value))
                phrase = Entity(name=fill(self.rng.choice(first.phrases), subject, middle))
                wording = self.rng.choice(second.wordings)
                question = render(self.rng.choice(wording.asked), phrase, value)
                group.chains.append(facts)
                group.questions.append(_answered(question, second, value, facts=facts))
            yield group

    def latest(self) -> Iterator[_Group]:
        """Yield two chains of states, and questions for the last of each."""
        changing = [(relation, relation.latest) for relation in self._book.relations if relation.latest]
        chosen = self.rng.sample(changing, 2)
        self._asked_about([relation for relation, _ in chosen], dated=True)
        for relation, wording in chosen:
            group = _Group()
            for _ in range(2):
                subject = self._cast.new(relation.subject)
                years = self._cast.years(self.rng.choice((2, 3)))
                values = [self._value(relation, subject) for _ in years]
                first = self._passage(relation, wording, subject, values[0], year=years[0])
                rest = [
                    self._passage(relation, wording, subject, value, year=year, later=True)
                    for value, year in zip(values[1:], years[1:], strict=True)
                ]
                states = (first, *rest)
                question = render(self.rng.choice(wording.asked), subject, values[-1])
                group.chains.append(states)
                group.questions.append(
                    _answered(question, relation, values[-1], facts=states[-1:], superseded=states[:-1])
                )
            yield group

    def absent(self) -> Iterator[_Group]:
        """Yield facts of three subjects, other facts about two more, and questions for what of these is not told."""
        for relation in self._asked_about(self.rng.sample(self._book.relations, 2)):
            pairs = self._pairs(relation, 3)
            group = _Group(chains=[(self._told(relation, subject, value),) for subject, value in pairs])
            answers = (NOT_TOLD, *(value.name for _, value in pairs))
            for subject, value in self._pairs(relation, 2):
                about = tuple(filter(None, [self._side_passage(subject)]))
                wording = self.rng.choice(relation.wordings)
                question = render(self.rng.choice(wording.asked), subject, value)
                group.chains.append(about)
                group.questions.append(Asked(question=question, answers=answers, relation=relation.name, about=about))
            yield group

    def _asked_about(self, relations: Sequence[Relation], *, dated: bool = False) -> Sequence[Relation]:
        """Return the relations that questions are about, after keeping them out of the other facts.

        Where these are `dated`, other years are kept out too, as a firm cannot move before it is founded.
        """
        for relation in self._book.relations:
            if relation not in relations and not (dated and relation.object == "year"):
                self._sides.setdefault(relation.subject, []).append(relation)
        for side in self._sides.values():
            self.rng.shuffle(side)
        return relations

    def _pairs(self, relation: Relation, number: int) -> list[tuple[Entity, Entity]]:
        """Return new subjects of a relation, each with its object."""
        subjects = [self._cast.new(relation.subject) for _ in range(number)]
        return [(subject, self._value(relation, subject)) for subject in subjects]

    def _value(self, relation: Relation, subject: Entity) -> Entity:
        return self._cast.new(relation.object, unlike=subject if relation.name == "married_to" else None)

    def _other(self, relation: Relation, wording: Wording) -> Wording:
        return self.rng.choice([other for other in relation.wordings if other != wording])

    def _told(self, relation: Relation, subject: Entity, value: Entity) -> Passage:
        return self._passage(relation, self.rng.choice(relation.wordings), subject, value)

    def _side_passage(self, subject: Entity) -> Passage | None:
        """Return a passage that tells something about a subject that no question is about; None if all was told."""
        relation = self._side(subject)
        if relation is None:
            return None
        return self._told(relation, subject, self._value(relation, subject))

    def _side(self, subject: Entity, *, but: Collection[str] = ()) -> Relation | None:
        """Return a relation to tell of a subject that no question is about, none twice; None if there is no other.

        `but` are kinds of objects that it may not have.
        """
        sides = self._sides[subject.kind]
        for relation in sides:
            if relation.object not in but and (subject, relation.name) not in self._sides_told:
                self._sides_told.add((subject, relation.name))
                sides.remove(relation)
                sides.append(relation)  # the others come first next time
                return relation
        return None

    def _passage(
        self,
        relation: Relation,
        wording: Wording,
        subject: Entity,
        value: Entity,
        *,
        year: int | None = None,
        later: bool = False,
    ) -> Passage:
        """Return a passage that tells a fact; where it says "she", the fact holds the sentence before it too."""
        style, templates = self.rng.random(), wording.told + (wording.later if later else ())
        if style < _PLAIN:
            fact = render(self.rng.choice(templates), subject, value, year=year)
        else:
            lead = self._cast.lead(subject) if style < _LED else self._side_sentence(subject)
            fact = f"{lead} {render(self.rng.choice(wording.pronoun), subject, value, year=year)}"
        tail = f" {self.rng.choice(self._book.tails)}" if self.rng.random() < _TAILED else ""
        return Passage(text=fact + tail, fact=fact, value=value.name)

    def _side_sentence(self, subject: Entity) -> str:
        """Return a sentence that tells something about a subject that no question is about; a lead if all was told.

        If it is no person, the sentence begins with it, so that "it" in the next one can mean nothing else.
        """
        relation = self._side(subject, but=_NAMED)
        templates = [template for wording in relation.wordings for template in wording.told] if relation else []
        templates = [template for template in templates if subject.kind == "person" or template.startswith("{S}")]
        if relation is None or not templates:
            return self._cast.lead(subject)
        return render(self.rng.choice(templates), subject, self._value(relation, subject))


_KINDS: Mapping[str, Callable[[_Teller], Iterator[_Group]]] = MappingProxyType(
    {
        "direct": _Teller.direct,
        "reworded": lambda teller: teller.direct(reworded=True),
        "hops": _Teller.hops,
        "latest": _Teller.latest,
        "absent": _Teller.absent,
    }
)
EVALUATION = tuple(f"prose_{kind}" for kind in _KINDS)
TRAINING = tuple(f"prose_train_{kind}" for kind in _KINDS)
NAMES = (*EVALUATION, *TRAINING)


def load(name: str, data: Data) -> Task:
    """Return one of the tasks."""
    training, kind = name in TRAINING, name.rpartition("_")[2]
    hay, questions = (data.books, _QUESTIONS) if training else (data.essays, 1)

    def make(length: int, seed: int, number: int, count: Counter) -> Sample:
        id = sample_id(name, length, seed, number)
        document, question = divmod(number, questions)
        key = f"{name}/{seed}/{document}"  # the same passages at each length
        story, rng = tell(kind, "training" if training else "evaluation", key), random.Random(f"{key}/places")
        filler = Cycled(hay, rng.getrandbits(32))
        texts = [passage.text for passage in story.passages]
        units = filled(name, filler, length, texts, count)
        places = [filler.place(units, depth) for depth in sorted(rng.random() for _ in texts)]
        depths = {passage: filler.depth(units, place) for passage, place in zip(story.passages, places, strict=True)}
        asked = story.questions[question]

        def facts(passages: Sequence[Passage]) -> tuple[Fact, ...]:
            return tuple(Fact(text=one.fact, depth=depths[one], keys=(one.value,)) for one in passages)

        relevant = {*asked.facts, *asked.superseded, *asked.about}
        return Sample(
            id=id,
            question=asked.question,
            answers=asked.answers,
            document=lambda: stream(filler, units, zip(places, texts, strict=True)),
            facts=facts(asked.facts),
            superseded=facts(asked.superseded),
            oracle="\n".join(passage.text for passage in story.passages if passage in relevant),
            details={"document": document, "relation": asked.relation, "units": units, "passages": len(texts)},
        )

    metric = "abstention" if kind == "absent" else "em" if training else "sub_em"
    lengths = TRAINING_LENGTHS if training else RULER_LENGTHS
    return Task(name=name, metric=metric, make=make, lengths=lengths, questions=questions)


def tell(kind: str, split: Split, key: str) -> Story:
    """Return the passages of a document and the questions about them; the same arguments return the same."""
    teller = _Teller(split, key)
    groups = list(_KINDS[kind](teller))
    chains = [chain for group in groups for chain in group.chains]
    turns = [number for number, chain in enumerate(chains) for _ in chain]
    teller.rng.shuffle(turns)
    rest = [iter(chain) for chain in chains]
    questions = [asked for pair in zip(*(group.questions for group in groups), strict=True) for asked in pair]
    return Story(passages=tuple(next(rest[number]) for number in turns), questions=tuple(questions))


def _answered(
    question: str,
    relation: Relation,
    value: Entity,
    *,
    facts: tuple[Passage, ...],
    superseded: tuple[Passage, ...] = (),
) -> Asked:
    forms = (form.format(O=value.name) for form in relation.also)
    answers = (value.name, *forms, *filter(None, [value.surname]))
    return Asked(question=question, answers=answers, relation=relation.name, facts=facts, superseded=superseded)
