"""Where in the prompt of a benchmark the document stands, and where the question."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memagent_integrations.errors import UsageError

_RULER = {  # what stands before the document and what is asked behind it; source: RULER (arXiv:2404.06654), as lm-evaluation-harness words it
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
        r"Below is a numbered list of words\. In these words, some appear more often than others\. Memorize the ones that appear most often\.\n",
        r"\nQuestion: What are the 10 most common words in the above list\?",
    ),
    "fwe": (
        r"Read the following coded text and track the frequency of each coded word\. Find the three most frequently appeared coded words\. ",
        r"\nQuestion: Do not provide any explanation\. Please ignore the dots '\.\.\.\.'\. "
        r"What are the three most frequently appeared words in the above coded text\?",
    ),
    "qa": (
        r"Answer the question based on the given documents\. Only give me the answer and do not output any other words\.\n\n"
        r"The following are given documents\.\n\n",
        r"\n\nAnswer the question based on the given documents\. Only give me the answer and do not output any other words\.\n\nQuestion: [^\n]*?",
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
    """A prompt taken apart; the four texts put together are the prompt again.

    `before` stands before the `document` (the instruction, solved examples), `question` behind it. `prefix` is the beginning of the answer, which
    the model is to go on with.
    """

    before: str
    document: str
    question: str
    prefix: str

    @property
    def prompt(self) -> str:
        """The prompt again."""
        return self.before + self.document + self.question + self.prefix

    @property
    def asked(self) -> str:
        """All of the prompt but the document: what a reader is asked."""
        asked = (self.before.strip(), (self.question + self.prefix).strip())
        return "\n\n".join(text for text in asked if text)

    def continued(self, answer: str) -> str:
        """The answer as it goes on from `prefix`: without it, if the model wrote it anew."""
        words = r"\s+".join(map(re.escape, self.prefix.split()))
        repeated = re.match(rf"\s*{words}\s*", answer, re.IGNORECASE)
        return answer[repeated.end() :] if words and repeated else answer


def split(prompt: str, fields: Mapping[str, Any] | None = None) -> SplitPrompt:
    """The prompt, taken apart.

    The prompts of RULER's thirteen tasks are known by their wording. Of others, a text among the `fields` that the prompt was made of (context,
    passage, document, article, story, input) is the document. Else the last paragraph is the question, with a line such as "Answer:" behind it, and
    all before is the document.

    Raises:
        UsageError: there is no document in it.
    """
    if found := next(filter(None, (_by_wording(prompt, *form) for form in _FORMS)), None):
        return found
    for name in _FIELDS:
        text = (fields or {}).get(name)
        if isinstance(text, str) and text.strip():
            before, document, after = prompt.rpartition(text.strip())
            if document and (before + after).strip():
                return _parts(before, document, after)
    end = _last_paragraph(prompt)
    if not prompt[:end].strip():
        raise UsageError(
            f"this prompt has no document to read, only a question; MemAgent is for tasks with a long text: {prompt[:80]!r}..."
        )
    return _parts("", prompt[:end], prompt[end:])


def _by_wording(prompt: str, before: re.Pattern[str], behind: re.Pattern[str]) -> SplitPrompt | None:
    """The parts, if both wordings stand in the prompt. Each character is looked at once or twice, however often they do."""
    end = behind.search(prompt)
    start = (
        [match.end() for match in before.finditer(prompt, 0, end.start())][-1:] if end else []
    )  # the last: solved examples come first
    if not end or not start:
        return None
    return SplitPrompt(
        before=prompt[: start[0]],
        document=prompt[start[0] : end.start()],
        question=end["question"],
        prefix=end["prefix"] or "",
    )


def _last_paragraph(prompt: str) -> int:
    """Where the last paragraph begins, the blank line before it included; a cue such as "Answer:" is no paragraph."""
    end = len(prompt.rstrip())
    start = max(prompt.rfind("\n\n", 0, end), 0)
    cue = _CUE.match(prompt, start) if start else None
    return max(prompt.rfind("\n\n", 0, start), 0) if cue else start


def _parts(before: str, document: str, after: str) -> SplitPrompt:
    cue = _CUE.search(after, max(len(after.rstrip()) - 64, 0))
    end = cue.start() if cue and after[: cue.start()].strip() else len(after)
    return SplitPrompt(before=before, document=document, question=after[:end], prefix=after[end:])
