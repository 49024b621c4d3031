"""The memory as it changes: frames at many sizes, hostile text, and a real terminal from first bar to last line."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.fuzz import one_in
from helpers.readings import LONG_MEMORY, PLAN, make_step
from helpers.terminal import HOSTILE, assert_harmless
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from memagent_integrations import Reader, ScriptedBackend
from memagent_integrations.cli.watch import WatchedReading
from memagent_integrations.records import Outcome, Reply, Step

QUESTION = "Who built the creature?"


def answered(memory: str) -> Step:
    return Step(
        index=4,
        phase="answer",
        span=None,
        memory_before=memory,
        memory=memory,
        reply=Reply(text="V."),
        outcome="answered",
        cut=False,
    )


def terminal(width: int = 80, height: int = 24) -> Console:
    environment = {"TERM": "xterm-256color"}
    return Console(
        file=io.StringIO(), force_terminal=True, width=width, height=height, color_system="256", _environ=environment
    )


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def frames(output: str) -> list[str]:
    """Return what was drawn on the terminal's second screen, each frame from its first corner."""
    inside = "".join(re.findall(r"\x1b\[\?1049h(.*?)\x1b\[\?1049l", output, re.DOTALL))
    return [drawn for drawn in re.split(r"\x1b\[H", inside) if bare(drawn)]


def bare(output: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)


def frame(last: Step, width: int = 80, height: int = 24, question: str = QUESTION) -> str:
    """Return the display after a step."""
    console = terminal(width, height)
    with WatchedReading(console, question=question) as progress:
        progress.step(last)
        progress.begin(PLAN)  # draws
    return frames(written(console))[0]


def lines(drawn: str) -> list[str]:
    return [line.rstrip() for line in bare(drawn).split("\n")]


def styled(drawn: str, code: str) -> list[str]:
    return re.findall(rf"\x1b\[{code}m(.*?)\x1b\[0m", drawn)


# ---- what is shown


def test_the_sections_of_a_second_pass_are_counted_anew() -> None:
    insufficient = replace(make_step("Seen.", "Seen.", index=4, outcome="insufficient"), phase="answer", span=None)
    console = terminal()
    with WatchedReading(console, question=QUESTION) as progress:
        for step in (*(make_step("Seen.", index=number) for number in range(4)), insufficient):
            progress.step(step)
        progress.step(make_step("Victor built it.", index=5))
        progress.begin(PLAN)
    shown = lines(frames(written(console))[0])
    assert "1,000/4,000" in shown[1]
    assert shown[3] == "chunk 1 of 4 · memory updated · characters 1,000-2,500 of a.txt"


def test_a_step_is_told_in_full() -> None:
    shown = lines(frame(make_step("Victor built it.\n\n- at Ingolstadt", index=2, cut=True), height=12))
    assert shown[0] == QUESTION
    assert "1,000/4,000" in shown[1]
    assert shown[2:6] == [
        "chunk 3 of 4 · memory updated, cut · characters 1,000-2,500 of a.txt",
        "Victor built it.",
        "",
        "- at Ingolstadt",
    ]


def test_what_changed_is_marked() -> None:
    before, after = "Victor built the creature at Geneva.", "Victor Frankenstein built the creature at Ingolstadt."
    drawn = frame(make_step(after, before))
    assert styled(drawn, "1;38;5;28") == ["Frankenstein", "Ingolstadt."]
    assert styled(drawn, "2;9") == ["Geneva."]
    assert "Victor Frankenstein built the creature at Geneva. Ingolstadt." in lines(drawn)


def test_a_text_that_ends_keeps_its_distance() -> None:
    assert "It is here. Not there." in lines(frame(make_step("It is here.", "It is here. Not there.")))
    assert "It is there. here. Now." in lines(frame(make_step("It is here. Now.", "It is there.")))


def test_a_long_passage_that_went_does_not_hide_what_is_there() -> None:
    drawn = frame(make_step("It is new.", LONG_MEMORY), height=12)
    assert "It is new." in styled(drawn, "1;38;5;28")
    assert "… (468 more words)" in bare(drawn)


@pytest.mark.parametrize(
    ("outcome", "description"), [("unchanged", "memory unchanged"), ("kept", "memory kept, the section is lost")]
)
def test_a_memory_that_stayed_has_no_marks(outcome: Outcome, description: str) -> None:
    drawn = frame(make_step("Victor built it.", "Victor built it.", outcome=outcome), 100)
    assert f"chunk 1 of 4 · {description} · characters 1,000-2,500 of a.txt" in lines(drawn)
    assert "Victor built it." in lines(drawn)
    assert not styled(drawn, "1;38;5;28") + styled(drawn, "2;9")


