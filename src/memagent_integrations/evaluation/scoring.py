r"""Metrics: one short function each, which names its source and scores an answer from 0.0 (wrong) to 1.0 (right).

A metric takes the answer and the golds. An empty answer is wrong; without a gold to compare with, a metric raises
`UsageError`. Its run time grows linearly with the length of the answer. Where published code has a rule of its own, the
metric that equals it is in `official`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from memagent_integrations.evaluation.official import (
    babilong,
    checked,
    longbench_f1,
    memagent_boxed_sub_em,
    memagent_sub_em,
    squad_normalised,
    verl_boxed_em,
    word_f1,
)
from memagent_integrations.prompts import last_boxed

Metric = Callable[[str, Sequence[str]], float]

_CLOSED = {"yes", "no", "noanswer"}
_ABSTAINS = re.compile(
    r"\b(?:not|never|cannot|cant|doesnt|dont|didnt|isnt|arent|wasnt|werent|hasnt|nothing|nowhere)(?: \w+){0,2}? "
    r"(?:say|said|tell|told|mention(?:ed)?|state[ds]?|specif(?:y|ied)|give[ns]?|provided?|contain(?:ed)?|include[ds]?|"
    r"indicated?|record(?:ed)?|reveal(?:ed)?|known?|named?|found|answer(?:ed)?|determined?|available|clear|hold|appear|"
    r"in (?:\w+ )?(?:text|memory|document|passages?))\b"
    r"|\bno (?:\w+ )?(?:information|mention|answer|indication|record)\b"
    r"|\b(?:unknown|unanswerable|unspecified|unstated|undisclosed)\b"
)


def normalise(text: str) -> str:
    """Return the text in lower case, without ASCII punctuation, English articles and superfluous space.

    That is `squad_normalised`, with one difference: where nothing would be left, of the option "A" or the sign "+" for
    example, only case and space are normalised, because otherwise all such answers would be equal.
    """
    return squad_normalised(text) or " ".join(text.lower().split())


def em(answer: str, golds: Sequence[str]) -> float:
    """Return 1.0 if the answer equals one of the golds after `normalise`.

    Source: SQuAD (arXiv:1606.05250), section 6.1.
    """
    return float(normalise(answer) in {normalise(gold) for gold in checked(golds)})


def f1(answer: str, golds: Sequence[str]) -> float:
    """Return the harmonic mean of the words' precision and recall after `normalise`, for the best of the golds.

    Source: SQuAD (arXiv:1606.05250), section 6.1.
    """
    return word_f1(answer, golds, normalise)


def qa_f1(answer: str, golds: Sequence[str]) -> float:
    """Return `f1`, but where the answer or the gold is yes, no or noanswer, only an equal answer counts.

    Source: HotpotQA (arXiv:1809.09600), hotpot_evaluate_v1.py.
    """
    normal, closed_golds = normalise(answer), {normalise(gold) for gold in checked(golds)} & _CLOSED
    if normal in _CLOSED:
        return float(normal in closed_golds)
    open_golds = [gold for gold in golds if normalise(gold) not in closed_golds]
    return f1(answer, open_golds) if open_golds else 0.0


def sub_em(answer: str, golds: Sequence[str]) -> float:
    """Return 1.0 if the answer contains one of the golds, both after `normalise`.

    Source: substring exact match of HELMET (arXiv:2410.02694). Stricter than `memagent_sub_em`, which also takes an
    answer that a gold contains.
    """
    normal = normalise(answer)
    return float(any(normalise(gold) in normal for gold in checked(golds)))


def string_match_all(answer: str, golds: Sequence[str]) -> float:
    """Return the share of the golds that the answer contains, ignoring case.

    Source: RULER (arXiv:2404.06654), string_match_all.
    """
    lower = answer.lower()
    return sum(gold.lower() in lower for gold in checked(golds)) / len(golds)


def string_match_part(answer: str, golds: Sequence[str]) -> float:
    """Return 1.0 if the answer contains any of the golds, ignoring case.

    Source: RULER (arXiv:2404.06654), string_match_part.
    """
    lower = answer.lower()
    return float(any(gold.lower() in lower for gold in checked(golds)))


def boxed_em(answer: str, golds: Sequence[str]) -> float:
    r"""Return the `em` of the content of the last \boxed{} of the answer; 0.0 without one.

    For the unprocessed reply. This package's own: it forgives articles and punctuation, which the reward of MemAgent
    (`verl_boxed_em`) does not, and takes a box anywhere in the reply.
    """
    content = last_boxed(answer)
    checked(golds)
    return 0.0 if content is None else em(content, golds)


def abstention(answer: str, golds: Sequence[str]) -> float:
    """Return 1.0 if the answer says that the text does not tell, and names no value that belongs to something else.

    The first gold is a right answer, the others are those values. After `normalise`, the answer has to be the first
    gold, or to deny in English that something is told, known or found ("it is not mentioned", "there is no
    information", "unknown"); and none of the values may stand in it as whole words. Source: the questions of SQuAD 2.0
    without an answer (arXiv:1806.03822), whose right answer is to abstain.
    """
    right, *values = map(normalise, checked(golds))
    normal = normalise(answer.replace("’", "'"))
    abstains = normal == right or _ABSTAINS.search(normal) is not None
    return float(abstains and not any(f" {value} " in f" {normal} " for value in values))


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        metric.__name__: metric
        for metric in (
            *(em, f1, qa_f1, sub_em, string_match_all, string_match_part, boxed_em, abstention),
            *(memagent_sub_em, memagent_boxed_sub_em, verl_boxed_em, babilong, longbench_f1),
        )
    }
)
"""The metrics by name."""
OF_REPLIES = frozenset({"memagent_sub_em", "memagent_boxed_sub_em", "verl_boxed_em", "boxed_em"})
"""The metrics that take the model's unprocessed reply, with what the answer is extracted from."""
SKIP_EMPTY = frozenset({"memagent_sub_em", "memagent_boxed_sub_em"})
"""The metrics whose published code leaves samples without an answer, failed ones included, out of the mean."""
