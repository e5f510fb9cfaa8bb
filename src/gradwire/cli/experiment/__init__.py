"""What `gradwire bench` and `gradwire lab` share: worlds of rank processes, hooks by name, timing and reports."""
