"""The flight recorder: the format of its records, and how a rank writes them."""
