from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.contract import BackendContract
from helpers.endpoint import answer, keeping
from helpers.loopback import Loopback, chat
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from memagent_integrations import Backend
from memagent_integrations.langchain import ChatModelBackend

pytestmark = [pytest.mark.heavy, pytest.mark.openai]


@pytest.fixture
def backend() -> Iterator[Backend]:
    with Loopback(keeping(chat(answer), '{"name": "Jupiter", "gas": true}')) as server:
        yield ChatModelBackend(
            ChatOpenAI(model="m", base_url=f"{server.url}/v1", api_key=SecretStr("none"), max_retries=0)
        )


class TestLangChain(BackendContract):
    pass
