"""Hooks made of hooks: stages in a chain, a hook per parameter, per step or per level of the network."""
