"""Pages for torch's debug server, asked over HTTP."""

from __future__ import annotations

import json
import pickle
import sys
import urllib.error
import urllib.request

import pytest
import torch

import gradwire as gw
from gradwire import observe
from gradwire.errors import UsageError

engine = pytest.importorskip("torch._C._distributed_c10d")
frontend = pytest.importorskip("torch.distributed.debug._frontend")
pytestmark = pytest.mark.skipif(
    not hasattr(engine, "_register_handler") or not hasattr(frontend, "DebugHandler"),
    reason=f"torch {torch.__version__} has no debug server that takes handlers",
)


@pytest.fixture
def ask():
    """Ask this process's part of the server."""
    observe.debug_handlers()
    server = engine._WorkerServer("::", 0)

    def post(endpoint):
        request = urllib.request.Request(f"http://localhost:{server.port}/handler/{endpoint}", method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()

    yield post
    server.shutdown()


def test_records_and_where_ranks_are(recorded, ask):
    [group] = gw.ThreadGroup.world(1)
    group.all_reduce(torch.ones(4), label="loss")
    group.close()
    facts = json.loads(ask("gradwire_records"))
    assert facts["header"]["rank"] == 0
    assert [r["kind"] for r in facts["records"]][-1] == "COLLECTIVE_FINISHED"
    assert facts["records"][-1]["label"] == "loss"
    state = ask("gradwire_state")
    assert state.startswith("rank 0 (process ")
    assert "main thread" in state


def test_a_rank_that_is_not_recorded_answers_all_the_same(ask):
    with pytest.raises(urllib.error.HTTPError) as error:
        ask("gradwire_records")
    assert (error.value.code, error.value.read().decode()[:28]) == (500, "UsageError: this rank is not")


def test_pages_of_the_front_end(monkeypatch):
    pages = pickle.loads(pickle.dumps(observe.debug_handlers()))  # it may be a process that is spawned
    assert all(isinstance(page, frontend.DebugHandler) for page in pages)
    assert [page.nav_links()[0].path for page in pages] == ["/gradwire/records", "/gradwire/state"]
    answers = [frontend.Response(200, '{"rank": 0}'), frontend.Response(503, "gone")]
    monkeypatch.setattr(frontend, "fetch_all", lambda endpoint, timeout=0: (["a", "b"], answers))
    assert pages[0].dump() == '=== Rank 0: a ===\n{"rank": 0}\n=== Rank 1: b ===\ngone'

    class Request:
        class frontend:
            @staticmethod
            def render_template(template, **facts):
                return f"{template} {facts['title']} {facts['addrs']}".encode()

    [route] = pages[1].routes()
    assert route.handler(Request) == b"raw_resp.html gradwire: where ranks are ['a', 'b']"


def test_without_such_a_server_the_error_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed.debug._frontend", None)
    with pytest.raises(UsageError, match="no debug server that takes handlers"):
        observe.debug_handlers()


def test_a_process_with_handlers_exits_as_any_other(warm_python):
    done = warm_python.run("from gradwire import observe; observe.debug_handlers()", timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
