"""Training that goes on while ranks die, leave and join."""
