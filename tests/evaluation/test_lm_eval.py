from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import few_words
from helpers.data import DATA
from helpers.loopback import Loopback, chat

pytest.importorskip("lm_eval", reason="lm_eval is not installed")

from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.api.registry import get_model
from tokenizers import Tokenizer, models, pre_tokenizers

from memagent_integrations import BackendError, Reader, ScriptedBackend, UsageError
from memagent_integrations.evaluation import lm_eval as adapter
from memagent_integrations.evaluation.lm_eval import MemAgentLM
from memagent_integrations.evaluation.prompt_split import SplitPrompt, split
from memagent_integrations.records import Prompt

pytestmark = pytest.mark.heavy

SIZES = {"chunk_tokens": 1000, "memory_tokens": 2000, "overlap_tokens": 50, "window": 8192}
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def between(text: str, tag: str) -> str:
    return text.partition(f"<{tag}>\n")[2].partition(f"\n</{tag}>")[0]


def solve(text: str) -> str:
    """What a perfect note-taker replies to one of our prompts about RULER's needles, variables or words."""
    question, memory, section = (between(text, tag) for tag in ("question", "memory", "section"))
    memory = "" if memory.startswith("(empty") else memory
    return note(question, memory, section) if section else answer(question, memory)


def note(question: str, memory: str, section: str) -> str:
    if "special magic" in question:
        needle = re.search(rf"magic \w+ for {re.escape(key_of(question))} is: (\S+)\.", section)
        return needle[1] if needle else memory or "nothing yet"
    if "VAR" in question:
        return "; ".join(dict.fromkeys(re.findall(r"VAR \w+ = (?:VAR )?\w+", f"{memory} {section}"))) or "nothing yet"
    counts = Counter({word: int(n) for word, n in re.findall(r"(\S+):(\d+)", memory)})
    counts.update(re.findall(r"\d+\. ([a-z-]+)", section))
    return " ".join(f"{word}:{n}" for word, n in counts.most_common())


def answer(question: str, memory: str) -> str:
    if "special magic" in question:
        return f"The special magic number for {key_of(question)} mentioned in the provided text is {memory}"
    if "VAR" in question:
        known = {re.findall(r"assigned the value (\d+)", question)[-1]}
        for variable, value in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", memory) * 5:
            known |= {variable} if value in known else set()
        return " ".join(sorted(known))
    return " ".join(word for word, _ in re.findall(r"(\S+):(\d+)", memory)[:10])


def key_of(question: str) -> str:
    return re.findall(r"for (\S+) mentioned", question)[-1]


def scripted(
    script: Callable[[Prompt], Any] = lambda prompt: solve(prompt.messages[0].content), **settings: Any
) -> Reader:
    return Reader(ScriptedBackend(script, window=8192), **(SIZES | settings))


def request(prompt: str, **settings: Any) -> Instance:
    return Instance("generate_until", settings.pop("doc", {}), (prompt, settings), 0)


