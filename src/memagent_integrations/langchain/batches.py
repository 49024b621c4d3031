"""The batch methods of the runnable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Hashable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import aclosing, closing, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list, get_executor_for_config

from memagent_integrations.backends.gate import Gate
from memagent_integrations.errors import MemAgentError
from memagent_integrations.langchain.inputs import ReaderInput, task_of
from memagent_integrations.langchain.settings import ReaderSettings
from memagent_integrations.reader.sharing import SharedDocuments

Pair = tuple[int, Any]
"""The number of an input, and its answer (or its error)."""


class BatchingReader(ReaderSettings):
    """A reader with batches: each input is a run of its own, with a config of its own.

    A backend that computes prompts together gets those of up to `batch_size` readings at a time. Of another backend, or
    a model given by name, `concurrency` readings run at a time. `max_concurrency` in the config lowers both. A
    LangChain model is called as often at a time as LangChain does it.

    A document that several inputs have (the same object, or equal texts or paths) is read and cut once for all of them,
    and may then be an iterator.
    """

    def batch(
        self, inputs: list[ReaderInput], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[AIMessage]:
        """Return the answers for many inputs, in their order."""
        with closing(self._batch(inputs, config, kwargs)) as plan:
            if plan.at_a_time == 1:
                options: Any = {"return_exceptions": return_exceptions, **kwargs}
                return ReaderSettings.batch(plan.reader, inputs, plan.configs, **options)
            outputs = dict(plan.completed(return_exceptions=return_exceptions))
            return [outputs[number] for number in range(len(inputs))]

    def batch_as_completed(
        self, inputs: Sequence[ReaderInput], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> Iterator[Pair]:
        """`batch`, as an iterator over pairs of number and answer, as they are completed."""
        options: Any = {"return_exceptions": return_exceptions}
        with closing(self._batch(inputs, config, kwargs)) as plan:
            if plan.at_a_time == 1:
                yield from ReaderSettings.batch_as_completed(plan.reader, inputs, plan.configs, **options, **kwargs)
            else:
                yield from plan.completed(**options)

    async def abatch(
        self, inputs: list[ReaderInput], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[AIMessage]:
        """`batch`, async."""
        plan = await asyncio.to_thread(self._batch, inputs, config, kwargs)
        async with aclosing(plan.acompleted(return_exceptions=return_exceptions)) as pairs:
            outputs = {number: output async for number, output in pairs}
        return [outputs[number] for number in range(len(inputs))]

    async def abatch_as_completed(
        self, inputs: Sequence[ReaderInput], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> AsyncGenerator[Pair]:
        """`batch_as_completed`, async."""
        plan = await asyncio.to_thread(self._batch, inputs, config, kwargs)
        async with aclosing(plan.acompleted(return_exceptions=return_exceptions)) as pairs:
            async for pair in pairs:
                yield pair

    def _batch(self, inputs: Sequence[ReaderInput], config: Any, options: dict[str, Any]) -> _Batch:
        """Return how these inputs are read: how many at a time, and whether their prompts are asked together."""
        configs = get_config_list(config, len(inputs)) if inputs else []
        try:
            reader = self.loaded_reader()
        except MemAgentError:  # each of the inputs raises it, in its own run
            return _Batch(self, inputs, configs, options)
        own = self._sharing(inputs, configs, options)
        backends = [reader.backend, reader.answer_backend]
        most = [limit for config in configs[:1] if (limit := config.get("max_concurrency"))]
        size = min([max(backend.batch_size for backend in backends), *most])
        if size == 1:
            models = [(self.model, reader.backend), (self.answer_model or self.model, reader.answer_backend)]
            bounds = [backend.concurrency for model, backend in models if not isinstance(model, Runnable)]
            bounded = RunnableConfig(max_concurrency=min([*bounds, *most])) if bounds else RunnableConfig()
            return _Batch(own, inputs, [{**config, **bounded} for config in configs], options)
        return _Batch(own, inputs, configs, options, size)

    def _sharing(
        self, inputs: Sequence[ReaderInput], configs: Sequence[RunnableConfig], options: dict[str, Any]
    ) -> BatchingReader:
        """Return this reader, or if inputs have a document in common, a copy that reads it once for them."""
        documents: list[tuple[Any, Hashable]] = []
        for value, config in zip(inputs, configs, strict=True):
            with suppress(MemAgentError):  # which this input raises in its own run
                context = task_of(value, options).context
                documents += [] if isinstance(context, Runnable) else [(context, self.variant(config))]
        if not (shared := SharedDocuments(documents)):
            return self
        reader = self.model_copy()
        reader._shared = shared
        return reader


@dataclass(frozen=True)
class _Batch:
    """Inputs to read, `at_a_time` of them with their prompts asked together (1: each on its own)."""

    reader: BatchingReader
    inputs: Sequence[ReaderInput]
    configs: list[RunnableConfig]
    options: dict[str, Any]
    at_a_time: int = 1

    def close(self) -> None:
        """Let go of the documents that inputs share; their readings have ended."""
        if self.reader._shared:
            self.reader._shared.close()

    def completed(self, *, return_exceptions: bool) -> Iterator[Pair]:
        gate, reader = self._begin()

        def read(number: int) -> Pair:
            with gate.member():
                try:
                    return number, reader.invoke(self.inputs[number], self.configs[number], **self.options)
                except Exception as error:
                    if return_exceptions:
                        return number, error
                    raise

        if not self.inputs:
            return
        with get_executor_for_config({"max_concurrency": self.at_a_time}) as executor:
            tasks = [executor.submit(read, number) for number in range(len(self.inputs))]
            try:
                for task in as_completed(tasks):
                    yield task.result()
            finally:
                gate.stop()
                for task in tasks:
                    task.cancel()

    async def acompleted(self, *, return_exceptions: bool) -> AsyncGenerator[Pair]:
        """`completed`, async, also for inputs that are read each on its own.

        LangChain's own batches would leave tasks behind when they are cancelled, or left.
        """
        gate, reader = self._begin() if self.at_a_time > 1 else (None, self.reader)
        most = self.at_a_time if gate else self.configs[0].get("max_concurrency") if self.configs else None
        free = asyncio.Semaphore(most) if most else nullcontext()

        async def read(number: int) -> Pair:
            async with free, gate.amember() if gate else nullcontext():
                try:
                    return number, await reader.ainvoke(self.inputs[number], self.configs[number], **self.options)
                except Exception as error:
                    if return_exceptions:
                        return number, error
                    raise

        tasks = [asyncio.create_task(read(number)) for number in range(len(self.inputs))]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            if gate:
                gate.stop()
            for own in tasks:
                own.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self.reader._shared:
                await self.reader._shared.aclose()

    def _begin(self) -> tuple[Gate, BatchingReader]:
        gate = Gate(len(self.inputs), self.at_a_time)
        reader = self.reader.model_copy()
        reader._gate = gate
        return gate, reader