def test_before_the_first_step_and_with_nothing_in_memory() -> None:
    console = terminal()
    with WatchedReading(console, question=QUESTION) as progress:
        progress.begin(PLAN)
    shown = lines(frames(written(console))[0])
    assert (shown[0], "chunk 1 of 4" in shown[1], set(shown[2:])) == (QUESTION, True, {""})
    assert "the memory is empty" in lines(frame(make_step("", outcome="kept")))
    assert "chunk 1 of 4" in lines(frame(make_step("m"), question=""))[0]


def test_where_a_chunk_lies() -> None:
    assert "of a.txt and 2 more" in bare(frame(make_step("m", names=("a.txt", "b.txt", "c.txt"))))
    assert f"of …{'/deep' * 7}/a.t" in bare(frame(make_step("m", names=("/deep" * 40 + "/a.t",)), width=200))
    assert "characters 0-1,500 of the text" in bare(frame(make_step("m", names=())))


# ---- where there is little room


def test_a_long_memory_is_shown_around_its_first_change() -> None:
    changed = LONG_MEMORY.replace("line 40", "verse 40").replace("line 70", "verse 70")
    shown = lines(frame(make_step(changed, LONG_MEMORY), height=12))
    assert len(shown) == 12
    assert "- line verse 40 of the memory" in shown
    assert shown[3] == "- line 38 of the memory"
    assert shown[-1] == "not shown: 38 lines above, 35 lines below (1 changed)"
    text = LONG_MEMORY.rstrip()
    unchanged = lines(frame(make_step(text, text, outcome="unchanged"), height=12))
    assert unchanged[-1] == "not shown: 72 lines below"
    at_the_end = lines(frame(make_step(text + " and the end", text), height=12))
    assert at_the_end[-1] == "not shown: 72 lines above"


TEXTS = st.lists(
    st.sampled_from(
        [
            HOSTILE,
            "word ",
            "\n",
            "    ",
            "中文字",
            "🙂",
            "👩‍👩‍👧",
            "❤️",
            "é" * 30,
            "x" * 300,
            "नमस्ते दुनिया ",
            "سلام ",
            "🏽",
            "\t",
        ]
    ),
    max_size=40,
).map("".join)


@pytest.mark.fuzz
@given(
    before=TEXTS,
    after=TEXTS,
    width=st.integers(1, 200),
    height=st.integers(1, 60),
    name=TEXTS,
)
def test_no_frame_is_larger_than_the_terminal(before: str, after: str, width: int, height: int, name: str) -> None:
    drawn = frame(make_step(after, before, names=(name, name)), width, height, question=before + after)
    shown = bare(drawn).split("\n")
    assert len(shown) <= height
    assert all(cell_len(line) <= width for line in shown)
    assert_harmless(drawn)


@pytest.mark.fuzz
@one_in(4)
@given(memory=TEXTS, width=st.integers(40, 200))
def test_no_text_is_lost(memory: str, width: int) -> None:
    expected = "".join(char if char.isprintable() else "\ufffd" for char in re.sub(r"[ \n\t]", "", memory))
    assert expected in re.sub(r"\s", "", bare(frame(make_step(memory), width, 3000)))


# ---- what hostile text can do


def test_hostile_text_is_only_text() -> None:
    drawn = frame(make_step(HOSTILE, names=(HOSTILE,)), 200, 30, question=HOSTILE)
    assert_harmless(drawn)
    assert bare(drawn).count("[bold red]markup[/]") == 2, "in the question and in the memory; the name is shortened"
    assert "\ufffd[31mred" in bare(drawn)


def test_hostile_text_where_there_is_no_terminal() -> None:
    output = plain(make_step(HOSTILE + "\nchunk 9 of 9: no line of ours", names=(HOSTILE,)))
    assert_harmless(output)
    assert "\n    chunk 9 of 9: no line of ours\n" in output


# ---- where there is no terminal


def plain(*steps: Step, quiet: bool = False, **options: object) -> str:
    console = Console(file=io.StringIO(), _environ={}, **options)  # type: ignore[arg-type]
    with WatchedReading(console, question=QUESTION, quiet=quiet) as progress:
        progress.begin(PLAN)
        for step in steps:
            progress.step(step)
        progress.stop()
    return written(console)


def test_without_a_terminal_the_memory_is_text() -> None:
    output = plain(
        make_step("Victor built it.\r\n\n\tAt Ingolstadt."),
        make_step("Victor built it.", "Victor built it.", index=1, outcome="kept"),
        answered("V."),
    )
    assert output.splitlines() == [
        "chunk 1 of 4: 1,000 tokens, 1,000 tokens/s, about 0:03 left",
        "  memory updated · characters 1,000-2,500 of a.txt",
        "    Victor built it.",
        "    ",
        "        At Ingolstadt.",
        "chunk 2 of 4: 1,000 tokens, 1,000 tokens/s, about 0:02 left",
        "  memory kept, the section is lost · characters 1,000-2,500 of a.txt",
    ]


