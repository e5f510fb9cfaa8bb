"""What every layer stands on: threads, processes of this host, compiled loops, Dynamo, warnings. Knows nothing of training."""
