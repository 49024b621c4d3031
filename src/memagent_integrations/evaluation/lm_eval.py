r"""A reader as a model of lm-evaluation-harness.

lm_eval only finds models in its own list, so start its command through this module:

    python -m memagent_integrations.evaluation.lm_eval --model memagent \
        --model_args model=smollm2,chunk_tokens=2000 --tasks niah_single_1,ruler_vt --limit 8 \
        --metadata '{"tokenizer": "HuggingFaceTB/SmolLM2-135M-Instruct", "max_seq_lengths": [4096]}'

`--model_args` are the arguments of `Reader`, those of its backend (base_url, temperature, concurrency, ...), and
prompts=FILE of MemAgent's reference code. RULER measures its prompts with the Hugging Face tokenizer in `--metadata`.
In Python:

    metadata = {"tokenizer": ..., "max_seq_lengths": [4096]}
    lm_eval.simple_evaluate(model=MemAgentLM(reader), tasks=["niah_single_1"], metadata=metadata)
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

_READER_SETTINGS = set(inspect.signature(Reader).parameters) - {"model", "prompts", "limits", "backend_options"}
# The names that tasks use for the output limit. lm_eval, too, takes the first that is set.
_LIMIT_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_DEFAULT_LIMIT = 256  # the default of lm_eval's own models


@register_model("memagent")
class MemAgentLM(LM):  # type: ignore[misc]
    """Answers lm_eval's generation tasks: it reads the document of a prompt in chunks, with the rest as the question.

    `prompt_split.split` separates document and question. An answer continues the task's `gen_prefix`, ends before the
    first of `until`, and has at most `max_gen_toks` tokens of the reader's tokenizer. A failed reading does not count
    as a wrong answer: its error is raised after all the others are done. `--use_cache FILE` keeps their answers for
    the next run; `journal=FILE` in the `--model_args` keeps each step.

    Args:
        model: a `Reader`, or the name of a model.
        prompts: a file of MemAgent's reference code, to use its prompts.
        settings: arguments of `Reader`; all others go to the backend.

    Raises:
        UsageError: a setting is wrong, or `model` is a `Reader` and there are settings.
        MissingExtra: the model's package is not installed.
    """

    def __init__(self, model: str | Reader, *, prompts: str | Path | None = None, **settings: Any) -> None:
        super().__init__()
        if isinstance(model, Reader):
            if settings or prompts:
                raise UsageError("this reader has been made already; give its settings to Reader")
            self.reader = model
            return
        reader_settings = {name: value for name, value in settings.items() if name in _READER_SETTINGS}
        backend_options = {name: value for name, value in settings.items() if name not in _READER_SETTINGS}
        prompt_set = PromptSet.from_reference(prompts) if prompts else None
        reader_settings.setdefault("on_lost_section", "skip")  # it costs points, not the evaluation
        self.reader = Reader(model, prompts=prompt_set, backend_options=backend_options, **reader_settings)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> MemAgentLM:
        """Create the model that the command line describes.

        Raises:
            UsageError: `arg_dict` names no model, or there is a batch size, which only the backend can set.
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
        """Create the model from "name=value,name=value", as `create_from_arg_obj` does."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the answers to the prompts, in their order.

        Raises:
            UsageError: a prompt has no document, or its task asks for sampling.
            MemAgentError: a reading failed. All others are done, and are in lm_eval's cache if there is one.
        """
        prompts = [split(request.args[0], request.doc) for request in requests]
        endings = [_Ending.of(request.args[1]) for request in requests]
        with tqdm(total=len(prompts), desc="reading", disable=disable_tqdm) as bar:
            readings = self.reader.read_many(
                [(parts.full_question, parts.document) for parts in prompts],
                progress=lambda _, step: bar.update(step.is_answer),
            )
        answers = [self._answer(*done) for done in zip(requests, prompts, endings, readings, strict=True)]
        errors = [reading.error for reading in readings if reading.error]
        if errors:
            failed = f"{len(errors)} of {len(readings)} readings failed"
            errors[0].add_note(f"({failed}; --use_cache FILE keeps the answers of the others)")
            raise errors[0]
        return answers

    def loglikelihood(self, requests: Sequence[Instance]) -> NoReturn:
        """Refuse: readings have no likelihood.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "a reading has no likelihood: its answer is written from a memory, which another reading might have "
            "written otherwise; choose tasks that generate (output_type: generate_until)"
        )

    loglikelihood_rolling = loglikelihood

    @property
    def tokenizer_name(self) -> str:
        """Refuse: lm_eval asks for the name only when it wants to apply a chat template itself.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "leave --apply_chat_template away: the reader's backend applies the model's own template to each prompt "
            "of a reading"
        )

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the empty string: the backend applies the model's chat template.

        Raises:
            UsageError: a template is asked for.
        """
        return self.tokenizer_name if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Refuse: the backend applies the model's chat template.

        Raises:
            UsageError: always.
        """
        return self.tokenizer_name

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm_eval writes into its results: the reader's model, prompts and budgets."""
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
            return ""  # generate_until raises the reading's error
        answer = cut(ending.applied(parts.continued(reading.answer)), ending.limit, self.reader.count)
        self.cache_hook.add_partial("generate_until", request.args, answer)
        return answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Ending:
    """Where a task wants an answer to end: before the first of `until`, after at most `limit` tokens."""

    until: tuple[str, ...]
    limit: int

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> _Ending:
        sampled = settings.get("do_sample", float(settings.get("temperature") or 0) > 0)
        if sampled:
            raise UsageError(
                "the task asks for sampling, which is for a reader's backend to do; "
                "pass --gen_kwargs do_sample=False,temperature=0, and the temperature in --model_args"
            )
        until = settings.get("until") or ()
        limits = [int(settings[name]) for name in _LIMIT_NAMES if settings.get(name) is not None]
        return cls(
            until=tuple(filter(None, (until,) if isinstance(until, str) else until)),
            limit=limits[0] if limits else _DEFAULT_LIMIT,
        )

    def applied(self, text: str) -> str:
        ends = [end for stop in self.until if (end := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text


def main() -> None:
    """Run lm_eval's command line, with "memagent" among its models."""
    try:
        cli_evaluate()
    except MemAgentError as error:
        sys.exit(" ".join((f"memagent: {error}", *getattr(error, "__notes__", ()))))


if __name__ == "__main__":
    main()
