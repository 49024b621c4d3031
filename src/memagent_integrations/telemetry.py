"""Report a reading to OpenTelemetry: a span for the reading, and within it one for each call of the model.

    traced(turns, ...)      the loop with spans around it: numbers, names and outcomes, never text
    under(prompt.context)   makes a call's span the current one where the call is made

Without OpenTelemetry both do nothing. The names are those of the OpenTelemetry semantic conventions for generative AI
(github.com/open-telemetry/semantic-conventions-genai, schema gen-ai/1.42.0, status "development": they may change):
the spans are `invoke_agent` (internal) and `chat`. Attributes that they have no name for are called `memagent.*`.
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

_PROVIDERS = ("openai", "llamacpp", "transformers", "vllm")  # kinds of backends that name what runs the model
_FRAMEWORKS = ("langchain", "llama-index")  # kinds that do not: KIND:CLASS_OF_MODEL:NAME
_FINISH_REASONS = ("stop", "length", "content_filter", "tool_calls")


def traced(
    turns: Turns,
    *,
    model: str,
    answer_model: str | None = None,
    budgets: Budgets | None = None,
    tracer_provider: TracerProvider | None = None,
) -> Turns:
    """Return the loop with a span around it, and within it one for each call.

    The parent is the span that is current now, whichever thread runs the loop later. A step from a journal makes no
    call and has no span: to know it, pass the loop that the journal returned. `model` is the name of the backend,
    `answer_model` that of the one that answers, if it is another.
    Without a `tracer_provider`, the global one is used. A call's span begins when the loop asks for the call and ends
    when the loop gets the reply, which is later if the driver is held up.
    """
    if trace is None:
        return turns
    return _Spans(model, answer_model or model, contexts.get_current(), tracer_provider).reading(turns, budgets)


def under(context: object | None) -> AbstractContextManager[None]:
    """Make the spans of the block children of a prompt's `context`; None changes nothing.

    This holds in the thread or the task that enters the block, which also has to leave it. A generator runs in the
    thread or task that advances it, so it must not yield inside the block: enter it for each `next` (or `await anext`).
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
    """Makes the spans of one reading, and sums up the calls that it made; steps from a journal are only counted."""

    def __init__(self, model: str, answer_model: str, parent: Context, tracer_provider: TracerProvider | None) -> None:
        self._attributes = {"memory": _model_attributes(model), "answer": _model_attributes(answer_model)}
        self._tracer = trace.get_tracer("memagent_integrations", tracer_provider=tracer_provider)
        self._context = parent
        self._usage, self._recorded_steps = NO_USAGE, 0

    def reading(self, turns: Turns, budgets: Budgets | None) -> Turns:
        """Return the loop with its spans."""
        sizes = asdict(budgets) if budgets else {}
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": "memagent",
            **self._attributes["memory"],
            **drop_none(**{f"memagent.{name}": size for name, size in sizes.items()}),
        }
        span = self._tracer.start_span("invoke_agent memagent", self._context, trace.SpanKind.INTERNAL, attributes)
        self._context = trace.set_span_in_context(span, self._context)
        try:
            with closing(turns):  # so that a journal releases its run
                state = advance(turns, None)
                while isinstance(state, Prompt):
                    state = yield from (self._recorded if state.recorded else self._call)(turns, state)
            lost = len(state.lost_sections)
            span.set_attributes({"memagent.steps": len(state.steps), "memagent.lost_sections": lost})
            if state.error:
                _mark_failed(span, state.error)
            return state
        except BaseException as error:
            _mark_failed(span, error)
            raise
        finally:
            usage = replace(self._usage, cached_tokens=None)  # the conventions have this number for calls only
            span.set_attributes(_usage_attributes(usage) | {"memagent.recorded_steps": self._recorded_steps})
            span.end()

    def _recorded(self, turns: Turns, prompt: Prompt) -> Generator[Prompt, Reply, Prompt | Reading]:
        """Pass on a step from a journal, without a span."""
        self._recorded_steps += 1
        return advance(turns, (yield from exchange(prompt)))

    def _call(self, turns: Turns, prompt: Prompt) -> Generator[Prompt, Reply, Prompt | Reading]:
        """Pass on a step that makes a call, with a span around the call."""
        attributes = {
            "gen_ai.operation.name": "chat",
            **self._attributes[prompt.phase],
            "gen_ai.request.max_tokens": prompt.max_tokens,
            "memagent.step.index": prompt.index,
            "memagent.step.phase": prompt.phase,
        }
        name = f"chat {attributes['gen_ai.request.model']}"
        span = self._tracer.start_span(name, self._context, trace.SpanKind.CLIENT, attributes)
        end: int | None = None
        try:
            try:
                reply = yield replace(prompt, context=trace.set_span_in_context(span, self._context))
                outcome: Reply | MemAgentError = reply
                self._usage += reply.usage
                span.set_attributes(_reply_attributes(reply))
            except BaseException as error:
                _mark_failed(span, error)
                if not isinstance(error, MemAgentError):
                    raise
                outcome = error
            end = time.time_ns()  # the loop's next turn decides the outcome of the step, but is not part of the call
            state = advance(turns, outcome)
            if step := step_made(state, prompt):
                span.set_attributes({"memagent.step.outcome": step.outcome, "memagent.step.cut": step.cut})
            elif isinstance(state, Prompt):
                span.set_attribute("memagent.step.outcome", "asked again")
            return state
        finally:
            span.end(end)


def _model_attributes(name: str) -> dict[str, str]:
    provider, model = _provider_and_model(name)
    return drop_none(**{"gen_ai.provider.name": provider, "gen_ai.request.model": model})


def _provider_and_model(name: str) -> tuple[str | None, str]:
    """Return the provider, None if the backend's name does not hold it, and the name of the model."""
    kind, _, model = name.partition(":")
    if kind in _FRAMEWORKS:
        return None, model.partition(":")[2] or model
    return (kind, model) if kind in _PROVIDERS and model else (None, name)


def _reply_attributes(reply: Reply) -> dict[str, int | float | list[str]]:
    is_known = reply.finish_reason in _FINISH_REASONS
    reasons = [reply.finish_reason if is_known else "other"] if reply.finish_reason else None
    attributes = {"gen_ai.response.finish_reasons": reasons, "memagent.step.seconds": reply.seconds or None}
    return _usage_attributes(reply.usage) | drop_none(**attributes)


def _usage_attributes(usage: Usage) -> dict[str, int]:
    return drop_none(
        **{
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        }
    )


def _mark_failed(span: Span, error: BaseException) -> None:
    """Note the class of the error, not its message, which may quote text. A reading that was closed has not failed."""
    if isinstance(error, GeneratorExit):
        span.set_attribute("memagent.cancelled", True)
    else:
        span.set_attribute("error.type", type(error).__name__)
        span.set_status(trace.StatusCode.ERROR)
