r"""How right an answer is: one short function a metric, each with its source, from 0.0 (wrong) to 1.0 (right).

A metric takes the answer and the golds. It raises `UsageError` where there is no gold to compare with; an empty answer is a wrong one. The time it
takes grows with the length of the answer and no faster.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from memagent_integrations.errors import UsageError
from memagent_integrations.prompts import last_boxed

Metric = Callable[[str, Sequence[str]], float]

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = {"yes", "no", "noanswer"}


def normalise(text: str) -> str:
    """The text in small letters, without ASCII punctuation, English articles and superfluous space.

    Source: the evaluation script of SQuAD 1.1 (arXiv:1606.05250), which HotpotQA and LongBench share. It differs where nothing would be left, of the
    option "A" or the sign "+" for example, and any two such answers would be equal: only the case and the space are then made alike.
    """
    lower = text.lower()
    return " ".join(_ARTICLES.sub(" ", lower.translate(_NO_PUNCTUATION)).split()) or " ".join(lower.split())


def em(answer: str, golds: Sequence[str]) -> float:
    """1.0 if the answer is one of the golds after `normalise`. Source: SQuAD (arXiv:1606.05250), section 6.1."""
    return float(normalise(answer) in {normalise(gold) for gold in _checked(golds)})


def f1(answer: str, golds: Sequence[str]) -> float:
    """The best harmonic mean of precision and recall of the words, over the golds, after `normalise`.

    Source: SQuAD (arXiv:1606.05250), section 6.1; LongBench (arXiv:2308.14508) takes it for question answering.
    """
    said = Counter(normalise(answer).split())
    return max(_overlap(said, Counter(normalise(gold).split())) for gold in _checked(golds))


def qa_f1(answer: str, golds: Sequence[str]) -> float:
    """`f1`, but where the answer or the gold is yes, no or noanswer, only the same word counts.

    Source: HotpotQA (arXiv:1809.09600), hotpot_evaluate_v1.py.
    """
    said, closed = normalise(answer), {normalise(gold) for gold in _checked(golds)} & _CLOSED
    if said in _CLOSED:
        return float(said in closed)
    others = [gold for gold in golds if normalise(gold) not in closed]
    return f1(answer, others) if others else 0.0


def sub_em(answer: str, golds: Sequence[str]) -> float:
    """1.0 if one of the golds stands in the answer, both after `normalise`.

    Source: substring exact match of HELMET (arXiv:2410.02694); MemAgent's rows of RULER-HQA (arXiv:2507.02259, its ruler_hqa.py) are a sub-EM too.
    """
    said = normalise(answer)
    return float(any(normalise(gold) in said for gold in _checked(golds)))


def string_match_all(answer: str, golds: Sequence[str]) -> float:
    """The share of the golds that stand in the answer, in any case. Source: RULER (arXiv:2404.06654), string_match_all."""
    said = answer.lower()
    return sum(gold.lower() in said for gold in _checked(golds)) / len(golds)


def string_match_part(answer: str, golds: Sequence[str]) -> float:
    """1.0 if any of the golds stands in the answer, in any case. Source: RULER (arXiv:2404.06654), string_match_part."""
    said = answer.lower()
    return float(any(gold.lower() in said for gold in _checked(golds)))


def boxed_em(answer: str, golds: Sequence[str]) -> float:
    r"""`em` of what the last \boxed{} of the answer holds; 0.0 without one.

    It is for the model's reply as it came: prompts whose answer_format is "boxed" have taken the box off `Reading.answer`. Source: the reward of
    MemAgent (arXiv:2507.02259), the largest over all golds.
    """
    box = last_boxed(answer)
    _checked(golds)
    return 0.0 if box is None else em(box, golds)


METRICS: Mapping[str, Metric] = MappingProxyType(
    {metric.__name__: metric for metric in (em, f1, qa_f1, sub_em, string_match_all, string_match_part, boxed_em)}
)
"""The metrics by their names."""


def _checked(golds: Sequence[str]) -> Sequence[str]:
    if isinstance(golds, str):
        raise UsageError(f"golds has to be a sequence of answers, not one string: [{golds[:60]!r}]")
    if not golds or not all(gold.strip() for gold in golds):
        raise UsageError(f"there has to be at least one gold answer, and none may be empty: {list(golds)!r}")
    return golds


def _overlap(said: Counter[str], wanted: Counter[str]) -> float:
    return 2 * (said & wanted).total() / (said.total() + wanted.total())
