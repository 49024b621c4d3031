r"""Metrics as the published code of the benchmarks computes them, so that a score can stand beside a published one.

They give the score of that code for every answer and every gold, also where its rule is surprising; the docstrings say
where. `benchmarks/conformance.py` runs the published code on the same inputs and compares. The metrics that this
package prefers are in `scoring`.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from memagent_integrations.errors import UsageError

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_LEAD = "the answer is"
_TURNS = ("<｜Assistant｜>", "<｜end▁of▁sentence｜>")
_BOX, _BOX_WITH_SPACE = "\\boxed{", "\\boxed "
_REWARDED = 300  # characters at the end of a reply
_LATEX = (  # one after the other
    ("\n", ""),
    ("\\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("\\$", ""),
    ("\\%", ""),
    ("\\%", ""),
    (" .", " 0."),
    ("{.", "{0."),
    (" ", ""),
)
_EXAMPLES = ("<context>", "<example>")


def squad_normalised(text: str) -> str:
    """Return the text in lower case, without ASCII punctuation, English articles and superfluous space.

    Source: the evaluation script of SQuAD 1.1 (arXiv:1606.05250), which HotpotQA, LongBench and MemAgent share.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def memagent_sub_em(reply: str, golds: Sequence[str]) -> float:
    """Return 1.0 if the answer in a reply contains the first gold, or the gold the answer, after `squad_normalised`.

    The answer is what follows the last "the answer is" (after `</think>`, if that stands in the reply); without it the
    score is 0. An answer of nothing but punctuation or articles counts as right, because it is empty and every gold
    contains it. For the unprocessed reply. Source: the evaluation of RULER-HQA of MemAgent (arXiv:2507.02259,
    taskutils/memory_eval/ruler_hqa.py) in its configuration "recurrent", that of the published figures.
    """
    return _two_way(_stated(_after_thinking(reply)), golds)


def memagent_boxed_sub_em(reply: str, golds: Sequence[str]) -> float:
    r"""Return what `memagent_sub_em` does, with the content of the last \boxed{} as the answer; 0.0 without one.

    Where the published code stops with an error, because a reply has \fbox or a broken box, this is 0.0. Source: as
    there, its configuration "boxed".
    """
    return _two_way(_boxed(_after_thinking(reply)), golds)


def verl_boxed_em(reply: str, golds: Sequence[str]) -> float:
    r"""Return 1.0 if the content of the last \boxed{} equals one of the golds; 0.0 without one.

    Only the last 300 characters of the reply count. Case, spaces and line ends are ignored and a few spellings of LaTeX
    are alike; articles and punctuation are kept. For the unprocessed reply. Source: the reward of MemAgent
    (arXiv:2507.02259, verl/utils/reward_score/hotpotqa.py).
    """
    box = _boxed(reply[-_REWARDED:].lower())
    wanted = {_without_latex(gold.lower()) for gold in checked(golds)}
    return float(box is not None and _without_latex(box) in wanted)


def babilong(answer: str, golds: Sequence[str]) -> float:
    """Return 1.0 if the first sentence of the answer names the first gold and none of the other golds.

    The first gold is the target (several, separated by commas, where all of them are wanted), the others are the labels
    of the task that the question does not mention; all are compared in lower case, as substrings. Source: BABILong
    (arXiv:2406.10149, babilong/metrics.py).
    """
    target, *others = (gold.lower() for gold in checked(golds))
    wanted = target.split(",") if len(target) > len("e,n") else [target]
    said = answer.lower().split(".")[0]
    for example in _EXAMPLES:
        said = said.split(example)[0]
    named = [label for label in {*wanted, *others} if label in said]
    return float(sorted(named) == sorted(wanted))


def babilong_golds(target: str, question: str, labels: Sequence[str]) -> tuple[str, ...]:
    """Return the golds of `babilong`: the target, and the other labels of its task that the question does not mention.

    The published code never counts a label that the question mentions.
    """
    mentioned, wanted = question.lower(), target.lower().split(",")
    return target, *(label for label in labels if label.lower() not in mentioned and label.lower() not in wanted)


def longbench_f1(answer: str, golds: Sequence[str]) -> float:
    """Return the harmonic mean of the words' precision and recall after `squad_normalised`, for the best of the golds.

    0.0 where nothing is left of the answer or the gold. Source: LongBench (arXiv:2308.14508), qa_f1_score of metrics.py
    and the largest over all golds of eval.py.
    """
    return word_f1(answer, golds, squad_normalised)


def word_f1(answer: str, golds: Sequence[str], normalised: Callable[[str], str]) -> float:
    """Return the harmonic mean of the words' precision and recall, for the best of the golds."""
    said = Counter(normalised(answer).split())
    return max(_overlap(said, Counter(normalised(gold).split())) for gold in checked(golds))


def checked(golds: Sequence[str]) -> Sequence[str]:
    """Return the golds of a metric.

    Raises:
        UsageError: there are none, one is empty, or they are one string.
    """
    if isinstance(golds, str):
        raise UsageError(f"golds has to be a sequence of answers, not one string: [{golds[:60]!r}]")
    if not golds or not all(gold.strip() for gold in golds):
        raise UsageError(f"there has to be at least one gold answer, and none may be empty: {list(golds)!r}")
    return golds


def _after_thinking(reply: str) -> str:
    return reply.rsplit("</think>", 1)[-1].strip() or reply.strip()


def _stated(reply: str) -> str | None:
    """Return what follows the last "the answer is"; None without it."""
    _, lead, answer = reply.replace("*", "").rpartition(_LEAD)
    if not lead:
        return None
    answer = answer.strip()
    for turn in _TURNS:
        answer = answer.replace(turn, "")
    return answer.strip().strip(".").strip()


def _boxed(reply: str) -> str | None:
    r"""Return the content of the last \boxed{...}, or all that follows the last "\boxed " up to a $; None if broken."""
    _, spaced, rest = reply.rpartition(_BOX_WITH_SPACE)
    if spaced:
        return rest.split("$")[0]
    start = reply.rfind("\\boxed")
    if start < 0 or not reply.startswith(_BOX, start):
        return None
    depth = 0
    for brace in re.finditer(r"[{}]", reply[start:]):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return reply[start + len(_BOX) : start + brace.start()]
    return None


def _two_way(answer: str | None, golds: Sequence[str]) -> float:
    gold = squad_normalised(checked(golds)[0])
    said = squad_normalised(answer or "")
    return float(bool(answer) and (gold in said or said in gold))


def _without_latex(text: str) -> str:
    for old, new in _LATEX:
        text = text.replace(old, new)
    return text


def _overlap(answer_words: Counter[str], gold_words: Counter[str]) -> float:
    common = (answer_words & gold_words).total()
    return 2 * common / (answer_words.total() + gold_words.total()) if common else 0.0
