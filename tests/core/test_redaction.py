"""Keys and passwords are found in settings and addresses, and in texts in whatever form a server sends them back."""

from __future__ import annotations

import base64
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from memagent_integrations.redaction import is_secret, saved, secrets_in, shown, without_secrets

KEY = "kéy/with+signs&-0123456789"
FORMS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "percent-encoded": lambda key: quote(key, safe=""),
    "a part of it": quote,
    "in small letters": lambda key: quote(key, safe="").lower(),
    "of a form": quote_plus,
    "every character": lambda key: "".join(f"%{octet:02X}" for octet in key.encode()),
    "twice": lambda key: quote(quote(key, safe=""), safe=""),
    "base64": lambda key: base64.b64encode(key.encode()).decode(),
    "base64 for addresses": lambda key: base64.urlsafe_b64encode(key.encode()).decode().rstrip("="),
    "basic": lambda key: base64.b64encode(f"user:{key}".encode()).decode(),
    "basic, one more": lambda key: base64.b64encode(f"users:{key}".encode()).decode(),
    "base64 of more": lambda key: base64.b64encode(f"users=:{key}; and more".encode()).decode(),
    "hexadecimal": lambda key: key.encode().hex(),
    "of a page": lambda key: key.replace("&", "&amp;"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", [KEY, "a-plain-key", "short", "with a space"])
def test_a_key_that_is_sent_back(form: str, key: str) -> None:
    echo = FORMS[form](key)
    text = without_secrets(f"you said '{echo}' to me", [key])
    assert "***" in text
    assert echo not in text
    assert text.startswith("you said ")
    assert text.endswith(" to me")


@pytest.mark.fuzz
@given(
    key=st.text(st.characters(codec="utf-8", exclude_characters="*"), min_size=5, max_size=40),
    form=st.sampled_from(sorted(FORMS)),
    around=st.text(max_size=5),
)
def test_any_key_in_any_form(key: str, form: str, around: str) -> None:
    echo = FORMS[form](key)
    if form == "in small letters":
        echo = quote(key, safe="").replace("%", "%25") if key != key.lower() else echo
    if form == "of a page":
        echo = key
    assert echo not in without_secrets(f"{around} {echo} {around}", [key]).replace(around, "")


def test_texts_without_a_key_stay() -> None:
    text = "model m failed with status 500: no memory left at http://127.0.0.1:8000/v1 (user@example.org)"
    assert without_secrets(text, [KEY, "pw", ""]) == text
    assert without_secrets("at https://me:pw@host/v1 and sk-0123456789abcdef") == "at https://***@host/v1 and ***"


@pytest.mark.parametrize(
    "name",
    [
        *("api_key", "openai_api_key", "apiKey", "X-Api-Key", "password", "aws_secret_access_key", "hf_token", "token"),
        *("default_headers", "default_query", "credentials", "Authorization", "aws_session_token"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["max_tokens", "tokenizer", "model", "base_url", "keyboard", "author", "temperature"])
def test_names_of_others(name: str) -> None:
    assert not is_secret(name)


OPTIONS = {
    "base_url": f"https://me:{quote(KEY, safe='')}@host:80/v1?token={quote(KEY, safe='')}#x",
    "api_key": KEY,
    "default_headers": {"X-Key": KEY},
    "extra_body": {"password": KEY, "top_k": 3, "list": [{"secret": KEY}]},
    "azure_ad_token": SecretStr(KEY),
    "max_tokens": 10,
    "temperature": 0.5,
    "stop_token_ids": [1, 2],
}


def test_settings_are_shown_and_saved_without_secrets() -> None:
    for made in (shown(OPTIONS), saved(OPTIONS)):
        for form in FORMS.values():
            assert form(KEY) not in repr(made)
        assert made["base_url"] == "https://host:80/v1"
        assert (made["max_tokens"], made["temperature"], made["extra_body"]["top_k"]) == (10, 0.5, 3)
    assert shown(OPTIONS)["api_key"] == "***"
    assert "api_key" not in saved(OPTIONS)
    assert {KEY, quote(KEY, safe="")} <= set(secrets_in(OPTIONS))
