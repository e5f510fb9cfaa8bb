"""Gradients that a compiled backward reports as soon as it has computed them."""
