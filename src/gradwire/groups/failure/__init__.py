"""Which ranks of a group are missing, lost or late, and who finds out."""
