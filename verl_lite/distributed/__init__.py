"""Processes: where they are placed, how the driver talks to them, and how ranks form a process group."""
