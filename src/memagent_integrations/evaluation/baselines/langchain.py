"""LangChain's refine and map-reduce (`langchain_classic`), as its users have them: its chains, its prompts, its splitter."""

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
from langchain_text_splitters import RecursiveCharacterTextSplitter

from memagent_integrations.errors import EmptyDocument
from memagent_integrations.evaluation.baselines.base import CALLS_A_PART, Baseline, Found, Model
from memagent_integrations.evaluation.samples import Sample
from memagent_integrations.prompts import MARGIN
from memagent_integrations.records import Message

_OVERLAP = 200  # the splitter's default
_LOADING = threading.Lock()  # the filters of warnings are those of the whole process


class ChatModel(BaseChatModel):
    """A LangChain chat model over a model."""

    model: Any

    @property
    def _llm_type(self) -> str:
        return "memagent-evaluation"

    def get_num_tokens(self, text: str) -> int:
        """Tokens of a text."""
        return int(self.model.count(text))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        said = self.model.ask([_message(message) for message in messages], kwargs.get("max_tokens"))
        for sign in stop or ():
            said = said.partition(sign)[0]
        return ChatResult(generations=[ChatGeneration(message=AIMessage(content=said))])


class _Chain(Baseline):
    """A chain over the documents that LangChain's default splitter makes of a text. The whole text is held, as its users hold it."""

    chain_type: ClassVar[str]

    def find(self, sample: Sample, model: Model) -> Found:
        """The chain's answer."""
        text = "".join(sample.document())
        if not text.strip():
            raise EmptyDocument
        chain = self.load(ChatModel(model=model, cache=False))
        size = min(_room(model, prompt, sample.question, answers) for prompt, answers in self.prompts(chain))
        splitter = RecursiveCharacterTextSplitter(
            chunk_size=size, chunk_overlap=min(_OVERLAP, size // 2), length_function=model.count
        )
        parts = [Document(page_content=part) for part in splitter.split_text(text)]
        model.most = CALLS_A_PART * len(parts)
        answer = chain.invoke({"input_documents": parts, "question": sample.question})["output_text"]
        return Found(answer=str(answer), details={"parts": len(parts), "part_tokens": size})

    def load(self, llm: ChatModel) -> Any:
        """The chain, with LangChain's own prompts."""
        return _loaded(llm, self.chain_type)

    @abstractmethod
    def prompts(self, chain: Any) -> list[tuple[BasePromptTemplate[Any], int]]:
        """The prompts that show a part of the document, and how many earlier answers each of them shows too."""


class Refine(_Chain):
    """An answer from the first part, refined with each other one; parts leave room for the answer so far."""

    chain_type = "refine"

    def prompts(self, chain: Any) -> list[tuple[BasePromptTemplate[Any], int]]:
        """The first prompt, and that of refining."""
        return [(chain.initial_llm_chain.prompt, 0), (chain.refine_llm_chain.prompt, 1)]


class MapReduce(_Chain):
    """What each part says to the question, and one answer from all of that, which is collapsed while it is too long for one window.

    Where no two extracts fit together LangChain goes on for ever: ten calls for each part are a failure.
    """

    chain_type = "map_reduce"

    def load(self, llm: ChatModel) -> Any:
        """The chain; its extracts together may fill the window."""
        terms = llm.model.terms
        return _loaded(
            llm, self.chain_type, token_max=terms.window - terms.output - 2 * terms.backend.template_tokens - MARGIN
        )

    def prompts(self, chain: Any) -> list[tuple[BasePromptTemplate[Any], int]]:
        """The prompt of an extract."""
        return [(chain.llm_chain.prompt, 0)]


def _loaded(llm: ChatModel, kind: str, **options: Any) -> BaseCombineDocumentsChain:
    with _LOADING, warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", LangChainDeprecationWarning
        )  # that it is there only for what was built on it is why it is here
        return load_qa_chain(llm, kind, **options)


def _room(model: Model, prompt: BasePromptTemplate[Any], question: str, answers: int) -> int:
    """Tokens of a part with which the prompt fits."""
    empty = prompt.format_prompt(**dict.fromkeys(prompt.input_variables, "") | {"question": question}).to_messages()
    return model.room([_message(message) for message in empty], answers=answers)


def _message(message: BaseMessage) -> Message:
    if isinstance(message, SystemMessage):
        return Message(role="system", content=message.text)
    return Message(role="assistant" if isinstance(message, AIMessage) else "user", content=message.text)
