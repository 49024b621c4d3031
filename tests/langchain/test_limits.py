"""How the output limit and the window come to each model: by its class, and through whatever it is wrapped in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import providers
from helpers.loopback import Loopback, Request, Response
from helpers.providers import ChatAnthropic, ChatFireworks, ChatOllama, ChatVertexAI, Provider
from helpers.scripted_chat import INPUT, Model, call, count, reader
from langchain.chat_models import init_chat_model
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import ConfigurableField, RunnableBranch, RunnableLambda
from langchain_openai import ChatOpenAI

from memagent_integrations import BackendError, ContextOverflow, MemAgentReader, ScriptedBackend, UsageError
from memagent_integrations.langchain import ChatModelBackend
from memagent_integrations.records import Message, Prompt

PROMPT = Prompt(index=0, phase="answer", messages=(Message(role="user", content="Name it."),), max_tokens=9)


def backend(model: Any, **options: Any) -> ChatModelBackend:
    return ChatModelBackend(model, tokenizer=count, **options)


def test_a_reader_is_told_the_name_of_a_models_limit() -> None:
    model = Model()
    reader(model, limit_parameter="num_predict", output_tokens=70).invoke(INPUT)
    assert model.options == [{"num_predict": 70}] * 5
    with pytest.raises(UsageError, match="limit_parameter"):
        MemAgentReader(ScriptedBackend(["x"]), limit_parameter="num_predict").invoke(INPUT)


# ---- classes ---------------------------------------------------------------------------------------------

CLASSES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "ChatLlamaCpp": (providers.ChatLlamaCpp, {"max_tokens": 9}),
    "ChatBedrockConverse": (providers.ChatBedrockConverse, {"max_tokens": 9}),
    "ChatVertexAI": (ChatVertexAI, {"max_output_tokens": 9}),
    "ChatCohere": (providers.ChatCohere, {"max_tokens": 9}),
    "ChatFireworks": (ChatFireworks, {"max_tokens": 9}),
    "ChatAnthropic": (ChatAnthropic, {"max_tokens": 9}),
    "ChatBaichuan": (providers.ChatBaichuan, {"max_tokens": 9}),
    "HuggingFacePipeline": (providers.HuggingFacePipeline, {"max_new_tokens": 9}),
    "ChatHuggingFace, a pipeline": (
        lambda: providers.ChatHuggingFace(llm=providers.HuggingFacePipeline()),
        {"pipeline_kwargs": {"max_new_tokens": 9}},
    ),
    "ChatHuggingFace, an endpoint": (lambda: providers.ChatHuggingFace(llm=object()), {"max_tokens": 9}),
    "ChatOllama": (lambda: ChatOllama(num_ctx=8192), {"options": {"num_predict": 9, "num_ctx": 8192}}),
    "OllamaLLM": (providers.OllamaLLM, {"num_predict": 9, "num_ctx": 2048}),
}


@pytest.mark.parametrize("kind", CLASSES)
async def test_the_limit_reaches_a_model_as_its_class_takes_it(kind: str) -> None:
    make, sent = CLASSES[kind]
    model = make()
    before = model.model_dump(exclude={"sent", "prompts"})
    backend(model).complete(PROMPT)
    await backend(model).acomplete(PROMPT)
    list(backend(model).stream(PROMPT))
    assert model.sent == [sent] * 3
    assert model.model_dump(exclude={"sent", "prompts"}) == before, "the caller's model stays as it is"


def test_a_limit_that_the_caller_set_is_lowered_and_raised_to_the_budget() -> None:
    llama, fireworks, llm = providers.ChatLlamaCpp(max_tokens=5), ChatFireworks(), providers.HuggingFacePipeline()
    backend(llama).complete(PROMPT)
    backend(fireworks.bind(max_tokens=5, stop=["."])).complete(PROMPT)
    backend(llm.bind(pipeline_kwargs={"top_k": 5, "max_new_tokens": 5})).complete(PROMPT)
    assert llama.sent == [{"max_tokens": 9}]
    assert fireworks.sent == [{"max_tokens": 9}]
    assert llm.sent == [{"top_k": 5, "max_new_tokens": 9}]


@pytest.mark.parametrize("name", ["max_tokens", "num_predict"])
def test_a_name_that_is_a_field_of_the_model_is_set_there(name: str) -> None:
    model = ChatOllama(num_ctx=8192) if name == "num_predict" else providers.ChatBaichuan()
    backend(model, limit_parameter=name).complete(PROMPT)
    assert 9 in (model.sent[0].get("max_tokens"), model.sent[0].get("options", {}).get("num_predict"))


def test_a_model_whose_limit_cannot_be_set_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    subject = backend(Model().with_fallbacks([Model()]))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            subject.under({}).complete(PROMPT)
    (warning,) = caplog.records
    assert "Model takes its output limit" in warning.getMessage()
    assert "limit_parameter" in warning.getMessage()
    caplog.clear()
    backend(ChatFireworks()).complete(PROMPT)
    backend(Model(), limit_parameter="num").complete(PROMPT)
    assert not caplog.records


# ---- wrappers --------------------------------------------------------------------------------------------

ONE = ConfigurableField(id="which")


def broken() -> Any:
    def fail(_: str) -> str:
        raise ConnectionError("gone")

    return ChatVertexAI(respond=fail)


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "with_retry": lambda model: model.with_retry(),
    "with_config": lambda model: model.with_config(tags=["x"]),
    "bind": lambda model: model.bind(stop=["."]),
    "all of these": lambda model: model.with_retry().bind(stop=["."]).with_config(tags=["x"]),
    "a fallback of another class": lambda model: model.with_fallbacks([ChatVertexAI()]),
    "the fallback after another class": lambda model: broken().with_fallbacks([model]),
    "retries in fallbacks": lambda model: (
        broken().with_retry(stop_after_attempt=1).with_fallbacks([model.with_retry()]).with_config(tags=["x"])
    ),
    "lambda | model": lambda model: RunnableLambda(lambda messages: messages) | model,
    "lambda | lambda | model": lambda model: (
        RunnableLambda(lambda messages: messages) | (lambda messages: messages) | model.with_retry()
    ),
    "model | parser": lambda model: model | StrOutputParser(),
    "model | lambda": lambda model: model | (lambda message: message),
    "a sequence with arguments": lambda model: (model | StrOutputParser()).bind(stop=["."]),
    "a fallback of sequences": lambda model: (RunnableLambda(lambda messages: messages) | broken()).with_fallbacks(
        [model | StrOutputParser()]
    ),
    "a branch": lambda model: RunnableBranch((lambda messages: False, ChatVertexAI()), model),
    "configurable fields": lambda model: model.configurable_fields(reply=ConfigurableField(id="reply")),
    "alternatives": lambda model: model.configurable_alternatives(ONE, other=ChatVertexAI()),
    "an alternative": lambda model: (
        ChatVertexAI().configurable_alternatives(ONE, other=model).with_config(configurable={"which": "other"})
    ),
    "alternatives in a sequence": lambda model: (
        RunnableLambda(lambda messages: messages) | model.configurable_alternatives(ONE, other=ChatVertexAI())
    ),
    "an alternative that is made when it is chosen": lambda model: (
        ChatVertexAI()
        .configurable_alternatives(ONE, other=lambda: model.with_retry())
        .with_config(configurable={"which": "other"})
    ),
}


@pytest.mark.parametrize("wrapping", WRAPPED)
@pytest.mark.parametrize("how", ["invoke", "ainvoke", "stream", "astream"])
async def test_the_limit_reaches_the_model_inside(wrapping: str, how: str) -> None:
    model = ChatFireworks()
    message = await call(reader(WRAPPED[wrapping](model), output_tokens=70), how)
    assert message.text == "note"
    assert len(model.sent) == 5
    assert {sent["max_tokens"] for sent in model.sent} == {70}
    if "arguments" in wrapping or "bind" in wrapping:
        assert {tuple(sent.get("stop", ())) for sent in model.sent} <= {("."), ()}


async def test_the_config_of_a_call_chooses_the_model() -> None:
    other = ChatFireworks(reply="other")
    vertex = ChatVertexAI()
    model = vertex.configurable_alternatives(ONE, other=other)
    subject = reader(model, output_tokens=70)
    assert subject.invoke(INPUT).text == "note"
    config: Any = {"configurable": {"which": "other"}}
    for how in ("invoke", "ainvoke", "stream"):
        assert (await call(subject, how, INPUT, config)).text == "other"
    assert subject.with_config(config).invoke(INPUT).text == "other"
    assert {tuple(sent.items()) for sent in vertex.sent} == {(("max_output_tokens", 70),)}
    assert {tuple(sent.items()) for sent in other.sent} == {(("max_tokens", 70),)}
    assert subject.invoke(INPUT, config).response_metadata["memagent"]["model"] == "langchain:ChatFireworks"
    with pytest.raises(UsageError, match="nobody"):
        subject.invoke(INPUT, {"configurable": {"which": "nobody"}})


@pytest.mark.heavy
@pytest.mark.openai
def test_a_model_that_only_the_call_names_is_asked_within_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from helpers.loopback import chat

    with Loopback(chat(["note", "seven"])) as server:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-x")
        model = init_chat_model(configurable_fields="any", config_prefix="the")
        subject = reader(model, chunk_tokens=1000, output_tokens=70)
        named: Any = {"the_model": "openai:gpt-4o", "the_base_url": f"{server.url}/v1"}
        message = subject.invoke(INPUT, {"configurable": named})
        bodies = server.bodies("/v1/chat/completions")
    assert (message.text, message.response_metadata["memagent"]["model"]) == ("seven", "langchain:ChatOpenAI:gpt-4o")
    assert [body.get("max_completion_tokens") for body in bodies] == [70, 70]
    with pytest.raises(UsageError, match="configurable"):
        subject.invoke(INPUT)


def test_a_function_around_a_model_is_asked_for_its_window_and_told_about_the_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner = providers.ChatLlamaCpp(n_ctx=4096)
    subject = backend(RunnableLambda(lambda messages: inner.invoke(messages)))
    assert subject.complete(PROMPT).text == "note"
    assert subject.window == 4096
    assert subject.name == "langchain:ChatLlamaCpp"
    assert "RunnableLambda takes its output limit" in caplog.text


# ---- windows ---------------------------------------------------------------------------------------------


def test_the_window_is_that_of_the_smallest_model() -> None:
    large, small = ChatOllama(num_ctx=32_768), providers.ChatLlamaCpp(n_ctx=4096)
    assert backend(large).window == 32_768
    assert backend(large.with_fallbacks([small])).window == 4096
    assert backend(large.with_fallbacks([Model()])).window == 32_768
    assert backend(large, window=99).window == 99
    assert backend(Model(profile={"max_input_tokens": 700})).window == 700
    assert backend(Model()).window is None


def pipeline() -> Any:
    def tokenizer(text: str, add_special_tokens: bool) -> dict[str, Any]:
        assert not add_special_tokens
        return {"input_ids": text.split()}

    return SimpleNamespace(
        tokenizer=tokenizer, model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=2048))
    )


def test_a_model_in_this_process_counts_with_its_own_tokenizer() -> None:
    llm = providers.HuggingFacePipeline(pipeline=pipeline())
    for model in (llm, providers.ChatHuggingFace(llm=llm), llm.with_retry()):
        subject = ChatModelBackend(model)
        assert (subject.count("one two three"), subject.window) == (3, 2048)
    client = SimpleNamespace(tokenize=lambda text, add_bos: list(text.split()))
    subject = ChatModelBackend(providers.ChatLlamaCpp(n_ctx=4096, client=client))
    assert (subject.count("one two three"), subject.window) == (3, 4096)
    assert ChatModelBackend(Model(custom_get_token_ids=lambda text: [1] * len(text))).count("four") == 4


# ---- Ollama ----------------------------------------------------------------------------------------------


def test_ollama_gets_a_context_that_holds_each_prompt() -> None:
    """Without one its server drops the beginning of a prompt."""
    model = ChatOllama()
    subject = backend(model)
    for words in (10, 5000, 10):
        message = Message(role="user", content="word " * words)
        subject.under({}).complete(Prompt(index=0, phase="answer", messages=(message,), max_tokens=100))
    assert [sent["options"]["num_ctx"] for sent in model.sent] == [4096, 8192, 8192]
    assert {sent["options"]["num_predict"] for sent in model.sent} == {100}


def test_what_the_caller_set_for_ollama_stays() -> None:
    model = ChatOllama()
    backend(model.bind(options={"temperature": 0.5})).complete(PROMPT)
    backend(model.bind(options={"num_ctx": 700})).complete(PROMPT)
    assert model.sent[0]["options"] == {"temperature": 0.5, "num_predict": 9, "num_ctx": 4096}
    assert model.sent[1]["options"] == {"num_ctx": 700, "num_predict": 9}
    with pytest.raises(ContextOverflow, match="window"):
        reader(ChatOllama(num_ctx=256)).invoke(INPUT)


@pytest.mark.heavy
def test_ollama_is_asked_how_much_its_model_can_hold() -> None:
    def respond(request: Request) -> Response:
        assert request.body == {"model": "llama3"}
        return Response(body={"model_info": {"general.architecture": "llama", "llama.context_length": 300}})

    with Loopback(respond) as server:
        model = ChatOllama(base_url=server.url)
        assert backend(model).window == 300
        with pytest.raises(ContextOverflow, match="300"):
            reader(model).invoke(INPUT)
    with pytest.raises(BackendError, match="Ollama"):
        assert backend(ChatOllama()).window


# ---- metadata --------------------------------------------------------------------------------------------


def test_the_metadata_tell_which_model_answered() -> None:
    def named(name: str, **more: Any) -> Provider:
        return ChatFireworks(respond=lambda _: AIMessage("note", response_metadata={"model_name": name}), **more)

    message = reader(broken().with_fallbacks([named("second-1")])).invoke(INPUT)
    details = message.response_metadata["memagent"]
    assert (details["model"], message.response_metadata["model_name"]) == ("langchain:second-1", "second-1")
    assert details["models"] == {"second-1": 5}
    assert "models" not in reader(ChatFireworks()).invoke(INPUT).response_metadata["memagent"]


# ---- text models -----------------------------------------------------------------------------------------

TURNS = (
    Message(role="system", content="Be brief."),
    Message(role="user", content="One?"),
    Message(role="assistant", content="1"),
    Message(role="user", content="Two?"),
)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (TURNS[1:2], "One?"),
        (TURNS[:2], "Be brief.\n\nOne?"),
        (TURNS, "Be brief.\n\nUser: One?\n\nAssistant: 1\n\nUser: Two?\n\nAssistant:"),
        (TURNS[:3], "Be brief.\n\nUser: One?\n\nAssistant: 1"),
    ],
    ids=len,
)
def test_a_model_of_plain_text_gets_a_conversation_as_text(messages: tuple[Message, ...], text: str) -> None:
    prompt = Prompt(index=0, phase="answer", messages=messages, max_tokens=9)
    model = providers.OllamaLLM()
    backend(model).complete(prompt)
    backend(model.with_retry()).complete(prompt)
    backend(broken().with_fallbacks([model])).complete(prompt)
    backend(RunnableLambda(lambda value: value) | model).complete(prompt)
    assert model.prompts == [text] * 4


def test_a_chat_model_beside_one_of_plain_text_gets_messages() -> None:
    seen: list[Any] = []

    class Roles(Model):
        def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **options: Any) -> Any:
            seen.append([message.type for message in messages])
            return super()._generate(messages, stop, run_manager, **options)

    prompt = Prompt(index=0, phase="answer", messages=TURNS, max_tokens=9)
    backend(Roles().with_fallbacks([providers.OllamaLLM()])).complete(prompt)
    assert seen == [["system", "human", "ai", "human"]]


# ---- identity --------------------------------------------------------------------------------------------


def test_equal_models_have_the_same_identity_and_keys_no_part_in_it() -> None:
    def identity(model: Any) -> Any:
        return ChatModelBackend(model, tokenizer=count).identity

    def same(make: Callable[[str], Any]) -> bool:
        return bool(identity(make("sk-one-secret-key")) == identity(make("sk-other-secret-key")))

    assert same(lambda key: ChatOpenAI(model="gpt-4o", api_key=key))
    assert same(lambda key: ChatAnthropic(anthropic_api_key=key).with_retry())
    assert same(lambda key: ChatFireworks().bind(api_key=key))
    assert same(lambda key: ChatFireworks().bind(extra_headers={"Authorization": f"Bearer {key}"}))
    assert same(lambda key: RunnableLambda(lambda messages: messages) | ChatFireworks())
    assert same(lambda key: ChatFireworks(respond=lambda _: "x", metadata={"run": key}, tags=[key]))
    assert same(lambda key: ChatFireworks().with_fallbacks([ChatVertexAI()]))
    assert same(lambda key: ChatFireworks().configurable_alternatives(ONE, other=ChatVertexAI()))
    assert not same(lambda key: ChatFireworks(reply=key))
    assert identity(ChatOpenAI(model="gpt-4o", api_key="sk-x", temperature=0)) != identity(
        ChatOpenAI(model="gpt-4o", api_key="sk-x", temperature=1)
    )
    assert identity(ChatFireworks()) != identity(ChatVertexAI())
    chosen = ChatFireworks().configurable_alternatives(ONE, other=ChatVertexAI())
    subject = ChatModelBackend(chosen, tokenizer=count)
    assert subject.identity != subject.under({"configurable": {"which": "other"}}).identity
