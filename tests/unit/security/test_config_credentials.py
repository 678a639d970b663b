"""Credentials in a configuration are refused by name of the key and never repeated, whatever the mistake around them."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import dump_config, parse_config
from dflash.config.credentials import hide_credentials, require_no_credentials
from dflash.errors import ConfigError
from tests.support.planted_secrets import spellings

TEXT = "target: {path: demo, mask_token_id: 9}\ndata: {num_conversations: 8}\n"
SECRET = "hunter2planted"


def refused(*overrides: str, text: str = TEXT) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, origin="test.yaml", overrides=overrides)
    assert SECRET not in str(caught.value), "the message is read by others"
    return caught.value


@pytest.mark.parametrize(
    ("key", "address"),
    [
        ("tracking.uri", f"http://me:{SECRET}@host/mlflow"),
        ("tracking.uri", f"postgresql+psycopg://me:{SECRET}@host/db"),
        ("tracking.uri", f"https://{SECRET}@host"),
        ("data.answers.server.url", f"http://me:{SECRET}@host:8000/v1"),
        ("data.answers.server.url", f"https://host/v1?api_key={SECRET}"),
        ("data.store", f"s3://key:{SECRET}@bucket/x"),
        ("run.root", f"https://h/x?X-Amz-Signature={SECRET}"),
        ("data.files.0", f"https://h/a.jsonl?sv=1&sig={SECRET}"),
        ("data.files.0", f"https://h/a.jsonl#auth={SECRET}"),
        ("tracking.uri", f"postgresql://me:with/{SECRET}@host/db"),
        ("data.store", f"s3://key:with/{SECRET}+x@bucket/x"),
    ],
)
def test_an_address_with_a_credential(key: str, address: str) -> None:
    value = json.dumps([address]) if key.endswith(".0") else json.dumps(address)
    error = refused(f"{key.removesuffix('.0')}={value}")
    assert key in error.what
    assert "MLFLOW_TRACKING_URI" in error.remedy


ADDRESS = f"http://me:{SECRET}@host/x"
CODED = base64.b64encode(ADDRESS.encode()).decode()


@pytest.mark.parametrize(
    "override",
    [
        f"tracking.uri=!!binary {CODED}", f'data.files=!!set {{"{ADDRESS}"}}', f'data.template_flags.x=!!omap [a: "{ADDRESS}"]',
        f'data.template_flags.x=!!pairs [a: "{ADDRESS}"]', f'data.template_flags={{"{ADDRESS}": yes}}',
        f'data.template_flags={{"{ADDRESS}": 1, "{ADDRESS}": 2}}', f'data.template_flags={{x: {{"{ADDRESS}": {{password: x}}}}}}',
    ],
)  # fmt: skip
def test_no_other_type_of_yaml_and_no_key_carries_a_credential_past_the_search(override: str) -> None:
    assert CODED not in refused(override).what


@pytest.mark.parametrize(
    "key",
    [
        "api_key", "hub-token.access_token", "password", "Secret", "aws.secret_key", "token", "hf_token", "auth_string",
        "session_token", "Authorization", "client_secret", "passphrase",
    ],
)  # fmt: skip
def test_a_key_that_names_a_secret(key: str) -> None:
    text = TEXT.replace("num_conversations: 8", f"num_conversations: 8, template_flags: {{{json.dumps(key)}: {SECRET}}}")
    assert f"data.template_flags.{key}" in refused(text=text).what


@pytest.mark.parametrize("value", ["12345", "[x]", "{a: x}"])
def test_a_secret_need_not_be_a_text(value: str) -> None:
    assert "data.template_flags.password" in refused(f"data.template_flags.password={value}").what


@pytest.mark.parametrize(
    "mistake",
    [
        "tracking.uri http://me:{}@host", "tracking.uri.x.y=http://me:{}@host", "schema_version.x=http://me:{}@host",
        "tracking.uri=[http://me:{}@host", "a." * 20 + "uri=http://me:{}@host",
    ],
)  # fmt: skip
def test_a_mistake_around_a_credential_does_not_tell_it(mistake: str) -> None:
    refused(mistake.format(SECRET))


def test_yaml_that_is_broken_beside_a_credential_does_not_tell_it() -> None:
    error = refused(text=f"{TEXT}tracking: {{uri: 'http://me:{SECRET}@host'\nx: [1")
    assert "line" in error.what


@pytest.mark.parametrize(
    "override",
    [
        "tracking.uri=http://127.0.0.1:5000", "tracking.uri=postgresql+psycopg://db.example.org/mlflow", "data.store=s3://bucket/a@b",
        "data.answers.server.api_key_env=MY_KEY", "data.answers.server.url=http://127.0.0.1:8000/v1?stream=yes",
        "data.answers.server.url=http://127.0.0.1:8000/v1/a@b", "data.template_flags.mask_token=x",
        "data.template_flags.token=null",
        "data.system_prompt='write to me@example.org: now'", "target.revision=abc@def", "run.root=/data/a:b@c",
    ],
)  # fmt: skip
def test_what_holds_no_credential_is_let_through(override: str) -> None:
    assert parse_config(TEXT, origin="test", overrides=[override])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    # Behind two characters that no message holds: `password` alone would be found in every one of them.
    secret=st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=6, max_size=18).map("q7{}".format),
    scheme=st.sampled_from(["http", "https", "s3", "postgresql", "sqlite+x", "ssh", "HTTP"]),
    depth=st.integers(0, 5),
)
def test_a_password_is_seen_at_any_depth(secret: str, scheme: str, depth: int) -> None:
    value: object = f"see {scheme}://user:{secret}@host/x"
    assert hide_credentials(str(value)) == "(hidden)"
    for level in range(depth):
        value = {"a": value} if level % 2 else [value]
    with pytest.raises(ConfigError) as caught:
        require_no_credentials({"x": value}, origin="test")
    assert secret not in str(caught.value)


def test_what_is_accepted_is_written_as_it_is() -> None:
    config = parse_config(TEXT, origin="test", overrides=["tracking.uri=http://127.0.0.1:5000"])
    assert "uri: http://127.0.0.1:5000" in dump_config(config)


def test_a_secret_is_searched_for_in_every_spelling() -> None:
    assert {b"a/b:c d", b"c%20d", b"YyBk"} <= spellings("a/b:c d") | spellings("x:c d")
