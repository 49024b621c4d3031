"""Questions that rules make from a sentence of an encyclopedia: who, which, what, when, where, how many.

Each answer is a part of the sentence, and each question names what the sentence tells of, or all that it says of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

_LEAST, _MOST = 6, 45  # words of a sentence
_LONGEST = 40  # words of a question

_PAST = {"written": "wrote", "sung": "sang", "drawn": "drew", "given": "gave", "taken": "took"}  # of participles
_LEMMAS = {  # of verbs in the past
    "became": "become", "began": "begin", "won": "win", "made": "make", "wrote": "write", "led": "lead", "took": "take",
    "held": "hold", "left": "leave", "ran": "run", "sold": "sell", "sang": "sing", "lost": "lose", "built": "build",
    "met": "meet", "taught": "teach", "married": "marry", "studied": "study",
}  # fmt: skip
_LEMMAS |= {f"{verb}d": verb for verb in (
    "die", "move", "release", "close", "serve", "graduate", "retire", "merge", "produce", "compete", "premiere",
    "arrive", "live", "cease", "change", "create", "acquire", "announce",
)}  # fmt: skip
_LEMMAS |= {f"{verb}ed": verb for verb in (
    "join", "sign", "open", "play", "publish", "found", "debut", "return", "start", "end", "appear", "work", "direct",
    "represent", "air", "earn", "form", "record", "attend", "enter",
)}  # fmt: skip
_OTHER_DEEDS = ("followed", "preceded", "surrounded", "bordered", "used", "inspired", "influenced")  # are not done once

_VERBS = "|".join(_LEMMAS)
_MONTH = "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
_DATE = rf"(?:\d{{1,2}} {_MONTH} \d{{4}}|{_MONTH} \d{{1,2}}, \d{{4}}|{_MONTH} \d{{4}}|1\d{{3}}|20\d\d)"
_NAME = r"[A-Z][\w.'’-]*(?: (?:(?:of|the|de|da|di|van|von|der|and|in|for|&) )*[A-Z\d][\w.'’-]*)*"
_NUMBER = r"(?:\d[\d,.]*\d|\d|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty)"
_SUBJECT = rf"(?P<subject>(?:The )?{_NAME}|The [\w' -]*?[A-Z\d][\w' -]*?)"
_IS = rf"{_SUBJECT} (?P<verb>is|was|are|were)"

_OPENING = re.compile(  # of a sentence that does not begin with a name
    r"(?:He|She|It|They|His|Her|Its|Their|This|These|That|Those|There|In|On|At|As|After|Another|When|According|If|While|"
    r"Although|Since|During|For|With|From|By|Both|Some|Many|Most|One|Also|However|But|And|What|Where|Who|The \w+ "
    r"(?:is|was|are|were|has|had))\b"
)
_ASIDE = re.compile(r" ?\([^()]*\)")
_PERSON = re.compile(r"\b(?:He|She)\b|\(born ")
_THING = re.compile(
    r"\b(?:film|album|series|show|sitcom|book|novel|song|single|band|game|company|town|city|village|building|skyscraper|"
    r"school|community|team|club|magazine|war|battle|station|area|river|island|place|event|season|award)s?\b"
)
_DEFINED = re.compile(rf"{_IS} (?P<what>(?:an?|the|one of the) [^;:]+)\.")
_KIND = re.compile(
    r"(?:an?|the) (?P<kind>[\w-]+(?: [\w-]+){0,5}?)(?<!ed)(?<!active)(?<!available) (?P<who>who )?"
    r"(?P<rest>(?P<past>(?:written|directed|released|published|recorded|founded|produced|created|developed) )?"
    r"(?(past)|(?:(?(who)|(?:by|in|from|starring|located|based|for) ))).+)"
)
_WHAT_ENDS = re.compile(r", | and (?=\w+ (?:the|an?|in|to|for)\b)| which | that ")
_DONE_BY = re.compile(
    rf"{_SUBJECT}(?:,[^,]+,)? (?P<verb>is|was|are|were) [^;:]*?\b"
    rf"(?P<done>\w+ed|{'|'.join(_PAST)}|made|built|won|held|led) by (?:[\w-]+ ){{0,5}}?(?P<name>{_NAME})"
)
_DONE_THEN = re.compile(
    rf"{_IS} (?P<done>\w+(?:ed|en|un|ilt|ade|orn|eld|old|ung)\b[^,;:()]*?) (?:in|on) (?P<date>{_DATE})\b"
)
_DID_THEN = re.compile(rf"{_SUBJECT} (?P<verb>{_VERBS}) (?P<rest>[^,;:()]*?) ?(?:in|on) (?P<date>{_DATE})\b")
_DONE_THERE = re.compile(
    rf"{_IS} (?:[^,;:()]*?)?\b(?P<done>located|situated|based|headquartered|buried|born|educated|raised|filmed|held) "
    rf"(?:in|at|near) (?P<place>(?:the )?{_NAME}(?:, {_NAME})*)"
)
_BORN = re.compile(rf"(?P<name>{_NAME})[^()]*\((?:[^()]*?[;,] ?)??(?:born|b\.) (?P<date>{_DATE})")
_LIVED = re.compile(rf"(?P<name>{_NAME})[^()]*\((?:[^()]*?[;,] ?)??(?P<born>{_DATE}) ?[–-] ?(?P<died>{_DATE})\)")
_HAS = re.compile(
    rf"{_SUBJECT} (?P<verb>has|had|have|contains|contained) (?:[a-z]+ ){{0,3}}?(?P<number>{_NUMBER}) "
    r"(?P<what>[a-z][a-z -]*s)\b"
)
_POPULATION = re.compile(
    rf"(?P<place>{_NAME})(?<!'s)\b[^;:]*?\bpopulation (?:of|was|is) (?:[a-z]+ )?(?P<number>\d[\d,.]*\d)"
)
_DID = re.compile(rf"(?P<subject>{_NAME}) (?P<rest>(?:{_VERBS}) [^;:]+)\.")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question, and the part of the sentence that answers it."""

    question: str
    answer: str


