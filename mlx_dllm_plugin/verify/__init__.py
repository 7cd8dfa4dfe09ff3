"""Comparing a checkpoint's model here with a reference implementation, layer by layer."""
