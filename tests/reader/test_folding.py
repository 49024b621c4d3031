"""A text that is thrown away after it was folded: each section is in the memory, or told not to be."""

from __future__ import annotations

import pytest

from memagent_integrations import BackendError, Reader, ScriptedBackend
from memagent_integrations.errors import BackendClosed
from memagent_integrations.reader.folding import Folded, PassedOver, afold, fold
from memagent_integrations.records import Prompt

TEXT = "".join(f"Line {number} of what was said.\n" for number in range(40))
BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


async def folded(reader: Reader, *, is_async: bool) -> Folded:
    if is_async:
        return await afold(reader, "Why?", TEXT, memory="before")
    return fold(reader, "Why?", TEXT, memory="before")


def reader_of(failure: BackendError) -> Reader:
    def reply(prompt: Prompt) -> str:
        if "Line 20 " in prompt.messages[-1].content:
            raise failure
        return f"memory {prompt.index}"

    return Reader(ScriptedBackend(reply), chunk_tokens=100, memory_tokens=30)


@BOTH
async def test_a_section_that_fails_for_good_is_passed_over_and_the_others_are_folded(is_async: bool) -> None:
    reader = reader_of(BackendError("the server refuses this", status=400))
    result = await folded(reader, is_async=is_async)
    sections = [chunk.text for chunk in reader.chunks(TEXT)]
    (bad,) = [section for section in sections if "Line 20 " in section]
    assert result.passed_over == (PassedOver(text=bad, reason="the server refuses this"),)
    assert result.reading.memory == f"memory {len(sections) - 1}"
    assert len({step.index for step in result.reading.steps} - {sections.index(bad)}) == len(sections) - 1


@BOTH
@pytest.mark.parametrize("failure", [BackendError("no such key", status=401), BackendClosed("openai:m")], ids=str)
async def test_a_failure_that_any_section_would_have_is_raised(failure: BackendError, is_async: bool) -> None:
    with pytest.raises(BackendError, match=str(failure)):
        await folded(reader_of(failure), is_async=is_async)
