"""LangChain's refine and map-reduce chains (`langchain_classic`), with its own prompts and its default splitter."""

from __future__ import annotations

import threading
import warnings
from abc import abstractmethod
from typing import Any, ClassVar

from langchain_classic.chains.combine_documents.base import BaseCombineDocumentsChain
from langchain_classic.chains.question_answering import load_qa_chain
from langchain_core._api import LangChainDeprecationWarning
from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import BasePromptTemplate

from memagent_integrations.evaluation.baselines.base import CALLS_PER_PART, Answer, Baseline, Model
from memagent_integrations.evaluation.baselines.langchain_splitter import split
from memagent_integrations.evaluation.samples import Sample
from memagent_integrations.prompts import MARGIN
from memagent_integrations.records import Message

_LOADING = threading.Lock()  # guards the warning filters, which the whole process shares


class ChatModel(BaseChatModel):
    """The evaluated model as a LangChain chat model."""

    model: Any

    @property
    def _llm_type(self) -> str:
        return "memagent-evaluation"

    def get_num_tokens(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return int(self.model.count(text))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        text = self.model.ask([_message(message) for message in messages], kwargs.get("max_tokens"))
        for stop_text in stop or ():
            text = text.partition(stop_text)[0]
        return ChatResult(generations=[ChatGeneration(message=AIMessage(content=text))])


class _Chain(Baseline):
    """A chain over the parts that LangChain's default splitter makes."""

    chain_type: ClassVar[str]

    def find_answer(self, sample: Sample, model: Model) -> Answer:
        """Run the chain and return its answer."""
        chain = self.load(ChatModel(model=model, cache=False))
        size = min(_room(model, prompt, sample.question, answers) for prompt, answers in self.prompts(chain))
        parts = [Document(page_content=part) for part in split(sample, size, model)]
        model.call_limit = CALLS_PER_PART * len(parts)
        answer = chain.invoke({"input_documents": parts, "question": sample.question})["output_text"]
        return Answer(text=str(answer), details={"parts": len(parts), "part_tokens": size})

    def load(self, llm: ChatModel) -> Any:
        """Return the chain, with LangChain's own prompts."""
        return _load(llm, self.chain_type)

    @abstractmethod
    def prompts(self, chain: Any) -> list[tuple[BasePromptTemplate[Any], int]]:
        """Return the prompts that show a part of the document, each with the number of earlier answers it shows too."""


class Refine(_Chain):
    """Answers from the first part, then refines the answer with each other part, which leave room for it."""

    chain_type = "refine"

    def prompts(self, chain: Any) -> list[tuple[BasePromptTemplate[Any], int]]:
        """Return the first prompt and the refine prompt."""
        return [(chain.initial_llm_chain.prompt, 0), (chain.refine_llm_chain.prompt, 1)]


class MapReduce(_Chain):
    """Extracts what each part says about the question, and answers from the extracts, collapsed until they fit.

    LangChain never ends where no two extracts fit together, so it fails after `CALLS_PER_PART` calls for each part.
    """

    chain_type = "map_reduce"

    def load(self, llm: ChatModel) -> Any:
        """Return the chain; its extracts together may fill the window."""
        model = llm.model
        token_max = model.window - model.output - 2 * model.meter.template_tokens - MARGIN
        return _load(llm, self.chain_type, token_max=token_max)

    def prompts(self, chain: Any) -> list[tuple[BasePromptTemplate[Any], int]]:
        """Return the prompt of an extract."""
        return [(chain.llm_chain.prompt, 0)]


def _load(llm: ChatModel, kind: str, **options: Any) -> BaseCombineDocumentsChain:
    with _LOADING, warnings.catch_warnings():
        # Deprecated, but still what existing applications use, which is why it is compared.
        warnings.simplefilter("ignore", LangChainDeprecationWarning)
        return load_qa_chain(llm, kind, **options)


def _room(model: Model, prompt: BasePromptTemplate[Any], question: str, answers: int) -> int:
    """Return how many tokens of a part fit into the prompt."""
    values = dict.fromkeys(prompt.input_variables, "") | {"question": question}
    empty = prompt.format_prompt(**values).to_messages()
    return model.room([_message(message) for message in empty], answers=answers)


def _message(message: BaseMessage) -> Message:
    if isinstance(message, SystemMessage):
        return Message(role="system", content=message.text)
    return Message(role="assistant" if isinstance(message, AIMessage) else "user", content=message.text)
