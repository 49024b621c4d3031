from __future__ import annotations

import pytest
from helpers.contract import BackendContract

from memagent_integrations import Backend, ContextOverflow, ScriptedBackend, UsageError
from memagent_integrations.records import Prompt


@pytest.fixture(params=[1, 4])
def backend(request: pytest.FixtureRequest) -> Backend:
    scripted: ScriptedBackend

    def script(prompt: Prompt) -> str | ContextOverflow:
        size = scripted.count(prompt.messages[0].content)
        if prompt.schema:
            return '{"name": "Jupiter", "gas": true}'
        return ContextOverflow(f"{size} tokens") if size > 8192 else "red and green and blue"

    scripted = ScriptedBackend(script, window=8192, batch_size=request.param)
    return scripted


class TestScripted(BackendContract):
    pass


def test_a_script_is_not_the_letters_of_one_text() -> None:
    with pytest.raises(UsageError, match="script has to be a list of replies or a function, not a str"):
        ScriptedBackend("7319")
