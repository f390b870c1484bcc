"""A hub that does not answer is asked once."""

import http.server
import os
import threading

import datasets
import pytest
from huggingface_hub import constants

from moe_finetune.data.sources import read_rows
from moe_finetune.errors import DataError
from moe_finetune.io import hub
from moe_finetune.io.terminal import Terminal, use_terminal


@pytest.fixture
def online(monkeypatch):
    """As in a process that was not told to stay offline."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    hub.check_hub.cache_clear()
    before = use_terminal(Terminal("plain"))
    yield monkeypatch
    use_terminal(before)
    hub.check_hub.cache_clear()


def test_an_unreachable_hub_is_asked_once_and_its_cache_is_used(online, capsys):
    online.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for name in ("nobody/first", "nobody/second"):
        with pytest.raises(DataError, match="and it cannot be loaded as a hub dataset"):
            list(read_rows(name))
    err = capsys.readouterr().err
    assert err.count("http://127.0.0.1:9 cannot be reached") == 1
    assert "Retry" not in err and len(err.splitlines()) == 1
    assert constants.HF_HUB_OFFLINE and datasets.config.HF_HUB_OFFLINE
    assert os.environ["HF_HUB_OFFLINE"] == "1"  # of the processes that are started


def test_a_hub_that_answers_stays_in_use(online, capsys):
    asked = []

    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            self.send_error(503)  # a server in trouble is the client's own business

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        online.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        hub.check_hub()
        hub.check_hub()
        server.shutdown()
    assert len(asked) == 1
    assert not constants.HF_HUB_OFFLINE and not capsys.readouterr().err
