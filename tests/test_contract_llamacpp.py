from __future__ import annotations

from collections.abc import Iterator

import pytest
from contract import BackendContract

from memagent_integrations import Backend, load_backend

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    with load_backend("smollm2") as loaded:
        yield loaded


class TestLlamaCpp(BackendContract):
    pass
