"""LlamaIndex's Refine and TreeSummarize, as its users have them: its prompts, its splitters, its way to fill a window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, ClassVar

from llama_index.core import response_synthesizers
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LLMMetadata, MessageRole
from llama_index.core.callbacks import CallbackManager
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.node_parser.text.sentence import SENTENCE_CHUNK_OVERLAP
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.utilities.token_counting import TokenCounter

from memagent_integrations.errors import BackendError, EmptyDocument
from memagent_integrations.evaluation.baselines.base import CALLS_A_PART, Baseline, Found, Model
from memagent_integrations.evaluation.samples import Sample
from memagent_integrations.records import Message

_NOTHING = "Empty Response"  # what a synthesizer says where its model said nothing


class LLM(CustomLLM):
    """A LlamaIndex LLM over a model."""

    model: Any

    @property
    def metadata(self) -> LLMMetadata:
        """The window and the size of an answer."""
        terms = self.model.terms
        return LLMMetadata(
            context_window=terms.window, num_output=terms.output, is_chat_model=True, model_name=terms.backend.name
        )

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """One call."""
        said = self.model.ask([_message(message) for message in messages], kwargs.get("max_tokens"))
        return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=said))

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """`chat`, with one message."""
        return CompletionResponse(text=self.model.ask([Message(role="user", content=prompt)], kwargs.get("max_tokens")))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        """`complete`, in one piece."""
        yield self.complete(prompt, formatted, **kwargs)


class _Counter(TokenCounter):
    """Counts messages with the model's tokenizer too; LlamaIndex's own does that with the process-wide one, which is not ours to set."""

    def __init__(self, tokenizer: Callable[[str], Any], template_tokens: int) -> None:
        super().__init__(tokenizer)
        self._template_tokens = template_tokens

    def estimate_tokens_in_messages(self, messages: list[ChatMessage]) -> int:
        """Tokens of the messages, and what the chat template adds."""
        return sum(self.get_string_tokens(message.content or "") + self._template_tokens for message in messages)


class _Helper(PromptHelper):
    """LlamaIndex's own sum of what a window leaves for text, in the model's tokens."""

    def __init__(self, counter: TokenCounter, metadata: LLMMetadata) -> None:
        super().__init__(metadata.context_window, metadata.num_output, tokenizer=counter.tokenizer)
        self._token_counter = counter


class _Synthesizer(Baseline):
    """A response synthesizer over the nodes of a document, made by LlamaIndex's default splitter. The whole text is held, as its users hold it."""

    kind: ClassVar[type[BaseSynthesizer]]
    templates: ClassVar[tuple[str, ...]]
    padding: ClassVar[int]  # tokens that LlamaIndex leaves free in a prompt

    def find(self, sample: Sample, model: Model) -> Found:
        """The synthesizer's answer."""
        text = "".join(sample.document())
        if not text.strip():
            raise EmptyDocument
        llm = LLM(model=model, callback_manager=CallbackManager([]))
        tokenizer: Any = lambda text: range(model.count(text))  # noqa: E731  # only its length is looked at
        helper = _Helper(_Counter(tokenizer, model.meter.template_tokens), llm.metadata)
        helpers: dict[str, Any] = {
            name: helper for name in ("prompt_helper", "chat_prompt_helper") if name in signature(self.kind).parameters
        }
        synthesizer = self.kind(
            llm=llm, callback_manager=llm.callback_manager, **helpers
        )  # without them it loads a process-wide tokenizer
        size = self._node_size(synthesizer, helper, llm, sample.question)
        splitter = SentenceSplitter(
            chunk_size=size,
            chunk_overlap=min(SENTENCE_CHUNK_OVERLAP, size // 2),
            tokenizer=tokenizer,
            callback_manager=llm.callback_manager,
        )
        nodes = [NodeWithScore(node=TextNode(text=part)) for part in splitter.split_text(text)]
        model.most = CALLS_A_PART * len(nodes)
        answer = getattr(synthesizer.synthesize(sample.question, nodes), "response", None)
        if answer is None or answer == _NOTHING:
            raise BackendError(f"the model gave no answer: LlamaIndex says {answer!r}")
        return Found(answer=str(answer), details={"nodes": len(nodes), "node_tokens": size})

    def _node_size(self, synthesizer: BaseSynthesizer, helper: PromptHelper, llm: LLM, question: str) -> int:
        """Tokens of a node that the synthesizer will not split anew."""
        prompts = [synthesizer.get_prompts()[name].partial_format(query_str=question) for name in self.templates]
        return min(
            int(helper.get_text_splitter_given_prompt(prompt, padding=self.padding, llm=llm).chunk_size)
            for prompt in prompts
        )


class Refine(_Synthesizer):
    """An answer from the first node, refined with each other one.

    LlamaIndex leaves 500 tokens for the answer so far; where they do not suffice it splits a node, and reads its parts in reverse.
    """

    kind = response_synthesizers.Refine
    templates = ("text_qa_template", "refine_template")
    padding = 500


class TreeSummarize(_Synthesizer):
    """An answer from each windowful, and one from those answers, again and again until they fit one window.

    Where answers are about as long as what they are made from LlamaIndex goes on for ever: ten calls for each node are a failure.
    """

    kind = response_synthesizers.TreeSummarize
    templates = ("summary_template",)
    padding = 5


def _message(message: ChatMessage) -> Message:
    content = message.content or ""
    if message.role == MessageRole.SYSTEM:
        return Message(role="system", content=content)
    return Message(role="assistant" if message.role == MessageRole.ASSISTANT else "user", content=content)
