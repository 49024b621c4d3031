"""The policy as a backend: a transformers model that keeps what it writes as tokens with their log-probabilities."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from memagent_integrations.backends.in_process import ChatTokenizer
from memagent_integrations.backends.past import Past
from memagent_integrations.backends.prefixes import bundles, whole
from memagent_integrations.backends.transformers import TransformersBackend, copy_error
from memagent_integrations.checks import check_int, drop_none
from memagent_integrations.errors import BackendError, MemAgentError, UsageError
from memagent_integrations.records import Message, Prompt, Reply
from memagent_integrations.training.conversations import Sampled
from memagent_integrations.training.memory import sampling_tokens

_SIDE_BY_SIDE = 1 << 16  # readings


class Sampler(TransformersBackend):
    """A `TransformersBackend` whose replies are `Sampled`, and which computes all readings side by side.

    `model` is the torch module that learns. While `share` is true, the common prefix of prompts is computed once
    (`usage.cached_tokens` says how many tokens that saved).

    Args:
        model: as of `TransformersBackend`.
        temperature: sampling temperature.
        tokens: most tokens that are computed together, prompts and their longest replies; by default as many as the
            free memory holds, at most 131,072 on a GPU and 32,768 on the CPU.
        chat_template_kwargs: as of `TransformersBackend`.
        options: further options of `TransformersBackend`.

    Raises:
        MemAgentError: as `TransformersBackend` raises it.
    """

    trained_in: Path | None = None
    """The folder of the training that this policy learns in; None: it has not learned."""
    loaded: str = ""
    """A digest of the weights with which that training began."""
    published: str | None = None
    """The name under which a server has the weights; None: only this process has them."""

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
            names = " or ".join(sorted(refused))
            raise UsageError(f"a Sampler takes no {names}: what it samples has to be what training computes")
        super().__init__(model, temperature=temperature, batch_size=_SIDE_BY_SIDE, **options)
        most = 131_072 if self.model.device.type == "cuda" else 32_768
        self._most_tokens = tokens or sampling_tokens(self.model, most)
        # The rollouts of a group read the same texts, whose tokens are kept.
        self._chat = ChatTokenizer(self.tokenizer, chat_template_kwargs, remember=4096)

    @contextmanager
    def greedy(self) -> Iterator[None]:
        """Write the most likely tokens in the block, instead of sampling."""
        temperature, self.temperature = self.temperature, 0.0
        try:
            yield
        finally:
            self.temperature = temperature

    def publish(self) -> str | None:
        """Send the current weights to the server that writes the replies, and return their name there.

        Here there is no server, and the name is None.
        """
        return None

    def encode_reply(self, messages: tuple[Message, ...], reply: str) -> Sampled:
        """Return the tokens of a given reply, as if the policy had written it; without log-probabilities.

        Raises:
            ContextOverflow: the prompt and the reply do not fit the window.
        """
        end = self.tokenizer.eos_token_id
        ends = sorted(self._ends)[:1] if end is None else [end]
        output = [*self.tokenizer(reply, add_special_tokens=False, verbose=False)["input_ids"], *ends]
        prompt = Prompt(index=0, phase="memory", messages=messages, max_tokens=len(output))
        ids = self._chat.encode(prompt, self.window)
        return Sampled(text=reply, prompt_ids=array("i", ids), output_ids=array("i", output), logprobs=array("f"))

    def _groups(self, rows: Mapping[int, Sequence[int]], limits: Mapping[int, int]) -> Iterator[tuple[list[int], int]]:
        indices = list(rows)
        prompts = [array("i", rows[index]) for index in indices]
        for bundle in bundles(prompts) if self.share else [whole(prompts)]:
            order = sorted((indices[number] for number in bundle.rows), key=lambda index: -len(rows[index]))
            while order:
                longest = len(rows[order[0]]) + max(limits[index] for index in order)
                size = max(self._most_tokens // longest, 1)
                yield order[:size], bundle.shared
                del order[:size]

    @property
    def _sizes(self) -> str:
        return f"tokens (now {self._most_tokens:,}; rollout_tokens in a recipe) or chunk_tokens"

    def _replies(self, rows: list[list[int]], limits: list[int], shared: int) -> list[Reply | MemAgentError]:
        started = time.perf_counter()
        recorder = _Recorder(self.temperature or 1.0)
        processors = LogitsProcessorList([recorder])
        try:
            past = {"past_key_values": self._computed(rows[0][:shared], len(rows))} if shared else {}
            written = self._generate(rows, limits, shared=shared, logits_processor=processors, **past)
        except BackendError as error:
            return [copy_error(error) for _ in rows]
        replies = zip(rows, written, recorder.logprobs(written), strict=True)
        return [
            self._sampled(row, ids, logprobs, started, shared if number else 0)
            for number, (row, ids, logprobs) in enumerate(replies)
        ]

    def _computed(self, ids: list[int], rows: int) -> Any:
        with self._lock, self._errors(rows):  # kept for no other call: the weights change
            return Past(self.model, ids).cache(rows)

    def _sampled(self, row: list[int], ids: list[int], logprobs: list[float], started: float, cached: int) -> Sampled:
        reply = self._reply(row, ids, cached, started)
        return Sampled(
            text=reply.text,
            usage=reply.usage,
            finish_reason=reply.finish_reason,
            seconds=reply.seconds,
            prompt_ids=array("i", row),
            output_ids=array("i", ids),
            logprobs=array("f", logprobs),
        )


class _Recorder(LogitsProcessor):
    """Record the log-probability of every chosen token. It is called before each choice, with all tokens before it."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self._chosen: list[Tensor] = []  # one tensor (rows,) per token
        self._next: Tensor | None = None  # (rows, vocabulary), of the token that is chosen next

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if self._next is not None:
            self._chosen.append(self._next.gather(-1, input_ids[:, -1:])[:, 0])
        self._next = torch.log_softmax(scores.float() / self.temperature, dim=-1)
        return scores

    def logprobs(self, written: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probabilities of the tokens that each row wrote."""
        if self._next is None:
            raise AssertionError("nothing was written")
        earlier = torch.stack(self._chosen, dim=1).tolist() if self._chosen else [[] for _ in written]
        position = len(self._chosen)  # the last choice, after which this was not called again
        last_ids = [ids[position] if len(ids) > position else 0 for ids in written]
        last = self._next[range(len(written)), last_ids].tolist()
        return [[*row, end][: len(ids)] for row, end, ids in zip(earlier, last, written, strict=True)]
