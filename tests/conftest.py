"""Fixtures shared by all tests. Thread counts are set before torch loads: many processes on few cores."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402
from tiny import tiny_model  # noqa: E402


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random two-layer Qwen2 with tied embeddings and the character tokenizer."""
    return tiny_model(tmp_path_factory.mktemp("tiny_model"))
