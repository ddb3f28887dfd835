"""Prompts: files to batches of token ids, and the order they come in."""