def passed_on(text: str, prompt: str = "A long text.\n\nWhat?", **settings: Any) -> str:
    """What the model gives lm_eval where the reader answers `text`."""
    model = MemAgentLM(scripted(lambda _: text))
    (answer,) = model.generate_until([request(prompt, **settings)], disable_tqdm=True)
    return answer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer as `AutoTokenizer.from_pretrained` wants it, of words and runs of signs."""
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ruler() -> Iterator[Path]:
    """The folder of RULER's tasks in lm_eval. They find nltk's file in llama-index-core, and need no network."""
    patch = pytest.MonkeyPatch()
    for name, value in OFFLINE.items():
        patch.setenv(name, value)
    import llama_index.core
    import lm_eval

    patch.setenv("NLTK_DATA", str(Path(llama_index.core.__file__).parent / "_static" / "nltk_cache"))
    patch.setattr("wonderwords.RandomWord", few_words.FewWords)
    import lm_eval.tasks.ruler.prepare_niah

    yield Path(lm_eval.__file__).parent / "tasks" / "ruler"
    patch.undo()


@pytest.fixture(scope="module")
def generated(ruler: Path, tokenizer: str) -> dict[str, list[dict[str, Any]]]:
    """Two samples of each RULER task, made by lm_eval's own generators."""
    from lm_eval.tasks.ruler import common_utils, cwe_utils, fwe_utils, niah_utils, prepare_niah, qa_utils, vt_utils

    random.seed(7)
    count = common_utils.get_tokenizer(tokenizer)

    def needles(haystack: str, keys: str, values: str, text: Any = None, **numbers: int) -> list[dict[str, Any]]:
        return prepare_niah.generate_samples(
            text or prepare_niah.get_haystack(haystack),
            count,
            max_seq_length=4096,
            template=niah_utils.TEMPLATE,
            type_haystack=haystack,
            type_needle_k=keys,
            type_needle_v=values,
            num_samples=2,
            **numbers,
        )

    example = vt_utils.sys_vartrack_w_noise_random(count, 1, 500, 5)[0]
    samples = {
        "niah_single_1": needles("repeat", "words", "numbers"),
        "niah_multikey_2": needles("needle", "words", "numbers"),
        "niah_multikey_3": needles("needle", "uuids", "uuids"),
        "ruler_vt": vt_utils.sys_vartrack_w_noise_random(count, 2, 4096, icl_example=example),
        "ruler_cwe": cwe_utils.sys_word_pair_random(2, 4096, count),
        "ruler_fwe": fwe_utils.sys_kwext(count, 4096, 2),
        "ruler_qa": qa_utils.generate_samples(
            count,
            [f"Title {n}\nText of {n}.\n\nMore of {n}." for n in range(400)],
            [{"query": f"Who is {n} of the given documents?", "outputs": [str(n)], "context": [n]} for n in range(2)],
            4096,
            2,
        ),
    }
    if (essays := DATA / "paul_graham").is_dir():
        words = "".join(path.read_text(encoding="utf-8") for path in sorted(essays.glob("*.txt")))[:60_000].split()
        samples |= {
            "niah_single_2": needles("essay", "words", "numbers", words),
            "niah_single_3": needles("essay", "words", "uuids", words),
            "niah_multikey_1": needles("essay", "words", "numbers", words, num_needle_k=4),
            "niah_multivalue": needles("essay", "words", "numbers", words, num_needle_v=4),
            "niah_multiquery": needles("essay", "words", "numbers", words, num_needle_q=4),
        }
    return samples


ESSAYS = ["niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery"]
GENERATED = ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe", "ruler_qa"]
TASKS = [*GENERATED, *ESSAYS]


@pytest.mark.parametrize("task", TASKS)
def test_each_ruler_prompt_is_split_exactly(task: str, generated: dict[str, list[dict[str, Any]]]) -> None:
    if task not in generated:
        pytest.skip("the essays of shared/data are not here")
    for doc in generated[task]:
        delimiter = "\n\n" if task == "ruler_cwe" else " "  # target_delimiter of the task's YAML
        prompt = doc["input"] + delimiter + doc["gen_prefix"]
        parts = split(prompt, doc)
        assert parts.prompt == prompt
        assert parts.prefix.strip() == doc["gen_prefix"]
        assert parts.full_question.endswith(parts.question.strip() + parts.prefix)
        assert len(parts.document) > 0.8 * len(prompt)
        # nothing of the instruction or the question is left in the document, nothing of the document stands outside it
        assert not re.search(r"Memorize|quiz you|Question:|given documents|mentioned in the provided", parts.document)
        assert len(parts.question) < 300
        assert split(doc["input"]).document == parts.document  # without a gen_prefix


def test_what_a_reader_is_asked_and_what_it_reads(generated: dict[str, list[dict[str, Any]]]) -> None:
    doc = generated["niah_single_1"][0]
    key = re.search(r"for (\S+) mentioned", doc["gen_prefix"])[1]
    parts = split(f"{doc['input']} {doc['gen_prefix']}")
    needle = f"One of the special magic numbers for {key} is: {doc['outputs'][0]}."
    assert parts.document.splitlines().count(needle) == 1
    assert set(parts.document.splitlines()) == {
        needle,
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
    }
    assert parts.full_question == (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards.\n\n"
        f"What is the special magic number for {key} mentioned in the provided text? "
        f"The special magic number for {key} mentioned in the provided text is"
    )
    doc = generated["ruler_vt"][0]
    parts = split(f"{doc['input']} {doc['gen_prefix']}")
    assert parts.before.count("Memorize and track") == 2  # the solved example stays with the question
    assert parts.document.count("VAR ") == 9  # a chain of 4 hops
    assert all(variable in parts.document for variable in doc["outputs"])


