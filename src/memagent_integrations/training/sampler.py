"""The policy at work: a transformers model that keeps what it writes as tokens, with their probabilities, and reads a shared beginning once."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from memagent_integrations.backends.in_process import ChatTokenizer
from memagent_integrations.backends.transformers import TransformersBackend, copy_error
from memagent_integrations.checks import check_int, drop_none
from memagent_integrations.errors import BackendError, MemAgentError, UsageError
from memagent_integrations.records import Message, Prompt, Reply
from memagent_integrations.training.conversations import Sampled
from memagent_integrations.training.forward import Past
from memagent_integrations.training.prefixes import bundles, whole

_SIDE_BY_SIDE = 1 << 16  # readings


class Sampler(TransformersBackend):
    """A `TransformersBackend` whose replies are `Sampled`. All readings that it is given go on side by side.

    Prompts are computed together as long as they and the longest replies that they allow come to `tokens` tokens (by default 131,072 on a GPU and
    32,768 on the CPU). What they begin with alike is computed once as long as `share` is true (`usage.cached_tokens` says how much that saved).
    `options` are those of `TransformersBackend`. `model` is the torch module that learns, and `temperature` the one that is sampled with.

    Raises:
        as `TransformersBackend`.
    """

    trained_in: Path | None = None
    """The folder of the training that it learns in; None: it has not learned."""
    loaded: str = ""
    """Tells the weights with which that began from others."""
    published: str | None = None
    """The name under which a server has the weights; None: this process alone has them."""

    def __init__(
        self,
        model: str | Path,
        *,
        temperature: float = 1.0,
        tokens: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        check_int(**drop_none(tokens=tokens))
        if refused := {"top_p", "seed", "batch_size"} & options.keys():
            raise UsageError(
                f"a Sampler takes no {' or '.join(sorted(refused))}: what it samples has to be what training computes"
            )
        super().__init__(model, temperature=temperature, batch_size=_SIDE_BY_SIDE, **options)
        self.share = True
        self._most = tokens or (131_072 if self.model.device.type == "cuda" else 32_768)
        self._chat = ChatTokenizer(
            self.tokenizer, chat_template_kwargs, remember=4096
        )  # the rollouts of a group read the same

    @contextmanager
    def greedy(self) -> Iterator[None]:
        """Write the likeliest tokens, for as long as this is open."""
        temperature, self.temperature = self.temperature, 0.0
        try:
            yield
        finally:
            self.temperature = temperature

    def publish(self) -> str | None:
        """The name under which the weights of now are served, where replies are written elsewhere; here they are not."""
        return None

    def shown(self, messages: tuple[Message, ...], reply: str) -> Sampled:
        """A reply that the policy did not write, as it would have written it.

        Raises:
            ContextOverflow: both do not fit into the window.
        """
        end = self.tokenizer.eos_token_id
        ends = sorted(self._ends)[:1] if end is None else [end]
        output = [*self.tokenizer(reply, add_special_tokens=False, verbose=False)["input_ids"], *ends]
        prompt = self._chat.encode(
            Prompt(index=0, phase="memory", messages=messages, max_tokens=len(output)), self.window
        )
        return Sampled(text=reply, prompt_ids=array("i", prompt), output_ids=array("i", output), logprobs=array("f"))

    def _groups(self, rows: Mapping[int, Sequence[int]], limits: Mapping[int, int]) -> Iterator[tuple[list[int], int]]:
        places = list(rows)
        prompts = [array("i", rows[place]) for place in places]
        for bundle in bundles(prompts) if self.share else [whole(prompts)]:
            order = sorted((places[number] for number in bundle.rows), key=lambda place: -len(rows[place]))
            while order:
                size = max(self._most // (len(rows[order[0]]) + max(limits[place] for place in order)), 1)
                yield order[:size], bundle.shared
                del order[:size]

    @property
    def _sizes(self) -> str:
        return f"tokens (now {self._most:,}; rollout_tokens in a recipe) or chunk_tokens"

    def _replies(self, rows: list[list[int]], limits: list[int], shared: int) -> list[Reply | MemAgentError]:
        started = time.perf_counter()
        recorder = _Recorder(self.temperature or 1.0)
        try:
            past = {"past_key_values": self._past(rows[0][:shared], len(rows))} if shared else {}
            written = self._generate(
                rows, limits, shared=shared, logits_processor=LogitsProcessorList([recorder]), **past
            )
        except BackendError as error:
            return [copy_error(error) for _ in rows]
        replies = zip(rows, written, recorder.logprobs(written), strict=True)
        return [
            self._sampled(row, ids, logprobs, started, shared if number else 0)
            for number, (row, ids, logprobs) in enumerate(replies)
        ]

    def _past(self, ids: list[int], rows: int) -> Any:
        with self._lock, self._errors(rows), torch.no_grad():
            return Past(self.model, array("i", ids)).cache(rows)

    def _sampled(self, row: list[int], ids: list[int], logprobs: list[float], started: float, cached: int) -> Sampled:
        reply = self._reply(row, ids, started)
        return Sampled(
            text=reply.text,
            usage=replace(reply.usage, cached_tokens=cached),
            finish_reason=reply.finish_reason,
            seconds=reply.seconds,
            prompt_ids=array("i", row),
            output_ids=array("i", ids),
            logprobs=array("f", logprobs),
        )


class _Recorder(LogitsProcessor):
    """Keeps the log-probability of every token that is chosen. It is asked before each of them, with all that were chosen so far."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self._chosen: list[Tensor] = []  # one a token, (rows,)
        self._next: Tensor | None = None  # (rows, vocabulary): of those that may come next

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if self._next is not None:
            self._chosen.append(self._next.gather(-1, input_ids[:, -1:])[:, 0])
        self._next = torch.log_softmax(scores.float() / self.temperature, dim=-1)
        return scores

    def logprobs(self, written: Sequence[Sequence[int]]) -> list[list[float]]:
        """Those of what each row wrote."""
        if self._next is None:
            raise AssertionError("nothing was written")
        known = torch.stack(self._chosen, dim=1).tolist() if self._chosen else [[] for _ in written]
        place = len(self._chosen)
        last = self._next[range(len(written)), [ids[place] if len(ids) > place else 0 for ids in written]].tolist()
        return [[*earlier, end][: len(ids)] for earlier, end, ids in zip(known, last, written, strict=True)]
