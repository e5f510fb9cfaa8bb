"""Pages for torch's debug server (`torch.distributed.debug`): records of every rank, where ranks are, and what they wait for.

The server has a part on each rank, which answers in a thread of its own, and a front end next to rank 0, which asks them all. A
rank that holds the interpreter's lock does not answer, but the other ranks of its host do: they read its ring, and its stacks by a
signal.
"""

from __future__ import annotations

import ctypes
import json
from importlib import import_module
from typing import Any

from gradwire.errors import UsageError
from gradwire.observe.inspection import inspection
from gradwire.observe.rings.ring import read_ring
from gradwire.recorder import flight_recorder

RECORDS, STATE = "gradwire_records", "gradwire_state"
_SHOWN = 200
_registered: set[str] = set()


def debug_handlers() -> list[Any]:
    """Handlers for `torch.distributed.debug.start_debug_server`, which this makes known on this rank. Every rank calls it:

        start_debug_server(handlers=[*default_handlers(), *gradwire.observe.debug_handlers()])

    `default_handlers` is from torch.distributed.debug._debug_handlers. Needs what torch's server needs.
    """
    try:
        frontend: Any = import_module("torch.distributed.debug._frontend")
        frontend.DebugHandler  # noqa: B018
        engine: Any = import_module("torch._C._distributed_c10d")
        register = engine._register_handler
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"observe.debug_handlers(): this torch has no debug server that takes handlers: {error}."
        ) from None
    for name, answer in ((RECORDS, records_json), (STATE, state_text)):
        if name not in _registered:  # torch has no way to remove one
            respond = _respond(answer)
            # torch releases it when the process has no interpreter any more, which must not free it: it is never freed.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(respond))
            register(name, respond)
            _registered.add(name)
    page: Any = import_module("gradwire.observe.debug_frontend").Page
    return [
        page(RECORDS, "/gradwire/records", "gradwire records", "json_resp.html"),
        page(STATE, "/gradwire/state", "gradwire: where ranks are", "raw_resp.html"),
    ]


def records_json() -> tuple[str, str]:
    """The last records of this rank, the header of its ring and what records refer to; and the type of that."""
    ring = read_ring(_recorder().path)
    facts = {
        "header": ring.header,
        "descriptions": ring.descriptions,
        "records": [{**record._asdict(), "kind": record.kind.name} for record in ring.records[-_SHOWN:]],
    }
    return json.dumps(facts), "application/json"


def state_text() -> tuple[str, str]:
    """Where the ranks of this host are, with their stacks, and the report if they hang; and the type of that."""
    return "\n".join(inspection(_recorder().path.parent, whole=True)) + "\n", "text/plain"


def _recorder() -> flight_recorder.FlightRecorder:
    recorder = flight_recorder.active
    if recorder is None:
        raise UsageError("this rank is not recorded: call gradwire.observe.start(directory).")
    return recorder


def _respond(answer: Any) -> Any:
    def respond(request: Any, response: Any) -> None:
        try:
            content, kind = answer()
            status = 200
        except Exception as error:  # which would end the rank
            content, kind, status = f"{type(error).__name__}: {error}\n", "text/plain", 500
        response.set_content(content, kind)
        response.set_status(status)

    return respond