def test_prompts_of_other_tasks() -> None:
    # the document is a field of the sample: LongBench, BABILong, SQuAD
    prompt = "Read this.\n\nOnce there was\n\na house.\n\nQuestion: What?\nAnswer:"
    assert split(prompt, {"context": " Once there was\n\na house. ", "question": "What?"}) == SplitPrompt(
        before="Read this.\n\n",
        document="Once there was\n\na house.",
        question="\n\nQuestion: What?",
        prefix="\nAnswer:",
    )
    # else the last paragraph is the question
    assert split("One.\n\nTwo.\n\nWhat of it?") == SplitPrompt(
        before="", document="One.\n\nTwo.", question="\n\nWhat of it?", prefix=""
    )
    assert split("One.\n\nWhat of it?\n\nAnswer:\n") == SplitPrompt(
        before="", document="One.", question="\n\nWhat of it?", prefix="\n\nAnswer:\n"
    )
    assert split("One.\n\nWhat of it?\nAnswer:").full_question == "What of it?\nAnswer:"
    assert split("One.\n\nWhat of it?", {"context": "", "input": 3}).document == "One."
    # a field that is the whole prompt tells nothing
    assert split("One.\n\nWhat of it?", {"input": "One.\n\nWhat of it?"}).document == "One."
    for bare in ("What is 2 + 2?", "\n\nWhat?\nAnswer:", "", "  \n\n "):
        with pytest.raises(UsageError, match="no document"):
            split(bare)


def test_a_split_takes_time_by_the_length_alone() -> None:
    head = (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards.\n"
    )
    tail = "\nWhat is the special magic number for a-b mentioned in the provided text?"
    for body in (
        head * 8000,
        "\nWhat is the special magic number for " * 30_000,
        "\n\n" * 500_000 + "x",
        "Memorize " * 100_000,
    ):
        prompt = f"x{head}x{body}{tail}"
        assert split(prompt).prompt == prompt
        assert split(f"{body}\n\nWhat?").question == "\n\nWhat?"


def test_an_answer_goes_on_from_the_prefix() -> None:
    parts = SplitPrompt(before="", document="d", question="q", prefix="\n\nAnswer: The words\n are:")
    assert parts.continued(" answer: the  words are: x y") == "x y"
    assert parts.continued("x y. Answer: The words are:") == "x y. Answer: The words are:"
    assert SplitPrompt(before="", document="d", question="q", prefix="").continued(" x") == " x"
    other = "The special magic number for a mentioned in the provided text is 7."
    assert passed_on(other, "Text.\n\nWhat?\nAnswer:") != "7."
    assert passed_on("Answer: 7.", "Text.\n\nWhat?\nAnswer:") == "7."


def test_an_answer_ends_where_the_task_says() -> None:
    assert passed_on("one two. three") == "one two. three"
    assert passed_on("one two. three", until=["\n", ".", "t"]) == "one "
    assert passed_on("one two. three", until="thr") == "one two. "
    assert passed_on("one two. three", until=["", "x"]) == "one two. three"
    assert passed_on("one two three", max_gen_toks=2) == "one two"
    assert passed_on("one two three", max_new_tokens=1, until=[]) == "one"
    assert passed_on("a " * 300) == "a" + " a" * 255  # lm_eval's own default of 256 tokens


def test_what_a_reading_cannot_do_is_refused() -> None:
    model = MemAgentLM(scripted())
    for ask in (model.loglikelihood, model.loglikelihood_rolling):
        with pytest.raises(UsageError, match="no likelihood"):
            ask([request("x")])
    with pytest.raises(UsageError, match="chat_template"):
        model.apply_chat_template([])
    with pytest.raises(UsageError, match="chat_template"):
        model.tokenizer_name  # noqa: B018
    with pytest.raises(UsageError, match="chat_template"):
        model.chat_template(True)
    assert model.chat_template() == ""
    for sampling in ({"do_sample": True}, {"temperature": 0.7}):
        with pytest.raises(UsageError, match="do_sample=False"):
            passed_on("x", **sampling)
    assert passed_on("x", do_sample=False, temperature=1.0) == "x"  # greedy, says lm_eval
    with pytest.raises(UsageError, match="no document"):
        passed_on("x", "What is 2 + 2?")


def test_settings_reach_the_reader(tmp_path: Path) -> None:
    arguments = "model=openai:m,base_url=http://127.0.0.1:1/v1,tokenizer=approximate,chunk_tokens=300"
    journal = tmp_path / "j.db"
    model = get_model("memagent").create_from_arg_string(f"{arguments},journal={journal}", {"batch_size": 1})
    assert isinstance(model, MemAgentLM)
    with model.reader as reader:
        assert (reader.budgets.chunk_tokens, reader.backend.name, reader.journal.path.name) == (300, "openai:m", "j.db")
    assert model.get_model_info()["memagent"] == {
        "model": "openai:m",
        "prompts": "section-first",
        "chunk_tokens": 300,
        "memory_tokens": 1024,
        "question_tokens": 1024,
        "output_tokens": None,
        "overlap_tokens": 0,
    }
    with pytest.raises(UsageError, match="concurrency"):
        MemAgentLM.create_from_arg_obj({"model": "smollm2"}, {"batch_size": "auto"})
    with pytest.raises(UsageError, match="name a model"):
        MemAgentLM.create_from_arg_obj({"chunk_tokens": 300})
    with pytest.raises(UsageError, match="been made already"):
        MemAgentLM(scripted(), chunk_tokens=3)


