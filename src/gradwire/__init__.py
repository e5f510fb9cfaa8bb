"""gradwire: data-parallel training for PyTorch in plain Python."""