def asked_of(sentence: str, paragraph: str) -> Iterator[Asked]:
    """Yield the questions that the rules make from a sentence of a paragraph; none from most sentences."""
    if not _LEAST <= len(sentence.split()) <= _MOST or _OPENING.match(sentence) or not sentence.endswith("."):
        return
    plain = _ASIDE.sub("", sentence)
    person = _PERSON.search(paragraph) is not None
    rules = (_what(plain, person), _who(plain), _when(plain), _where(plain), _lifetime(sentence), _how_many(plain))
    for question, answer in chain.from_iterable(rules):
        answer = answer.strip(" ,.")
        told = answer.lower() in question.lower()
        if answer and answer in sentence and not told and len(question.split()) <= _LONGEST:
            yield Asked(question=question, answer=answer)


Pairs = Iterator[tuple[str, str]]


def _what(plain: str, person: bool) -> Pairs:
    """Yield a question for what the sentence defines."""
    match = _DEFINED.fullmatch(plain)
    if not match or re.search(r" (?:is|was|are|were|which) ", match["subject"]):
        return
    what, verb = _WHAT_ENDS.split(match["what"])[0], match["verb"]
    if len(what.split()) < 5 or not re.search(r"[A-Z\d]", what):  # may be said of many
        return
    if kind := _KIND.match(what):
        verb = "was" if kind["past"] else verb
        yield f"Which {kind['kind']} {'' if kind['who'] else f'{verb} '}{kind['rest']}?", match["subject"]
    else:
        yield f"{'Who' if person and not _THING.search(what) else 'What'} {verb} {what}?", match["subject"]


def _who(plain: str) -> Pairs:
    for deed in _DONE_BY.finditer(plain):
        if deed["done"] not in _OTHER_DEEDS:
            subject = _inside(deed["subject"])
            yield f"Who {_PAST.get(deed['done'], deed['done'])} {subject}?", deed["name"]
            yield f"By whom {deed['verb']} {subject} {deed['done']}?", deed["name"]
    if (match := _DID.fullmatch(plain)) and len(match["rest"].split()) >= 4:
        yield f"Who {match['rest'].split(', ')[0]}?", match["subject"]


def _when(plain: str) -> Pairs:
    if match := _DONE_THEN.match(plain):
        asked = f"{'In which year' if len(match['date']) == 4 else 'When'} {match['verb']} {_inside(match['subject'])}"
        yield f"{asked} {match['done']}?", match["date"]
    if match := _DID_THEN.match(plain):
        deed = f"{_LEMMAS[match['verb']]} {match['rest']}".rstrip()
        yield f"When did {_inside(match['subject'])} {deed}?", match["date"]


def _where(plain: str) -> Pairs:
    if match := _DONE_THERE.match(plain):
        yield f"Where {match['verb']} {_inside(match['subject'])} {match['done']}?", match["place"]


def _lifetime(sentence: str) -> Pairs:
    if match := _BORN.match(sentence):
        yield f"When was {match['name']} born?", match["date"]
    elif match := _LIVED.match(sentence):
        yield f"When was {match['name']} born?", match["born"]
        yield f"When did {match['name']} die?", match["died"]


def _how_many(plain: str) -> Pairs:
    if match := _POPULATION.match(plain):
        yield f"What is the population of {match['place']}?", match["number"]
        yield f"How many people live in {match['place']}?", match["number"]
    if match := _HAS.match(plain):
        do = "did" if match["verb"].endswith("d") else "do" if match["verb"] == "have" else "does"
        have = "contain" if match["verb"].startswith("contain") else "have"
        yield f"How many {match['what']} {do} {_inside(match['subject'])} {have}?", match["number"]


def _inside(subject: str) -> str:
    """Return a subject as it is written inside a sentence."""
    return f"the {subject[4:]}" if subject.startswith("The ") else subject
