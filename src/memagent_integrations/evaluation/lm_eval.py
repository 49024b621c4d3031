"""A reader as a model of lm-evaluation-harness.

lm_eval looks for models in its own list alone, so its command is started through this module:

    python -m memagent_integrations.evaluation.lm_eval --model memagent --model_args model=smollm2,chunk_tokens=2000 \
        --tasks niah_single_1,ruler_vt --metadata '{"tokenizer": "HuggingFaceTB/SmolLM2-135M-Instruct", "max_seq_lengths": [4096]}' --limit 8

`--model_args` are the arguments of `Reader`, of its backend (base_url, temperature, concurrency, ...), and prompts=FILE of MemAgent's reference code.
RULER makes its prompts as long as the Hugging Face tokenizer in `--metadata` counts. In Python:

    lm_eval.simple_evaluate(model=MemAgentLM(reader), tasks=["niah_single_1"], metadata={"tokenizer": ..., "max_seq_lengths": [4096]})
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from memagent_integrations.errors import MemAgentError, MissingExtra, UsageError
from memagent_integrations.evaluation.prompt_split import SplitPrompt, split
from memagent_integrations.prompts import PromptSet
from memagent_integrations.reader import Reader
from memagent_integrations.records import Reading
from memagent_integrations.tokens import cut

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import simple_parse_args_string
    from tqdm import tqdm
except ImportError as error:
    raise MissingExtra.extra("lm_eval", "lm-eval") from error

_READER = set(inspect.signature(Reader).parameters) - {"model", "prompts", "limits", "backend_options"}
_MOST = (
    "max_gen_toks",
    "max_new_tokens",
    "max_tokens",
    "max_completion_tokens",
)  # names that tasks use; lm_eval takes the first of them
_DEFAULT_MOST = 256  # as lm_eval's own models have it


@register_model("memagent")
class MemAgentLM(LM):  # type: ignore[misc]
    """Answers lm_eval's generation tasks by reading: the document of a prompt in chunks, the rest of it as the question (`parts.split`).

    The document is told from the question by the task's wording, see there. An answer goes on from the task's `gen_prefix`, ends before the first of
    `until`, and has at most `max_gen_toks` tokens of the reader's tokenizer. A reading that fails is no wrong answer: when all are done, its error
    is raised, and `--use_cache FILE` has kept the answers of the others for the next run, `journal=FILE` in the `--model_args` each step.

    Args:
        model: a `Reader`, or the name of a model, which the settings go with.
        prompts: a file of MemAgent's reference code, whose prompts are taken.
        settings: arguments of `Reader`; all others are the backend's.

    Raises:
        UsageError: a setting is wrong, or there are settings for a reader that has been made already.
        MissingExtra: the model's package is not installed.
    """

    def __init__(self, model: str | Reader, *, prompts: str | Path | None = None, **settings: Any) -> None:
        super().__init__()
        if isinstance(model, Reader):
            if settings or prompts:
                raise UsageError("this reader has been made already; give its settings to Reader")
            self.reader = model
            return
        options = {name: value for name, value in settings.items() if name not in _READER}
        own = {name: value for name, value in settings.items() if name in _READER}
        self.reader = Reader(
            model, prompts=PromptSet.from_reference(prompts) if prompts else None, backend_options=options, **own
        )

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> MemAgentLM:
        """The model that the command line describes. How many calls are made at a time, and where, is the backend's to say, not lm_eval's.

        Raises:
            UsageError: there is no model in `arg_dict`, or a batch size that would change nothing.
        """
        batch = str((additional_config or {}).get("batch_size") or 1)
        if batch != "1":
            raise UsageError(
                f"--batch_size {batch} has no effect here; give the backend batch_size or concurrency in --model_args"
            )
        if "model" not in arg_dict:
            raise UsageError("--model_args has to name a model: model=smollm2, model=openai:NAME, ...")
        return cls(**arg_dict)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None) -> MemAgentLM:
        """`create_from_arg_obj` of "name=value,name=value"."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answers to the prompts, in their order.

        Raises:
            UsageError: a prompt has no document, or its task asks for sampling.
            MemAgentError: a reading failed; all others are done, and in lm_eval's cache if it has one.
        """
        prompts = [split(request.args[0], request.doc) for request in requests]
        endings = [_Ending.of(request.args[1]) for request in requests]
        with tqdm(total=len(prompts), desc="reading", disable=disable_tqdm) as bar:
            readings = self.reader.read_many(
                [(parts.asked, parts.document) for parts in prompts],
                progress=lambda _, step: bar.update(step.phase == "answer"),
            )
        answers = [self._answer(*done) for done in zip(requests, prompts, endings, readings, strict=True)]
        failed = [reading.error for reading in readings if reading.error]
        if failed:
            failed[0].add_note(
                f"({len(failed)} of {len(readings)} readings failed; --use_cache FILE keeps the answers of the others)"
            )
            raise failed[0]
        return answers

    def loglikelihood(self, requests: Sequence[Instance]) -> NoReturn:
        """Not to be had.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "a reading has no likelihood: its answer is written from a memory, which another reading might have written otherwise; choose tasks that "
            "generate (output_type: generate_until)"
        )

    loglikelihood_rolling = loglikelihood

    @property
    def tokenizer_name(self) -> str:
        """Not to be had: lm_eval asks for it where it is to apply a chat template.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "leave --apply_chat_template away: the reader's backend applies the model's own template to each prompt of a reading"
        )

    def chat_template(self, chat_template: bool | str = False) -> str:
        """None, and none can be asked for.

        Raises:
            UsageError: one is.
        """
        return self.tokenizer_name if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Not to be had.

        Raises:
            UsageError: always.
        """
        return self.tokenizer_name

    def get_model_info(self) -> dict[str, Any]:
        """What lm_eval writes into its results: model, prompts and budgets of the reader."""
        reader = self.reader
        return {
            "memagent": {
                "model": reader.backend.name,
                "prompts": reader.prompts.name,
                **dataclasses.asdict(reader.budgets),
            }
        }

    def _answer(self, request: Instance, parts: SplitPrompt, ending: _Ending, reading: Reading) -> str:
        if reading.answer is None:
            return ""  # never returned
        answer = ending.of_text(parts.continued(reading.answer))
        answer = cut(answer, ending.most, self.reader.count)
        self.cache_hook.add_partial("generate_until", request.args, answer)
        return answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Ending:
    """Where a task wants an answer to end: before any of `until`, after at most `most` tokens."""

    until: tuple[str, ...]
    most: int

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> _Ending:
        sampled = settings.get("do_sample", float(settings.get("temperature") or 0) > 0)
        if sampled:
            raise UsageError(
                "the task asks for sampling, which is for a reader's backend to do; "
                "pass --gen_kwargs do_sample=False,temperature=0, and the temperature in --model_args"
            )
        until = settings.get("until") or ()
        most = next((int(settings[name]) for name in _MOST if settings.get(name) is not None), _DEFAULT_MOST)
        return cls(until=tuple(filter(None, (until,) if isinstance(until, str) else until)), most=most)

    def of_text(self, text: str) -> str:
        ends = [place for sign in self.until if (place := text.find(sign)) >= 0]
        return text[: min(ends)] if ends else text


def main() -> None:
    """lm_eval's command line, with "memagent" among its models."""
    try:
        cli_evaluate()
    except MemAgentError as error:
        sys.exit(" ".join((f"memagent: {error}", *getattr(error, "__notes__", ()))))


if __name__ == "__main__":
    main()
