"""Ending a run early and well: what a signal asks for and how the loop answers. Imports nothing heavy."""

from __future__ import annotations

import threading
from pathlib import Path


class StopRequest(threading.Event):
    """Set from outside: end after the step under way. Until `in_steps` there is no step worth finishing."""

    def __init__(self) -> None:
        super().__init__()
        self.in_steps = False


class StoppedEarly(Exception):
    """The run was asked to stop and did so after `step`; `saved` is the checkpoint of that step, if one was written."""

    def __init__(self, step: int, saved: Path | None) -> None:
        self.step, self.saved = step, saved
        super().__init__(f"stopped after step {step}, " + ("nothing saved" if saved is None else f"saved in {saved}"))
