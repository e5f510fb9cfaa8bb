"""Hooks that communicate every few steps, and then parameters instead of gradients."""
