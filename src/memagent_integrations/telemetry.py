"""A reading as OpenTelemetry spans: one for the reading, below it one for each call of the model. Without OpenTelemetry: nothing, at no cost.

    traced(turns, ...)      the loop again, with spans around it: numbers, names and outcomes, never text
    under(prompt.context)   makes a call's span the current one where the call is made

Names are those of the OpenTelemetry semantic conventions for generative AI (github.com/open-telemetry/semantic-conventions-genai, schema
gen-ai/1.42.0, status "development": they may change), spans `invoke_agent` (internal) and `chat`. What they have no name for is `memagent.*`.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, cast

from memagent_integrations.checks import drop_none
from memagent_integrations.errors import MemAgentError
from memagent_integrations.loop import Turns, advance, exchange, step_made
from memagent_integrations.records import NO_USAGE, Budgets, Prompt, Reading, Reply, Usage

try:
    from opentelemetry import context as contexts
    from opentelemetry import trace
except ImportError:
    contexts = trace = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, TracerProvider

_PROVIDERS = ("openai", "llamacpp", "transformers", "vllm")  # kinds of backends that say what runs the model
_REASONS = ("stop", "length", "content_filter", "tool_calls")
_FRAMEWORKS = ("langchain", "llama-index")  # kinds that do not; the class of the model follows, then its name


def traced(
    turns: Turns, *, model: str, budgets: Budgets | None = None, tracer_provider: TracerProvider | None = None
) -> Turns:
    """The loop `turns`, told to OpenTelemetry: a span that begins with it and ends with it, and in it one for each call.

    The span's parent is what is current here, whichever thread runs the loop later. A step that a journal has recorded makes no call, and no
    span: `turns` is to be the journal's loop, so that it is known. `model` is the backend's name. Without a `tracer_provider` the global one is
    asked. A call begins when the loop asks for it and ends when the loop is given the reply, which is later where a driver is held up.
    """
    if trace is None:
        return turns
    return _Spans(model, contexts.get_current(), tracer_provider).reading(turns, budgets)


def under(context: object | None) -> AbstractContextManager[None]:
    """A block whose spans are children of `context`, that of a prompt; None changes nothing.

    It holds for the thread or the task that enters it, which has to leave it as well. A generator shares both with whoever advances it, so it
    must not yield in such a block: enter it anew for each `next` (or `await anext`) of the stream that is being read.
    """
    return nullcontext() if context is None else _attached(cast("Context", context))


@contextmanager
def _attached(context: Context) -> Iterator[None]:
    token = contexts.attach(context)
    try:
        yield
    finally:
        contexts.detach(token)


class _Spans:
    """The spans of one reading, and what they count: the calls that it made, not what a journal had."""

    def __init__(self, model: str, parent: Context, tracer_provider: TracerProvider | None) -> None:
        provider, self._model = _provider_and_model(model)
        self._known = drop_none(**{"gen_ai.provider.name": provider, "gen_ai.request.model": self._model})
        self._tracer = trace.get_tracer("memagent_integrations", tracer_provider=tracer_provider)
        self._context = parent
        self._usage, self._recorded = NO_USAGE, 0

    def reading(self, turns: Turns, budgets: Budgets | None) -> Turns:
        sizes = drop_none(**{f"memagent.{name}": size for name, size in (asdict(budgets) if budgets else {}).items()})
        asked = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "memagent", **self._known, **sizes}
        span = self._tracer.start_span("invoke_agent memagent", self._context, trace.SpanKind.INTERNAL, asked)
        self._context = trace.set_span_in_context(span, self._context)
        try:
            with closing(turns):  # a journal lets go of its run
                state = advance(turns, None)
                while isinstance(state, Prompt):
                    state = yield from self._passed(turns, state) if state.recorded else self._called(turns, state)
            span.set_attribute("memagent.steps", len(state.steps))
            if state.error:
                _failed(span, state.error)
            return state
        except BaseException as error:
            _failed(span, error)
            raise
        finally:
            spent = _tokens(
                replace(self._usage, cached_tokens=None)
            )  # as the conventions have it: caches are told call by call
            span.set_attributes(spent | {"memagent.recorded_steps": self._recorded})
            span.end()

    def _passed(self, turns: Turns, prompt: Prompt) -> Generator[Prompt, Reply, Prompt | Reading]:
        """A step that is recorded: only counted."""
        self._recorded += 1
        return advance(turns, (yield from exchange(prompt)))

    def _called(self, turns: Turns, prompt: Prompt) -> Generator[Prompt, Reply, Prompt | Reading]:
        asked = {
            "gen_ai.operation.name": "chat",
            **self._known,
            "gen_ai.request.max_tokens": prompt.max_tokens,
            "memagent.step.index": prompt.index,
            "memagent.step.phase": prompt.phase,
        }
        span = self._tracer.start_span(f"chat {self._model}", self._context, trace.SpanKind.CLIENT, asked)
        end: int | None = None
        try:
            try:
                reply = yield replace(prompt, context=trace.set_span_in_context(span, self._context))
                outcome: Reply | MemAgentError = reply
                self._usage += reply.usage
                span.set_attributes(_replied(reply))
            except BaseException as error:
                _failed(span, error)
                if not isinstance(error, MemAgentError):
                    raise
                outcome = error
            end = time.time_ns()  # what the loop does now is not part of the call, but tells what became of its reply
            state = advance(turns, outcome)
            if step := step_made(state, prompt):
                span.set_attributes({"memagent.step.outcome": step.outcome, "memagent.step.cut": step.cut})
            return state
        finally:
            span.end(end)


def _provider_and_model(name: str) -> tuple[str | None, str]:
    """The two as far as the name of a backend tells them."""
    kind, _, model = name.partition(":")
    if kind in _FRAMEWORKS:
        return None, model.partition(":")[2] or model
    return (kind, model) if kind in _PROVIDERS and model else (None, name)


def _replied(reply: Reply) -> dict[str, int | float | list[str]]:
    known = reply.finish_reason in _REASONS
    reasons = [reply.finish_reason if known else "other"] if reply.finish_reason else None
    return _tokens(reply.usage) | drop_none(
        **{"gen_ai.response.finish_reasons": reasons, "memagent.step.seconds": reply.seconds or None}
    )


def _tokens(usage: Usage) -> dict[str, int]:
    return drop_none(
        **{
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        }
    )


def _failed(span: Span, error: BaseException) -> None:
    """Mark a span by the error's class alone, because its message may quote text; a reading that was left has not failed."""
    if isinstance(error, GeneratorExit):
        span.set_attribute("memagent.cancelled", True)
    else:
        span.set_attribute("error.type", type(error).__name__)
        span.set_status(trace.StatusCode.ERROR)
