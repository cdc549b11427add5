"""A worker's connections to servers that may come back."""

from __future__ import annotations

import pytest
from tests.by_hand import Mailbox

from offbeat.errors import JobError
from offbeat.runtime.worker import links
from offbeat.runtime.worker.links import Links
from offbeat.transport.base import Address, Connection
from offbeat.transport.link import Link

AT = Address("127.0.0.1", ("127.0.0.1", 1), "")


class Away(Mailbox):
    """The hub of a worker whose server listens from the third attempt on."""

    attempts = 0

    def connect(self, address: Address) -> Connection:
        self.attempts += 1
        if self.attempts < 3:
            raise JobError("nobody listens")
        return self.line


def test_a_worker_that_starts_while_a_server_is_on_its_way_back_awaits_it() -> None:
    hub = Away()
    assert isinstance(Links(hub).connect(AT, lasting=True), Link)
    assert hub.attempts == 3
    [resume] = hub.line.sent
    assert resume["kind"] == "resume" and resume["received"] == 0


def test_a_server_that_does_not_come_back_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    for lasting in (False, True):
        monkeypatch.setattr(links, "RETURN_S", 0.0)
        hub = Away()
        with pytest.raises(JobError, match="nobody listens"):
            Links(hub).connect(AT, lasting=lasting)
        assert hub.attempts == 1
