"""Samples of the benchmarks, for tests in this process and in others."""

from __future__ import annotations

import hashlib

import pytest

from helpers.data import DATA
from memagent_integrations.backends.scripted import ScriptedBackend
from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.samples import Sample
from memagent_integrations.evaluation.tasks import load

WITHOUT_DATA = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
ESSAYS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
BOOKS = tuple(f"babilong_qa{task}" for task in range(1, 6))
PROSE = ("prose_reworded", "prose_latest", "prose_train_hops", "prose_train_absent")

count = ScriptedBackend([]).count
_kept: list[Data] = []


def local() -> Data:
    """The data sets of this machine, read once."""
    if not DATA.is_dir():
        pytest.skip("shared/data is not here")
    if not _kept:
        _kept.append(Data(DATA))
    return _kept[0]


def make(name: str, length: int, seed: int = 1, number: int = 0) -> Sample:
    return load(name, Data() if name in WITHOUT_DATA else local()).make(length, seed, number, count)


def text(sample: Sample) -> str:
    return "".join(sample.document())


def digests() -> list[str]:
    """A line for each task: its name, and a digest of a sample with its document."""
    names = [
        *WITHOUT_DATA,
        *(
            (*ESSAYS, *BOOKS, *PROSE, "vt_train", "needles_train_multiquery", "qa_1", "qa_2", "ruler_hqa")
            if DATA.is_dir()
            else ()
        ),
    ]
    samples = {name: make(name, 50 if name == "ruler_hqa" else 4_096) for name in names}
    return [
        f"{name} {hashlib.sha256(repr((sample, text(sample))).encode()).hexdigest()}"
        for name, sample in samples.items()
    ]
