"""Journals that somebody else made: what they name is neither loaded, nor fetched, nor told anything."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import run
from helpers.fuzz import one_in
from helpers.hostile import CANARY, VALUES, corrupted, forged, settings, watched
from hypothesis import given

from memagent_integrations import Journal, JournalError, MemAgentError, Reader, UsageError, ownership

EVIL = "http://127.0.0.1:9/v1"
REMOTE = {"trust_remote_code": True}
CODE = f"open('{CANARY}', 'w')\n"


@pytest.fixture(autouse=True)
def victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand in a folder that came with the journal, with a model of code and a key in the environment."""
    model = tmp_path / "evil"
    model.mkdir()
    classes = {"AutoConfig": "evil_canary.Config", "AutoModelForCausalLM": "evil_canary.Model"}
    (model / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": classes}))
    (model / "evil_canary.py").write_text(CODE)
    (tmp_path / "document.txt").write_text("The key is 7.")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-of-the-victim")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("MEMAGENT_CACHE", str(tmp_path / "cache"))
    yield
    assert not (tmp_path / CANARY).exists()


def answering(model: str, **backend: Any) -> dict[str, Any]:
    return settings(answer_model=model, answer_backend=backend)


ATTACKS: dict[str, tuple[dict[str, Any], str]] = {
    # settings, and what the error says
    "remote code": (settings(model="transformers:evil", backend=REMOTE), "trust_remote_code"),
    "remote code as a number": (settings(model="transformers:evil", backend={"trust_remote_code": 1}), "trust_remote"),
    "a folder with code": (settings(model="transformers:evil", backend={}), "model='transformers:evil'"),
    "a folder for vLLM": (settings(model="vllm:evil", backend=REMOTE), "trust_remote_code"),
    "a model of the hub": (settings(model="transformers:evil/model", backend={}), "--model"),
    "a model of the hub for vLLM": (settings(model="vllm:evil/model", backend={}), "--model"),
    "a GGUF file": (settings(model="llamacpp:evil/model.gguf", backend={}), "--model"),
    "a share": (settings(model="llamacpp:\\\\evil\\share\\model.gguf", backend={}), "--model"),
    "a policy": (settings(model="policy:evil", backend={}), "model='policy:evil'"),
    "an embedded model to fetch": (settings(model="smollm2-raw", backend={}), "model='smollm2-raw'"),
    "an adapter": (settings(model="openai:m", backend={"adapter": "evil"}), "'adapter': 'evil'"),
    "an embedded model's adapter": (settings(model="smollm2-raw", backend={"adapter": "evil/a.gguf"}), "'adapter'"),
    "a server": (settings(backend={"base_url": EVIL}), "--base-url"),
    "a server on the net": (settings(backend={"base_url": "https://evil.example/v1"}), "'base_url': 'https://evil"),
    "a server that looks right": (
        settings(backend={"base_url": "https://api.openai.com.evil.example/v1"}),
        "--base-url",
    ),
    "a server behind a user": (settings(backend={"base_url": "https://api.openai.com/v1@127.0.0.1:9"}), "--base-url"),
    "a service of the machine": (settings(backend={"base_url": "http://169.254.169.254/latest"}), "--base-url"),
    "a server that is no text": (settings(backend={"base_url": [EVIL]}), "base_url"),
    "a tokenizer of the hub": (settings(backend={"tokenizer": "hf:evil/tokenizer"}), "--tokenizer"),
    "a tokenizer in a folder": (settings(backend={"tokenizer": "hf:evil"}), "--tokenizer"),
    "a vocabulary to fetch": (settings(backend={"tokenizer": "tiktoken:o200k_base"}), "--tokenizer"),
    "a key": (settings(backend={"api_key": "sk-evil"}), "api_key"),
    "a timeout": (settings(backend={"timeout": 1e9}), "timeout"),
    "calls at once": (settings(backend={"concurrency": 10**6}), "concurrency"),
    "a kernel of the hub": (
        settings(model="transformers:evil", backend={"attn_implementation": "evil/kernel"}),
        "attn_implementation",
    ),
    "a class of workers": (settings(model="vllm:evil", backend={"worker_cls": "evil_canary.Worker"}), "worker_cls"),
    "threads": (settings(model="llamacpp:m.gguf", backend={"threads": 1024, "parallel": 256}), "threads"),
    "no number": (settings(backend={"temperature": {"evil": 1}}), "temperature"),
    "a number without end": (settings(backend={"seed": 10**400}), "seed"),
    "budgets that are a model": (
        settings(budgets={"model": "transformers:evil", "backend_options": REMOTE}),
        "the budgets of a run have",
    ),
    "budgets that are a journal": (settings(budgets={"journal": CANARY}), "the budgets of a run have"),
    "prompts from a file": (settings(prompts={"from_reference": CANARY}), "the prompts of a run have"),
    "options of the whole": (settings() | {"backend_options": REMOTE}, "'backend_options', which no run has"),
    "code that answers": (answering("transformers:evil", **REMOTE), "trust_remote_code"),
    "a folder that answers": (answering("transformers:evil"), "--answer-model"),
    "a server that answers": (answering("openai:m", base_url=EVIL), "--answer-base-url"),
    "a tokenizer for the answer": (answering("openai:m", tokenizer="hf:evil"), "--answer-tokenizer"),
    "half a model that answers": (settings(answer_backend={"base_url": EVIL}), "a part of the model that answers"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_journal_does_no_harm(attack: str, tmp_path: Path) -> None:
    made, message = ATTACKS[attack]
    file = forged(tmp_path / "runs.db", made, files=["document.txt"], mark="0" * 64)
    with watched() as deeds:
        with pytest.raises(MemAgentError) as refused, Reader.from_run(file, "mine") as reader:
            reader.read("Who?", "The key is 7.", run="mine")
        done = run("runs", "resume", "mine", "document.txt", "--journal", file)
    assert deeds == []
    assert isinstance(refused.value, UsageError | JournalError)
    assert message in str(refused.value)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    "program",
    [
        f"CREATE TRIGGER evil AFTER UPDATE ON run BEGIN UPDATE run SET settings = '{CANARY}'; END",
        "CREATE VIEW evil AS SELECT * FROM run",
        "CREATE TABLE evil (name TEXT)",
        "CREATE INDEX evil ON run (abs(created))",
        "DROP TABLE step; CREATE VIEW step AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n)"
        " SELECT 'mine' AS run, i AS number, 'memory' AS phase, '' AS prompt, '' AS step FROM n",
        "ALTER TABLE run ADD COLUMN evil TEXT DEFAULT 'evil'",
        "DROP TABLE memory",
    ],
)
def test_a_journal_is_no_program(program: str, tmp_path: Path) -> None:
    file = forged(tmp_path / "runs.db", settings())
    with closing(sqlite3.connect(file)) as database:
        database.executescript(program)
    for readonly in (False, True):
        with pytest.raises(JournalError, match="is no journal of this package"):
            Journal(file, readonly=readonly)


def test_the_files_of_another_are_not_read(tmp_path: Path) -> None:
    """They may be a secret of the machine, which the answer then shows to whoever sees it."""
    file = forged(tmp_path / "runs.db", settings(), files=[f"/etc/{CANARY}"])
    with watched() as deeds:
        done = run("runs", "resume", "mine", "--journal", file)
    assert (done.exit_code, deeds) == (2, [])
    assert "memagent runs resume mine FILE..." in done.stderr


def test_where_no_key_can_be_kept_a_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(ownership, "_key_file", lambda: tmp_path / "file" / "own.key")
    done = run("runs", "resume", "mine", "--journal", forged(tmp_path / "runs.db", settings(), files=["notes.txt"]))
    assert done.exit_code == 2
    assert "no key can be kept in" in done.stderr


@pytest.mark.parametrize("kept", [{}, {"base_url": "https://api.openai.com/v1/"}, {"temperature": 0.5, "seed": -1}])
def test_what_does_no_harm_goes_on_by_itself(kept: dict[str, Any], tmp_path: Path) -> None:
    file = forged(tmp_path / "runs.db", settings(backend={"tokenizer": "approximate"} | kept))
    with Reader.from_run(file, "mine") as reader:
        identity = reader.backend.identity
        assert identity | kept == identity
        assert identity["base_url"] == "https://api.openai.com/v1/"


def test_the_file_that_a_name_meant_is_not_loaded_again(tmp_path: Path) -> None:
    file = forged(tmp_path / "runs.db", settings(backend={"file": "evil.gguf"}))
    with Reader.from_run(file, "mine") as reader:
        assert "file" not in reader.backend.identity


def test_the_servers_of_the_environment_are_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = forged(tmp_path / "runs.db", settings(backend={"base_url": f"{EVIL}/"}))
    monkeypatch.setenv("OPENAI_BASE_URL", EVIL)
    with Reader.from_run(file, "mine") as reader:
        assert reader.backend.identity["base_url"] == f"{EVIL}/"


def test_what_is_given_again_is_used(tmp_path: Path) -> None:
    file = forged(tmp_path / "runs.db", answering("openai:large", base_url=EVIL) | {"model": "vllm:evil"})
    with Reader.from_run(
        file, "mine", model="openai:m", answer_model="openai:large", answer_options={"base_url": f"{EVIL}/"}
    ) as reader:
        assert (reader.backend.name, reader.answer_backend.name) == ("openai:m", "openai:large")
        assert reader.answer_backend.identity["base_url"] == f"{EVIL}/"


def stored(file: Path) -> tuple[str, str, str]:
    with closing(sqlite3.connect(file)) as database:
        return database.execute("SELECT settings, files, mark FROM run").fetchone()


def own(file: Path) -> bool:
    with Journal(file, readonly=True) as journal:
        return journal.run("mine").own


def test_a_mark_holds_for_what_was_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = settings(backend={"base_url": EVIL})
    mark = ownership.mark(json.dumps(made), "[]")
    file = forged(tmp_path / "runs.db", made, mark=mark)
    assert own(file)
    Reader.from_run(file, "mine").close()
    for changes, files in (({"question": "Where?"}, []), ({"backend": {"base_url": "http://x"}}, []), ({}, [CANARY])):
        other = forged(
            tmp_path / f"{len(changes)}{len(files)}{changes!s:.9}.db", made | changes, files=files, mark=mark
        )
        assert not own(other)
    monkeypatch.setattr(ownership, "_key", lambda file: bytes(32))  # another user, or another machine
    assert not own(file)
    monkeypatch.setattr(ownership, "_key", lambda file: None)  # nowhere to keep a key
    assert not own(file)


def test_a_branch_is_not_the_callers_own_if_its_run_is_not(tmp_path: Path) -> None:
    file = forged(tmp_path / "runs.db", settings(backend={"base_url": EVIL}))
    step = '{"index": 0, "phase": "memory", "span": null, "memory_before": "", "memory": "m", "reply": {"text": "m"}, '
    with closing(sqlite3.connect(file)) as database, database:
        database.execute(
            "INSERT INTO step VALUES ('mine', 0, 'memory', '', ?)", (step + '"outcome": "updated", "cut": false}',)
        )
    with Journal(file) as journal:
        journal.edit("mine", 0, memory="another", name="branch")
        assert not journal.run("branch").own
        with pytest.raises(UsageError, match="base_url"):
            Reader.from_run(journal, "branch")


def test_the_key_is_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "state" / "own.key"
    key = ownership._key.__wrapped__
    made = key(file)
    assert (file.stat().st_mode & 0o777, len(made or b""), key(file)) == (0o600, 32, made)
    file.chmod(0o644)
    assert key(file) is None
    file.chmod(0o600)
    file.write_bytes(b"short")
    assert key(file) is None
    assert key(tmp_path / "document.txt" / "own.key") is None
    assert not ownership.is_marked(None, "text")


NAMES = (
    "trust_remote_code",
    "base_url",
    "api_key",
    "adapter",
    "tokenizer",
    "answer_model",
    "output",
    "backend_options",
)


@pytest.mark.fuzz
@one_in(4)
@given(made=corrupted(answering("openai:large"), NAMES), files=VALUES, step=corrupted({"number": 0, "step": {}}))
def test_whatever_is_in_a_journal(made: Any, files: Any, step: Any, tmp_path: Path) -> None:
    file = tmp_path / "runs.db"
    file.unlink(missing_ok=True)
    forged(file, made, files=files)
    with closing(sqlite3.connect(file)) as database, database, suppress(sqlite3.Error, OverflowError, UnicodeError):
        values = (step.get("number"), json.dumps(step.get("step")))
        database.execute("INSERT INTO step VALUES ('mine', ?, 'memory', '', ?)", values)
    with watched() as deeds, Journal(file) as journal:
        for look in (journal.runs, lambda: journal.reading("mine"), lambda: journal.edit("mine", 0)):
            with suppress(MemAgentError):
                look()
        with suppress(MemAgentError):
            Reader.from_run(journal, "mine").close()
    assert deeds == []
