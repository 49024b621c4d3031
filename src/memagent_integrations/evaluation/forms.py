"""The forms in which the data sets write their questions, paragraphs and stories, and what they are read into."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import compress
from operator import not_
from pathlib import Path
from typing import Any

from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation.rows import (
    Row,
    decoded,
    integer,
    lines,
    pairs,
    string,
    strings,
    where_of,
)


@dataclass(frozen=True, kw_only=True)
class Paragraph:
    """A paragraph of an encyclopedia. `title` is empty where the data set has none."""

    title: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question, its alternative answers, the paragraphs that answer it, and similar ones that do not (`near`)."""

    id: str
    question: str
    answers: tuple[str, ...]
    gold: tuple[Paragraph, ...]
    near: tuple[Paragraph, ...]


@dataclass(frozen=True, kw_only=True)
class Story:
    """Sentences in the order of events, a question, its answer, and the indices of the sentences that give it."""

    facts: tuple[str, ...]
    question: str
    answer: str
    support: tuple[int, ...]


def hotpot(row: Row, where: str) -> Question:
    """Return a question of HotpotQA from a row of its files; `where` is for messages, here and below."""
    titles = {str(title) for title, _ in pairs(row, "supporting_facts", where)}
    paragraphs = [
        Paragraph(title=str(title), text="".join(_sentences(sentences, where)).strip())
        for title, sentences in pairs(row, "context", where)
    ]
    gold = tuple(paragraph for paragraph in paragraphs if paragraph.title in titles)
    if not gold or len(gold) != len(titles):
        raise UsageError(f"{where}: a paragraph that supporting_facts names is not in context")
    return Question(
        id=string(row, "id", where),
        question=string(row, "question", where),
        answers=(string(row, "answer", where),),
        gold=gold,
        near=tuple(paragraph for paragraph in paragraphs if paragraph.title not in titles),
    )


def _sentences(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(sentence, str) for sentence in value):
        raise UsageError(f"{where}: the field 'context' has to hold pairs of a title and a list of sentences")
    return value


def as_in_file(row: Row) -> Row:
    """Convert a row of HotpotQA from the hub's form, with columns, to that of its files, with pairs."""
    facts, context = row["supporting_facts"], row["context"]
    return {
        **row,
        "supporting_facts": list(zip(facts["title"], facts["sent_id"], strict=True)),
        "context": list(zip(context["title"], context["sentences"], strict=True)),
    }


def musique(row: Row, where: str) -> Question:
    """Return a question of MuSiQue, which has its paragraphs."""
    items = row.get("paragraphs")
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise UsageError(f"{where}: the field 'paragraphs' has to be a list of objects")
    paragraphs = [
        Paragraph(title=string(item, "title", where), text=string(item, "paragraph_text", where).strip())
        for item in items
    ]
    supports = [bool(item.get("is_supporting")) for item in items]
    gold = tuple(compress(paragraphs, supports))
    if not gold:
        raise UsageError(f"{where}: none of the paragraphs is supporting")
    aliases = strings(row, "answer_aliases", where) if row.get("answer_aliases") else ()
    return Question(
        id=string(row, "id", where),
        question=string(row, "question", where),
        answers=tuple(dict.fromkeys((string(row, "answer", where), *aliases))),
        gold=gold,
        near=tuple(compress(paragraphs, map(not_, supports))),
    )


def paragraph(row: Row, where: str) -> Paragraph:
    """Return a paragraph of a file of paragraphs."""
    return Paragraph(title=string(row, "title", where), text=string(row, "text", where).strip())


ParagraphKey = tuple[str, int]
"""The title of an article of SQuAD, and the number of a paragraph in it."""
SquadQuestion = tuple[str, str, tuple[str, ...], ParagraphKey]
"""Id, question, answers, and the paragraph that it is about."""


def squad_question(row: Row, where: str) -> SquadQuestion | None:
    """Return a question of SQuAD 2.0 from a row of the questions; None if it has no answer."""
    if row.get("is_impossible"):
        return None
    key = (string(row, "title", where), integer(row, "paragraph", where))
    return string(row, "id", where), string(row, "question", where), strings(row, "answers", where), key


def squad_paragraph(row: Row, where: str) -> tuple[str, int, str]:
    """Return the title of the article, the number of the paragraph in it, and its text."""
    return string(row, "title", where), integer(row, "paragraph", where), string(row, "context", where).strip()


def squad_of_hub(rows: Iterable[Row]) -> tuple[list[SquadQuestion | None], dict[ParagraphKey, str]]:
    """Return the questions, and the text of each paragraph, numbered in the order of the questions."""
    questions: list[SquadQuestion | None] = []
    numbers: dict[tuple[str, str], int] = {}
    for row in rows:
        number = numbers.setdefault((row["title"], row["context"].strip()), len(numbers))
        answers = tuple(row["answers"]["text"])
        questions.append((row["id"], row["question"], answers, (row["title"], number)) if answers else None)
    return questions, {(title, number): text for (title, text), number in numbers.items()}


def squad(rows: Iterable[SquadQuestion | None], texts: Mapping[ParagraphKey, str], source: str) -> tuple[Question, ...]:
    """Return the questions with their paragraphs; `source` names these in messages."""
    articles: dict[str, list[Paragraph]] = {}
    paragraphs = {key: Paragraph(title="", text=text) for key, text in texts.items()}
    for (title, _), paragraph in paragraphs.items():
        articles.setdefault(title, []).append(paragraph)
    questions = []
    for id, question, answers, (title, number) in filter(None, rows):
        if (title, number) not in paragraphs:
            raise UsageError(f"{source} has no paragraph {number} of {title!r}, which question {id} is about")
        gold = paragraphs[title, number]
        near = tuple(paragraph for paragraph in articles[title] if paragraph != gold)
        unique = tuple(dict.fromkeys(answers))
        questions.append(Question(id=id, question=question, answers=unique, gold=(gold,), near=near))
    return tuple(questions)


def stories(path: Path) -> Iterator[Story]:
    """Yield the questions of a file of bAbI, each with the sentences before it."""
    sentences: dict[int, str] = {}  # those of the current story, by their numbers in the file
    for number, _, line in lines(path):
        where = where_of(path, number)
        index, _, text = decoded(line, where).strip().partition(" ")
        if not index.isdecimal() or not text:
            raise UsageError(f"{where}: a line of bAbI is a number and a sentence")
        if int(index) == 1:
            sentences = {}
        question, *rest = text.split("\t")
        if not rest:
            sentences[int(index)] = text
            continue
        try:
            answer, numbers = rest
            support = tuple(list(sentences).index(int(number)) for number in numbers.split())
        except ValueError as error:
            raise UsageError(
                f"{where}: a question of bAbI has an answer and the numbers of the sentences that give it, "
                "separated by tabs"
            ) from error
        facts = tuple(sentences.values())
        yield Story(facts=facts, question=question.strip(), answer=answer.strip(), support=support)


def story(row: Row, where: str) -> Story:
    """Return a question of bAbI from a row of the hub. It does not tell which sentences give the answer: all may."""
    facts = tuple(line.strip() for line in string(row, "passage", where).splitlines() if line.strip())
    return Story(
        facts=facts,
        question=string(row, "question", where),
        answer=string(row, "answer", where),
        support=tuple(range(len(facts))),
    )
