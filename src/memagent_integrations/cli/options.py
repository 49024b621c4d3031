"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memagent_integrations import policies
from memagent_integrations.errors import UsageError
from memagent_integrations.records import Layout, OnLostSection, Strategy

Model = Annotated[str, typer.Option(help="The model, as for `memagent read`.")]
AnswerModel = Annotated[
    str | None, typer.Option(metavar="NAME", help="Another model for the answer, as --model.", show_default=False)
]
AnswerBaseUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="Address of the endpoint of --answer-model.", show_default=False)
]
BaseModel = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="The model to read with in place of the one that a policy names.", show_default=False
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Folder of data sets; else they are downloaded.", show_default=False),
]
ChunkTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Most tokens of the document in one prompt [the policy's, else 5000].", show_default=False
    ),
]
MemoryTokens = Annotated[
    int | None,
    typer.Option(metavar="N", help="Most tokens of the memory [the policy's, else 1024].", show_default=False),
]
OutputTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Most tokens the model may write in one call, thinking included.", show_default=False
    ),
]
QuestionTokens = Annotated[
    int | None,
    typer.Option(metavar="N", help="Most tokens of the question [the policy's, else 1024].", show_default=False),
]
OverlapTokens = Annotated[
    int | None, typer.Option(metavar="N", help="Tokens that a chunk repeats of the one before [0].", show_default=False)
]
Window = Annotated[
    int | None, typer.Option(metavar="N", help="The model's context window, in tokens.", show_default=False)
]
BaseUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="Address of an OpenAI-compatible endpoint.", show_default=False)
]
Lookup = Annotated[
    int,
    typer.Option(
        metavar="K", help="Show the K best passages beside the memory for the answer [0].", show_default=False
    ),
]
StrategyOption = Annotated[
    Strategy | None,
    typer.Option("--strategy", help="Read in one go [default], or segments side by side.", show_default=False),
]
Segments = Annotated[
    int | None, typer.Option(metavar="S", help="Segments of a parallel reading [8].", show_default=False)
]
Reread = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="1: read once more where the answer says that the memory does not suffice [0].",
        show_default=False,
    ),
]
Tokenizer = Annotated[
    str | None, typer.Option(metavar="T", help="hf:NAME, tiktoken:ENCODING or approximate.", show_default=False)
]
Temperature = Annotated[float | None, typer.Option(metavar="X", help="Sampling temperature.", show_default=False)]
TopP = Annotated[
    float | None,
    typer.Option(metavar="X", help="Most likely tokens to sample from, by their share.", show_default=False),
]
LayoutOption = Annotated[Layout | None, typer.Option(help="Order of the blocks in a prompt.", show_default=False)]
Prompts = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Take the prompts from a file of MemAgent's reference code.", show_default=False),
]
CallTimeout = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Give up a call that takes longer; it is repeated.", show_default=False),
]
RunTimeout = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="Give up the reading when it takes longer.", show_default=False)
]
LostSection = Annotated[
    OnLostSection | None,
    typer.Option(
        "--on-lost-section",
        help="When the model writes no memory for a section: end with an error [default], or skip it and say so.",
        show_default=False,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
JournalFile = Annotated[Path, typer.Option("--journal", metavar="FILE", help="The journal.", show_default=False)]
RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="Name of a run, as `memagent runs list` shows it.", show_default=False)
]
PromptPrice = Annotated[
    float | None,
    typer.Option("--prompt-price", metavar="X", help="Price of a million prompt tokens.", show_default=False),
]
CompletionPrice = Annotated[
    float | None,
    typer.Option("--completion-price", metavar="X", help="Price of a million completion tokens.", show_default=False),
]


def base_of(model: str | None, base_model: str | None) -> str | None:
    """Return the model to read with in place of a policy's.

    Raises:
        UsageError: there is one, and the model is no policy.
    """
    if base_model is not None and not policies.names_policy(model):
        raise UsageError("--base-model is the model for a policy; give --model smollm2 or policy:DIR too")
    return base_model
