"""Which accounts of a server are used, and what the length of a block is taken to be; addresses that are none."""

from __future__ import annotations

import pytest

from dflash.config import ServerConfig
from dflash.data.served_http import ServerClient
from dflash.errors import EvaluationError, TargetError
from dflash.evaluate.prompts import EvalPrompt
from dflash.evaluate.served_client import Known, root_of
from dflash.evaluate.served_replies import Drafting, ServedReply
from dflash.evaluate.served_result import Asked, accounts_of


def asked(*replies: tuple[int, Drafting | None], positions: int | None = None) -> Asked:
    prompts = tuple(EvalPrompt(f"q{n}", "k", "d", (1, 2), "h", {}) for n in range(len(replies)))
    said = tuple(ServedReply(None, "", 2, tokens, False, None, drafting) for tokens, drafting in replies)
    return Asked(prompts, said, None, (), Known(True, True, positions), "http://host", 1.0)


def test_an_answer_of_the_prefill_alone_needs_no_account() -> None:
    told = Drafting(2, 6, 2, None, ((3, 2), (3, 0)))
    accounts, positions = accounts_of(asked((5, told), (1, None)), expected=7)
    assert positions == 3, "the longest proposal that was told of"
    assert [(account.verifications, account.counted) for account in accounts] == [(2, 4), (0, 0)]
    with pytest.raises(EvaluationError, match="1 of 2 answers came without an account of their verifications, first 'q1'"):
        accounts_of(asked((5, told), (2, None)), expected=7)


def test_a_server_that_names_its_block_is_believed_and_one_that_tells_nothing_has_the_expected_one() -> None:
    told = Drafting(1, None, 2, None, None)
    assert accounts_of(asked((4, told), positions=5), expected=7)[1] == 5
    assert accounts_of(asked((4, told)), expected=7)[1] == 7
    assert accounts_of(asked((4, Drafting(1, 3, 2, (0, 0, 1, 0), None))), expected=7)[1] == 3


@pytest.mark.parametrize("url", ["http://[::1", "http://key@[::1/v1"])
def test_an_address_that_cannot_be_taken_apart_is_refused(url: str) -> None:
    with pytest.raises(TargetError, match="no address of a server") as root:
        root_of(url)
    with pytest.raises(TargetError, match="no http address") as client:
        ServerClient(ServerConfig(url=url), section="evaluate.server", kept="")
    assert "key" not in str(root.value) + str(client.value)


def test_an_address_with_a_wrong_port_is_refused() -> None:
    with pytest.raises(TargetError, match="no http address"):
        ServerClient(ServerConfig(url="http://127.0.0.1:abc"), section="evaluate.server", kept="")
