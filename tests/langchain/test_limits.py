"""How the output limit and the window come to each model: by its class, and through whatever it is wrapped in."""

from __future__ import annotations

import pytest
from helpers.scripted_chat import INPUT, Model, reader

from memagent_integrations import MemAgentReader, ScriptedBackend, UsageError


def test_a_reader_is_told_the_name_of_a_models_limit() -> None:
    model = Model()
    reader(model, limit_parameter="num_predict", output_tokens=70).invoke(INPUT)
    assert model.options == [{"num_predict": 70}] * 5
    with pytest.raises(UsageError, match="limit_parameter"):
        MemAgentReader(ScriptedBackend(["x"]), limit_parameter="num_predict").invoke(INPUT)