def test_quiet() -> None:
    assert plain(make_step("memory"), quiet=True) == ""
    assert plain(make_step("memory"), quiet=True, force_terminal=True) == ""


def test_a_terminal_that_can_do_nothing_gets_text() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    with WatchedReading(console) as progress:
        progress.begin(PLAN)
        progress.step(make_step("Victor built it."))
    assert "  memory updated · characters 1,000-2,500 of a.txt\n    Victor built it.\n" in written(console)
    assert "\x1b" not in written(console)


# ---- from the beginning to the end


def test_the_display_is_gone_before_the_answer_comes() -> None:
    console = terminal()
    backend = ScriptedBackend(["Victor built it.", "Victor built it at Ingolstadt.", "Victor Frankenstein."])
    reader, document = Reader(backend, chunk_tokens=60, memory_tokens=50), "A few words of a document. " * 16
    with WatchedReading(console, question=QUESTION) as progress:
        progress.begin(reader.plan(QUESTION, document))
        for event in reader.stream(QUESTION, document):
            if isinstance(event, Step):
                progress.step(event)
            elif isinstance(event, str):
                progress.stop()
                console.out(event, end="")
            else:
                progress.done(event)
    after = written(console).rpartition("\x1b[?1049l")[2]
    assert bare(after).startswith("Victor Frankenstein.")
    assert re.fullmatch(r"read \d+ tokens in 3 calls and .*", bare(after).removeprefix("Victor Frankenstein.").rstrip())
    assert written(console).count("\x1b[?1049h") == written(console).count("\x1b[?1049l") == 1
    assert after.startswith("\x1b[?7h"), "the terminal wraps lines again"


def test_an_error_leaves_the_terminal_as_it_was() -> None:
    console = terminal()
    with suppress(KeyboardInterrupt), WatchedReading(console) as progress:
        progress.begin(None)
        raise KeyboardInterrupt
    assert written(console).endswith("\x1b[?25h\x1b[?1049l\x1b[?7h")


def test_many_recorded_steps_take_no_time() -> None:
    memories = [" ".join(f"fact {n + i} of it" for i in range(250)) for n in range(300)]
    console = terminal()
    began = time.monotonic()
    with WatchedReading(console) as progress:
        progress.begin(None)
        for number, memory in enumerate(memories[1:]):
            progress.step(make_step(memory, memories[number], index=number))
        taken = time.monotonic() - began
    assert len(frames(written(console))) < 2 + 8 * taken, "drawn by the clock"


SCRIPT = """
import sys
from memagent_integrations.cli.streams import console
from memagent_integrations.cli.watch import WatchedReading
from helpers.readings import LONG_MEMORY, PLAN, make_step
with WatchedReading(console(), "loading scripted", question="Who?") as progress:
    progress.begin(PLAN)
    progress.step(make_step(LONG_MEMORY.replace("line 40", "verse 40"), LONG_MEMORY))
    sys.stdin.readline()
"""


def screens(master: int) -> Iterator[bytes]:
    try:
        while block := os.read(master, 1 << 16):
            yield block
    except OSError:  # the other end is closed: a terminal reports that as an error
        return


@pytest.mark.heavy
def test_a_terminal_that_changes_its_size() -> None:
    master, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color", "PYTHONPATH": str(Path(__file__).parents[1])}
    running = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=end, env=environment
    )
    os.close(end)
    assert running.stdin
    output, sizes = b"", iter([(12, 50), None])
    wanted = (40, 140)
    for block in screens(master):
        output += block
        complete = [drawn.split("\n") for drawn in frames(output.decode(errors="ignore") + "\x1b[?1049l")[:-1]]
        if any(
            len(drawn) == wanted[0] and "not shown" in drawn[-1] and cell_len(bare(drawn[-1]).rstrip("\r")) == wanted[1]
            for drawn in complete
        ):
            following = next(sizes)
            if following is None:
                break
            wanted = following
            fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", *wanted, 0, 0))
    running.stdin.close()
    output += b"".join(screens(master))
    os.close(master)
    assert running.wait(30) == 0
    last = lines(frames(output.decode())[-1])
    assert last[-1].startswith("not shown: 38 lines above, ")
    assert "- line verse 40 of the memory" in last
    assert b"loading scripted" in output.split(b"\x1b[?1049h")[0], "the bar, until the reading begins"
    assert output.endswith(b"\x1b[?1049l\x1b[?7h")
