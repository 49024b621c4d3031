"""`memagent plan`: what a reading would take, before it is begun."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from memagent_integrations.checks import drop_none
from memagent_integrations.cli import inputs, models, options
from memagent_integrations.cli.streams import show
from memagent_integrations.cli.tables import write_table
from memagent_integrations.errors import UsageError
from memagent_integrations.flops import LENGTHS, Cost, ModelSize, costs
from memagent_integrations.prompts import PromptSet
from memagent_integrations.reader import Reader
from memagent_integrations.records import Budgets, Plan

_Files = Annotated[
    list[str] | None, typer.Argument(metavar="[FILE...]", help="Text files, read in this order.", show_default=False)
]
_Questions = Annotated[
    list[str] | None,
    typer.Option("--question", "-q", help="What to answer; several are asked in one pass.", show_default=False),
]
_Flops = Annotated[
    bool, typer.Option("--flops", help="Show floating-point operations by length, of this loop and of full attention.")
]
_Sizes = Annotated[
    Path | None,
    typer.Option(metavar="CONFIG.json", help="A model's config.json, for --flops [Qwen2.5-7B].", show_default=False),
]
_Json = Annotated[bool, typer.Option("--json", help="Write the numbers as JSON.")]


def plan(
    files: _Files = None,
    questions: _Questions = None,
    model: options.Model = "smollm2",
    answer_model: options.AnswerModel = None,
    base_model: options.BaseModel = None,
    chunk_tokens: options.ChunkTokens = None,
    memory_tokens: options.MemoryTokens = None,
    output_tokens: options.OutputTokens = None,
    question_tokens: options.QuestionTokens = None,
    overlap_tokens: options.OverlapTokens = None,
    window: options.Window = None,
    layout: options.LayoutOption = None,
    prompts: options.Prompts = None,
    lookup: options.Lookup = 0,
    strategy: options.StrategyOption = None,
    segments: options.Segments = None,
    reread: options.Reread = 0,
    base_url: options.BaseUrl = None,
    answer_base_url: options.AnswerBaseUrl = None,
    tokenizer: options.Tokenizer = None,
    prompt_price: options.PromptPrice = None,
    completion_price: options.CompletionPrice = None,
    flops: _Flops = False,
    sizes: _Sizes = None,
    as_json: _Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Tell what reading FILE... for a question would take: chunks, calls, tokens and money. No model is called.

    With --flops alone, show the cost of documents of any length, for the budgets that are given.
    """
    prices = drop_none(prompt=prompt_price, completion=completion_price)
    _check(files, questions, answer_model, answer_base_url, prices, flops=flops, sizes=sizes)
    if flops and (lookup or strategy == "parallel" or reread or answer_model):
        raise UsageError(
            "--flops counts a sequential reading by one model, without look-up, once; leave the others out"
        )
    size = ModelSize.from_config(sizes) if sizes else ModelSize()
    budgets = drop_none(
        chunk_tokens=chunk_tokens,
        memory_tokens=memory_tokens,
        output_tokens=output_tokens,
        question_tokens=question_tokens,
        overlap_tokens=overlap_tokens,
    )
    if not files or not questions:
        _show_costs(costs(size, Budgets(**budgets), LENGTHS), as_json=as_json)
        return
    models.fetch_needed((base_model or model, answer_model), quiet=quiet)
    with Reader(
        model,
        answer_model=answer_model,
        answer_options=drop_none(base_url=answer_base_url) | _key_for(answer_model),
        prompts=PromptSet.from_reference(prompts) if prompts else None,
        layout=layout,
        lookup=lookup,
        strategy=strategy or "sequential",
        segments=segments,
        reread=reread,
        backend_options=drop_none(
            model=options.base_of(model, base_model), window=window, base_url=base_url, tokenizer=tokenizer
        )
        | _key_for(base_model or model),
        **budgets,
    ) as reader:
        plans = reader.plans(questions, inputs.document(files))
        own = costs(size, reader.budgets, sorted({*LENGTHS, plans[0].document_tokens})) if flops else []
    show_plans(plans, prices=prices, flops=own, as_json=as_json)


def _key_for(model: str | None) -> dict[str, str]:
    """Return what stands for a key that is not set: a plan calls no model, and OpenAI's tokens are counted here."""
    needed = model is not None and model.startswith("openai:") and not os.environ.get("OPENAI_API_KEY")
    return {"api_key": "none"} if needed else {}


def show_plans(
    plans: Sequence[Plan],
    *,
    prices: Mapping[str, float] | None = None,
    flops: Sequence[Cost] = (),
    as_json: bool,
) -> None:
    """Write what the readings of one document take together: it is read once, the calls are those of all questions.

    With prices also what it costs, and with `flops` the table of costs by length.
    """
    plan = dataclasses.replace(
        plans[0],
        calls=sum(plan.calls for plan in plans),
        prompt_tokens=sum(plan.prompt_tokens for plan in plans),
        completion_tokens=sum(plan.completion_tokens for plan in plans),
    )
    numbers: dict[str, Any] = ({"questions": len(plans)} if len(plans) > 1 else {}) | dataclasses.asdict(plan)
    if prices:
        numbers["price"] = plan.price(**prices)
    if as_json:
        show(json.dumps(numbers | ({"flops": _rows(flops)} if flops else {})))
        return
    show("\n".join(f"{name.replace('_', ' ')}: {number}" for name, number in numbers.items()))
    if flops:
        show("")
        _show_costs(flops, as_json=False)


def _check(
    files: Sequence[str] | None,
    questions: Sequence[str] | None,
    answer_model: str | None,
    answer_base_url: str | None,
    prices: Mapping[str, float],
    *,
    flops: bool,
    sizes: Path | None,
) -> None:
    """Raise a UsageError for what is wrong with the call, before a model is loaded."""
    if not files and not flops:
        raise UsageError("name the files to read, or give --flops for documents of any length")
    if bool(files) != bool(questions):
        raise UsageError("a plan needs both: the files, and the question (-q), which is part of every prompt")
    if flops and questions and len(questions) > 1:
        raise UsageError("--flops counts the reading for one question; give -q once")
    if sizes and not flops:
        raise UsageError("--sizes are the sizes of a model for --flops; give that too")
    if len(prices) == 1:
        raise UsageError("give both prices: --prompt-price and --completion-price")
    if prices and answer_model:
        raise UsageError("the prices are those of one model; with --answer-model the plan tells the tokens alone")
    if prices and not files:
        raise UsageError("the prices are for a document: name its files")
    if answer_base_url is not None and answer_model is None:
        raise UsageError("--answer-base-url is the address of --answer-model; give that too")
    inputs.check(files or (), twice=True)


def _show_costs(table: Sequence[Cost], *, as_json: bool) -> None:
    if as_json:
        show(json.dumps({"flops": _rows(table)}))
        return
    columns = ("tokens", "calls", "FLOPs: loop", "full", "full / loop", "attention of 8K: loop", "full")
    write_table(
        columns,
        [
            (
                f"{cost.tokens:,}",
                f"{cost.calls:,}",
                f"{cost.loop:.2e}",
                f"{cost.full:.2e}",
                f"{cost.full / cost.loop:.2f}",
                _times(cost.windows),
                _times(cost.windows**2),
            )
            for cost in table
        ],
    )


def _times(ratio: float) -> str:
    return f"{ratio:,.{0 if ratio >= 10 else 2}f}".removesuffix(".00")


def _rows(table: Sequence[Cost]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(cost) | {"windows": cost.windows} for cost in table]
