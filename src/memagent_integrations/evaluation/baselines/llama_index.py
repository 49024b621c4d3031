"""LlamaIndex's response synthesizers, with its own prompts and splitters and its own way to fill a window."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, ClassVar

from llama_index.core import response_synthesizers
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LLMMetadata, MessageRole
from llama_index.core.callbacks import CallbackManager
from llama_index.core.constants import DEFAULT_CHUNK_SIZE
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.node_parser.text.sentence import SENTENCE_CHUNK_OVERLAP
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.utilities.token_counting import TokenCounter

from memagent_integrations.errors import BackendError, EmptyDocument
from memagent_integrations.evaluation.baselines.base import CALLS_PER_PART, Answer, Baseline, Model
from memagent_integrations.evaluation.samples import Sample
from memagent_integrations.records import Message

_NO_ANSWER = re.compile(r"((Response \d+: )?Empty Response\s*-*\s*)+")
"""What a synthesizer returns when its model returns nothing, once or for each node."""


class LLM(CustomLLM):
    """The evaluated model as a LlamaIndex LLM."""

    model: Any

    @property
    def metadata(self) -> LLMMetadata:
        """Return the window and the size of an answer."""
        return LLMMetadata(
            context_window=self.model.window,
            num_output=self.model.output,
            is_chat_model=True,
            model_name=self.model.meter.name,
        )

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Make one call."""
        text = self.model.ask([_message(message) for message in messages], kwargs.get("max_tokens"))
        return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text))

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Make one call with one user message."""
        return CompletionResponse(text=self.model.ask([Message(role="user", content=prompt)], kwargs.get("max_tokens")))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        """Yield the reply of `complete` in one piece."""
        yield self.complete(prompt, formatted, **kwargs)


class _Counter(TokenCounter):
    """Counts messages with the model's tokenizer. LlamaIndex's own counter uses a process-wide one."""

    def __init__(self, tokenizer: Callable[[str], Any], template_tokens: int) -> None:
        super().__init__(tokenizer)
        self._template_tokens = template_tokens

    def estimate_tokens_in_messages(self, messages: list[ChatMessage]) -> int:
        """Return the tokens of the messages and of the chat template."""
        return sum(self.get_string_tokens(message.content or "") + self._template_tokens for message in messages)


class _Helper(PromptHelper):
    """LlamaIndex's own computation of the room for text, in the model's tokens."""

    def __init__(self, counter: TokenCounter, metadata: LLMMetadata) -> None:
        super().__init__(metadata.context_window, metadata.num_output, tokenizer=counter.tokenizer)
        self._token_counter = counter


class _Synthesizer(Baseline):
    """A response synthesizer over the nodes that LlamaIndex's default splitter makes.

    It holds the whole text, as in common use.
    """

    kind: ClassVar[type[BaseSynthesizer]]
    templates: ClassVar[tuple[str, ...]]
    padding: ClassVar[int] = 5  # tokens that LlamaIndex keeps free in a prompt

    def find_answer(self, sample: Sample, model: Model) -> Answer:
        """Run the synthesizer and return its answer."""
        text = "".join(sample.document())
        if not text.strip():
            raise EmptyDocument
        llm = LLM(model=model, callback_manager=CallbackManager([]))
        tokenizer: Any = lambda text: range(model.count(text))  # noqa: E731  # only the length of the result is used
        helper = _Helper(_Counter(tokenizer, model.meter.template_tokens), llm.metadata)
        # Without a helper of our own the synthesizer would load a process-wide tokenizer.
        names = {"prompt_helper", "chat_prompt_helper"} & set(signature(self.kind).parameters)
        helpers: dict[str, Any] = dict.fromkeys(names, helper)
        synthesizer = self.kind(llm=llm, callback_manager=llm.callback_manager, **helpers)
        size = self._node_size(synthesizer, helper, llm, sample.question)
        splitter = SentenceSplitter(
            chunk_size=size,
            chunk_overlap=min(SENTENCE_CHUNK_OVERLAP, size // 2),
            tokenizer=tokenizer,
            callback_manager=llm.callback_manager,
        )
        nodes = [NodeWithScore(node=TextNode(text=part)) for part in splitter.split_text(text)]
        model.call_limit = CALLS_PER_PART * len(nodes)
        answer = getattr(synthesizer.synthesize(sample.question, nodes), "response", None)
        if answer is None or _NO_ANSWER.fullmatch(str(answer)):
            raise BackendError(f"the model gave no answer: LlamaIndex says {answer!r}")
        return Answer(text=str(answer), details={"nodes": len(nodes), "node_tokens": size})

    def _node_size(self, synthesizer: BaseSynthesizer, helper: PromptHelper, llm: LLM, question: str) -> int:
        """Return the size of a node, in tokens, that the synthesizer will not split again."""
        prompts = [synthesizer.get_prompts()[name].partial_format(query_str=question) for name in self.templates]
        splitters = [helper.get_text_splitter_given_prompt(prompt, padding=self.padding, llm=llm) for prompt in prompts]
        return min(int(splitter.chunk_size) for splitter in splitters)


class Refine(_Synthesizer):
    """Answers from the first node, then refines the answer with each other node.

    LlamaIndex leaves 500 tokens for the answer so far. Where that is not enough, it splits a node and reads its parts
    in reverse order.
    """

    kind = response_synthesizers.Refine
    templates = ("text_qa_template", "refine_template")
    padding = 500


class CompactAndRefine(Refine):
    """LlamaIndex's default: packs nodes of its default size into windowfuls, then refines the answer with each."""

    kind = response_synthesizers.CompactAndRefine

    def _node_size(self, synthesizer: BaseSynthesizer, helper: PromptHelper, llm: LLM, question: str) -> int:
        return min(DEFAULT_CHUNK_SIZE, super()._node_size(synthesizer, helper, llm, question))


class TreeSummarize(_Synthesizer):
    """Answers from each windowful of nodes, then from those answers, until they fit one window.

    LlamaIndex never ends where the answers are about as long as their sources, so it fails after `CALLS_PER_PART` calls
    for each node.
    """

    kind = response_synthesizers.TreeSummarize
    templates = ("summary_template",)


class Accumulate(_Synthesizer):
    """Answers from each node alone; the answer is the list of these answers."""

    kind = response_synthesizers.Accumulate
    templates = ("text_qa_template",)


def _message(message: ChatMessage) -> Message:
    content = message.content or ""
    if message.role == MessageRole.SYSTEM:
        return Message(role="system", content=content)
    return Message(role="assistant" if message.role == MessageRole.ASSISTANT else "user", content=content)
