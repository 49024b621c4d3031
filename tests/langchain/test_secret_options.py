"""Keys in the options of a named model are in nothing that a runnable shows, saves or traces."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.load import dumpd, dumps, load
from langchain_core.runnables import RunnablePassthrough
from pydantic import SecretStr

from memagent_integrations import MemAgentError, UsageError
from memagent_integrations.langchain import MemAgentReader

pytestmark = pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")

KEY = "a-key-that-nobody-may-see-0123456789"
OPTIONS: dict[str, Any] = {
    "base_url": f"http://me:{KEY}@127.0.0.1:1/v1?token={KEY}",
    "api_key": KEY,
    "extra_body": {"password": KEY, "top_k": 3},
    "tokenizer": "approximate",
    "temperature": 0.5,
    "max_retries": 0,
}


class Recorder(BaseCallbackHandler):
    """Records everything that a tracer is told."""

    raise_error = True

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_chain_start(self, *args: Any, **kwargs: Any) -> None:
        self.told.append((args, kwargs))

    on_chat_model_start = on_tool_start = on_chain_end = on_tool_end = on_llm_error = on_chain_error = on_chain_start  # type: ignore[assignment]


@pytest.mark.parametrize("name", ["backend_options", "answer_options"])
def test_nothing_shows_the_keys(name: str) -> None:
    options = {"backend_options": OPTIONS, "answer_options": OPTIONS, name: {**OPTIONS, "secret": SecretStr(KEY)}}
    reader = MemAgentReader("openai:m", answer_model="openai:n", window=9000, **options)
    chain = RunnablePassthrough() | reader
    shown = [repr(reader), str(reader), dumps(reader), dumps(reader, pretty=True), repr(dumpd(reader))]
    shown += [repr(chain), dumps(chain), repr(reader.as_tool())]
    shown += [str(reader.get_graph().to_json()), str(chain.get_graph().to_json(with_schemas=True))]
    for text in shown:
        assert KEY not in text
    assert "127.0.0.1:1/v1" in shown[0]
    assert getattr(reader, name)["api_key"] == KEY


def test_a_saved_reader_has_the_options_that_are_no_secret() -> None:
    saved = dumpd(MemAgentReader("openai:m", backend_options=OPTIONS, window=9000))
    loaded = load(saved, allowed_objects=[MemAgentReader], valid_namespaces=["memagent_integrations"])
    assert loaded.backend_options == {
        "base_url": "http://127.0.0.1:1/v1",
        "extra_body": {"top_k": 3},
        "tokenizer": "approximate",
        "temperature": 0.5,
        "max_retries": 0,
    }


@pytest.mark.heavy
def test_traces_of_a_reading_hold_no_key() -> None:
    recorder = Recorder()
    reader = MemAgentReader("openai:m", backend_options=OPTIONS, window=9000)
    with pytest.raises(Exception, match="failed") as caught:
        reader.invoke({"question": "Why?", "context": "Because."}, {"callbacks": [recorder]})
    assert recorder.told
    assert KEY not in repr(recorder.told) + "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("nobody:m", OPTIONS),
        ("anthropic:m", {"api_key": KEY, "max_tokens": {"x": KEY}}),
        ("openai:m", {"api_key": KEY, "extra_body": KEY}),
        ("openai:m", {"api_key": f"{KEY}\n\x01"}),
    ],
    ids=["an unknown provider", "LangChain's own", "a body that is none", "a key that is none"],
)
def test_errors_about_settings_do_not_show_the_keys(model: str, options: dict[str, Any]) -> None:
    with pytest.raises(MemAgentError) as caught:
        MemAgentReader(model, backend_options=options).plan({"question": "Why?", "context": "Because."})
    assert KEY not in "".join(traceback.format_exception_only(caught.value))
    for name in ("backend_options", "answer_options"):
        with pytest.raises(UsageError) as caught:
            MemAgentReader(model, **{name: [KEY]})
        assert KEY not in "".join(traceback.format_exception(caught.value))
