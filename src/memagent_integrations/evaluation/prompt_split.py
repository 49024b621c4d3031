"""Split the prompt of a benchmark into document and question."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memagent_integrations.errors import UsageError

# The text before the document and the question behind it. Source: RULER (arXiv:2404.06654), in the wording of
# lm-evaluation-harness.
_RULER = {
    "niah": (
        r"(?:A|Some) special magic \w+ (?:is|are) hidden within the following text\. Make sure to memorize it\. "
        r"I will quiz you about the \w+ afterwards\.\n",
        r"\nWhat (?:is|are all) the special magic \w+ for [^\n]+ mentioned in the provided text\?",
    ),
    "vt": (
        r"Memorize and track the chain\(s\) of variable assignment hidden in the following text\.\n\n",
        r"\nQuestion: Find all variables that are assigned the value \d+ in the text above\.",
    ),
    "cwe": (
        r"Below is a numbered list of words\. In these words, some appear more often than others\. "
        r"Memorize the ones that appear most often\.\n",
        r"\nQuestion: What are the 10 most common words in the above list\?",
    ),
    "fwe": (
        r"Read the following coded text and track the frequency of each coded word\. "
        r"Find the three most frequently appeared coded words\. ",
        r"\nQuestion: Do not provide any explanation\. Please ignore the dots '\.\.\.\.'\. "
        r"What are the three most frequently appeared words in the above coded text\?",
    ),
    "qa": (
        r"Answer the question based on the given documents\. "
        r"Only give me the answer and do not output any other words\.\n\nThe following are given documents\.\n\n",
        r"\n\nAnswer the question based on the given documents\. "
        r"Only give me the answer and do not output any other words\.\n\nQuestion: [^\n]*?",
    ),
}
_PREFIX = r"\s{0,4}(?:Answer:|The special magic )[^\n]*"
_FORMS = [
    (re.compile(before), re.compile(rf"(?P<question>{question})(?P<prefix>{_PREFIX})?\Z"))
    for before, question in _RULER.values()
]
_FIELDS = ("context", "passage", "document", "article", "story", "input")
_CUE = re.compile(r"\n{1,4}[^\n?]{1,60}:\s*\Z")


@dataclass(frozen=True, kw_only=True)
class SplitPrompt:
    """A prompt in four parts, which joined give the prompt again.

    Attributes:
        before: the text before the document: the instruction, solved examples.
        document: the document.
        question: the text behind it.
        prefix: the beginning of the answer, which the model is to continue.
    """

    before: str
    document: str
    question: str
    prefix: str

    @property
    def prompt(self) -> str:
        """The whole prompt."""
        return self.before + self.document + self.question + self.prefix

    @property
    def full_question(self) -> str:
        """The question for a reader: all of the prompt except the document."""
        parts = (self.before.strip(), (self.question + self.prefix).strip())
        return "\n\n".join(part for part in parts if part)

    def continued(self, answer: str) -> str:
        """Return the answer without the `prefix`, in case the model repeated it."""
        words = r"\s+".join(map(re.escape, self.prefix.split()))
        repeated = re.match(rf"\s*{words}\s*", answer, re.IGNORECASE)
        return answer[repeated.end() :] if words and repeated else answer


def split(prompt: str, fields: Mapping[str, Any] | None = None) -> SplitPrompt:
    """Split a prompt.

    The prompts of RULER's thirteen tasks are recognised by their wording. In others, the document is a text among the
    `fields` that the prompt was made from (context, passage, document, article, story, input). Otherwise the last
    paragraph is the question, together with a line such as "Answer:" behind it, and the text before is the document.

    Raises:
        UsageError: the prompt holds no document.
    """
    if ruler := next(filter(None, (_by_wording(prompt, *form) for form in _FORMS)), None):
        return ruler
    for name in _FIELDS:
        text = (fields or {}).get(name)
        if isinstance(text, str) and text.strip():
            before, document, after = prompt.rpartition(text.strip())
            if document and (before + after).strip():
                return _split_prefix(before, document, after)
    end = _last_paragraph(prompt)
    if not prompt[:end].strip():
        raise UsageError(
            "this prompt has no document to read, only a question; MemAgent is for tasks with a long text: "
            f"{prompt[:80]!r}..."
        )
    return _split_prefix("", prompt[:end], prompt[end:])


def _by_wording(prompt: str, before: re.Pattern[str], behind: re.Pattern[str]) -> SplitPrompt | None:
    """Split a prompt that holds both wordings. Run time is linear, however often they occur."""
    end = behind.search(prompt)
    starts = [match.end() for match in before.finditer(prompt, 0, end.start())] if end else []
    if not end or not starts:
        return None
    start = starts[-1]  # solved examples come first
    return SplitPrompt(
        before=prompt[:start],
        document=prompt[start : end.start()],
        question=end["question"],
        prefix=end["prefix"] or "",
    )


def _last_paragraph(prompt: str) -> int:
    """Return where the last paragraph begins, including the blank line before it; "Answer:" is not a paragraph."""
    end = len(prompt.rstrip())
    start = max(prompt.rfind("\n\n", 0, end), 0)
    cue = _CUE.match(prompt, start) if start else None
    return max(prompt.rfind("\n\n", 0, start), 0) if cue else start


def _split_prefix(before: str, document: str, after: str) -> SplitPrompt:
    """Split what follows the document into question and prefix."""
    cue = _CUE.search(after, max(len(after.rstrip()) - 64, 0))
    end = cue.start() if cue and after[: cue.start()].strip() else len(after)
    return SplitPrompt(before=before, document=document, question=after[:end], prefix=after[end:])
