"""`gradwire hub`: the hub of an elastic run on a host of its own.

Serve the records of one elastic run: which ranks train together. Ranks need it only when members change, so it may be away for
a while. Started again with the same file, at the same address, it continues where it was: that is all there is to a recovery,
also on another host that has the file and the address. It ends with SIGTERM or Ctrl-C.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from gradwire.cli.elastic_options import address, read_key
from gradwire.elasticity.hub import Hub
from gradwire.launch.hub_host import host_and_port


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "gradwire run --elastic 2:8 --hub HOST:PORT begins a run at it, gradwire run --join HOST:PORT adds ranks."
    )
    add = parser.add_argument
    add("--address", type=address, required=True, metavar="HOST:PORT", help="where to listen; port 0: at a free one")
    add("--file", type=Path, required=True, help="the file of the records, which is made for a new run")
    key = "the file with the key that launchers need too; it is made if it does not exist (default: FILE.key)"
    add("--key-file", type=Path, metavar="KEY", help=key)


def run(args: argparse.Namespace) -> int:
    key_file = args.key_file or args.file.with_name(f"{args.file.name}.key")
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # on the threads of the hub too
    hub = Hub(args.file, key=read_key(key_file, make=True), address=args.address)
    print(f"hub at {host_and_port(hub.address)}, records in {args.file}, key in {key_file}", flush=True)
    signal.sigwait(signals)
    hub.close()
    return 0