def test_a_reading_that_fails_is_no_wrong_answer(tmp_path: Path) -> None:
    asked: list[str] = []

    def script(prompt: Prompt) -> Any:
        text = prompt.messages[0].content
        asked.append(text)
        return BackendError("the server is gone") if "Why?" in text else "an answer"

    requests = [request("One.\n\nWhat?"), request("Two.\n\nWhy?"), request("Three.\n\nWho?")]
    cached = CachingLM(MemAgentLM(scripted(script)), str(tmp_path / "cache.db"))
    with pytest.raises(BackendError, match="gone") as caught:
        cached.generate_until(requests)
    assert "1 of 3 readings failed" in caught.value.__notes__[0]
    before = len(asked)
    requests[1] = request("Two.\n\nWho?")
    assert cached.generate_until(requests) == ["an answer"] * 3
    assert len(asked) == before + 2  # only the one that was missing is read
    cached.dbdict.close()


def test_simple_evaluate_runs_three_ruler_tasks(ruler: Path, tokenizer: str) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    reader = scripted()
    tasks = ["niah_single_1", "ruler_vt", "ruler_cwe"]
    done = lm_eval.simple_evaluate(
        model=MemAgentLM(reader),
        tasks=tasks,
        limit=2,
        bootstrap_iters=0,
        task_manager=TaskManager(
            include_path=str(ruler),
            include_defaults=False,
            metadata={"tokenizer": tokenizer, "max_seq_lengths": [4096]},
        ),
    )
    assert {task: done["results"][task]["4096,none"] for task in tasks} == dict.fromkeys(tasks, 1.0)
    assert {task: len(done["samples"][task]) for task in tasks} == dict.fromkeys(tasks, 2)
    (first, *_) = done["samples"]["niah_single_1"]
    assert first["resps"] == [[first["doc"]["outputs"][0]]]  # what repeats the gen_prefix is taken off
    assert len(reader.backend.prompts) > 6 * 4  # the documents were read in chunks
    assert done["config"]["memagent"]["model"] == "scripted"


@pytest.fixture(scope="module")
def ruler_alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH with lm_eval and no tasks but RULER's: its command would read all 13,000 files of tasks first."""
    import lm_eval

    source, folder = Path(lm_eval.__file__).parent, tmp_path_factory.mktemp("packages")
    tasks = [path.name for path in (source / "tasks").iterdir() if path.is_dir() and path.name != "ruler"]

    def others(path: str, names: list[str]) -> list[str]:
        return tasks if Path(path) == source / "tasks" else []

    shutil.copytree(source, folder / "lm_eval", ignore=others)
    (folder / "sitecustomize.py").write_text("from helpers import few_words\nfew_words.install()\n", encoding="utf-8")
    return os.pathsep.join((str(folder), str(Path(few_words.__file__).parents[1])))


def run(packages: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memagent_integrations.evaluation.lm_eval", "--model", "memagent", *arguments]
    environment = os.environ | OFFLINE | {"OPENAI_API_KEY": "none", "PYTHONPATH": packages}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_command_line_runs_a_ruler_task(tokenizer: str, tmp_path: Path, ruler_alone: str) -> None:
    with Loopback(chat(solve, window=32_768)) as server:
        settings = SIZES | {"window": 32_768, "memory_tokens": 4000}
        sizes = ",".join(f"{name}={value}" for name, value in settings.items())
        done = run(
            ruler_alone,
            *("--model_args", f"model=openai:m,base_url={server.url}/v1,tokenizer=approximate,{sizes}"),
            *("--tasks", "ruler_vt", "--limit", "2", "--output_path", str(tmp_path / "out.json")),
            *("--metadata", json.dumps({"tokenizer": tokenizer, "max_seq_lengths": [4096]})),
        )
        assert done.returncode == 0, done.stderr
        assert len(server.requests) > 2 * 4
    (written,) = tmp_path.glob("out*.json")
    results = json.loads(written.read_text(encoding="utf-8"))["results"]
    assert {task: result["4096,none"] for task, result in results.items()} == {"ruler_vt": 1.0}


def test_the_command_line_says_what_is_wrong_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        error = UsageError("the question is too long")
        error.add_note("(1 of 3 readings failed)")
        raise error

    monkeypatch.setattr(adapter, "cli_evaluate", fails)
    with pytest.raises(SystemExit, match=re.escape("memagent: the question is too long (1 of 3 readings failed)")):
        adapter.main()
