"""The flight recorder: the format of its records, how a rank writes them, and the sources that feed it."""
