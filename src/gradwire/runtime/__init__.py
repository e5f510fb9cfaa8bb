"""What every layer stands on: threads, processes of this host, compiled loops, Dynamo, warnings. Knows nothing of training."""

FORK_SERVER = "GRADWIRE_PRELOAD"
"""The variable that makes a process the server of `fork_server.py`: a descriptor, modules and a directory, as JSON."""
