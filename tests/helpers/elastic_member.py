"""A rank of an elastic run that trains nothing: it enters the lobby, and follows the views until a file `done` appears.
In the folder it leaves `view-EPOCH-RANK-ID`, with its pid, for each view that it enters. Without torch, so that it starts at once.
"""

import os
import signal
import sys
import time
from pathlib import Path

from gradwire.elasticity.hub import HubClient
from gradwire.elasticity.machine import Enter, Member, Propose, Publish, Stop, View
from gradwire.elasticity.run_records import RunRecords


def train(folder: Path) -> None:
    """Be a member until the end of training; SIGTERM ends it before."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    port = int(os.environ["GRADWIRE_HUB"].rpartition(":")[2])
    hub = HubClient(("127.0.0.1", port), key=bytes.fromhex(os.environ["GRADWIRE_HUB_KEY"]))
    run, me, starters = RunRecords(hub), os.environ["GRADWIRE_MEMBER"], int(os.environ.get("GRADWIRE_STARTERS", "0"))
    run.enter_lobby(me)
    member = Member(me, min_ranks=int(os.environ["GRADWIRE_ELASTIC"].partition(":")[0]))
    while member.view is None or not (folder / "done").exists():
        _, state = run.look(member.epoch)
        if member.view is None:
            state = state._replace(next=run.facts(me).view)
            if starters and len(state.lobby) >= starters and min(state.lobby) == me and run.last_view() is None:
                run.propose(View(0, state.lobby, 0, state.lobby[1:]))
        if told and not member.leaving:
            if not member.computing:  # it is in the lobby, or has published that it stays
                print("stopped: it has left")
                sys.exit(run.leave(me))
            member, _ = member.leave()
        member, instructions = member.look(state)
        member, more = member.lost(member.epoch) if state.lobby or member.leaving else (member, ())
        for one in instructions + more:
            match one:
                case Publish(number, standing):
                    run.publish(number, me, standing)
                case Propose(view):
                    run.propose(view)
                case Enter(view):
                    member, _ = member.received()
                    (folder / f"view-{view.epoch}-{os.environ['RANK']}-{me}").write_text(str(os.getpid()))
                case Stop(why):
                    print("stopped:", why)
                    sys.exit(run.leave(me) if member.leaving else None)
        time.sleep(0.01)
