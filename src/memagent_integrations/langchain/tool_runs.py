"""Tools around a reader, whose runs show what the reader's shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from langchain_core.callbacks import Callbacks
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool, StructuredTool
from pydantic import Field

from memagent_integrations.langchain.settings import ReaderSettings


class ToolOfReader(BaseTool):
    """A tool around a reader."""

    reader: Any

    def __init__(self, **fields: Any) -> None:  # its subclasses take more fields than a type checker sees
        super().__init__(**fields)

    def run(
        self,
        tool_input: str | dict[str, Any],
        verbose: bool | None = None,
        start_color: str | None = "green",
        color: str | None = "green",
        callbacks: Callbacks = None,
        **options: Any,
    ) -> Any:
        """Read the document for a question, or for a call of the tool; in a run that shows what the reader's shows."""
        with self._traced(callbacks, options) as (tool, told):
            return super(ToolOfReader, tool).run(tool_input, verbose, start_color, color, **told)

    async def arun(
        self,
        tool_input: str | dict[str, Any],
        verbose: bool | None = None,
        start_color: str | None = "green",
        color: str | None = "green",
        callbacks: Callbacks = None,
        **options: Any,
    ) -> Any:
        """`run`, async."""
        with self._traced(callbacks, options) as (tool, told):
            return await super(ToolOfReader, tool).arun(tool_input, verbose, start_color, color, **told)

    @contextmanager
    def _traced(self, callbacks: Callbacks, options: Mapping[str, Any]) -> Iterator[tuple[Self, dict[str, Any]]]:
        """Yield this tool and the options of its run, with callbacks that see what the reader's traces show."""
        config: Any = {**(options.get("config") or {}), "callbacks": callbacks}
        with self.reader.tracing(config) as traced:
            tool = self.model_copy(update={"callbacks": self.reader.traced_callbacks(self.callbacks)})
            yield tool, {**options, "config": traced, "callbacks": traced.get("callbacks")}

    def _filter_injected_args(self, tool_input: dict[str, Any]) -> dict[str, Any]:
        """Return what handlers are told of the input: LangChain leaves out what the model does not pass."""
        told: dict[str, Any] = self.reader.traced(super()._filter_injected_args(tool_input))
        return told


class _RunnableTool(ToolOfReader, StructuredTool):
    """What `as_tool` makes."""

    reader: Any = Field(exclude=True, repr=False)


def tool_of(
    runnable: Runnable[Any, Any], reader: ReaderSettings, args_schema: Any, settings: Mapping[str, Any]
) -> BaseTool:
    """Return the tool that `Runnable.as_tool` makes of a reader, or of what gives its answers otherwise."""
    if args_schema is None:  # LangChain would ask for every key of the input, the memory too
        settings = {"arg_types": {"question": str, "context": Any}, **settings}
    tool: Any = Runnable.as_tool(runnable, args_schema, **settings)
    fields = {name: getattr(tool, name) for name in tool.model_fields_set}
    return _RunnableTool(**fields, reader=reader)
