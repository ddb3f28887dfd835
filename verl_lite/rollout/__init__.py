"""Generation: the engine contract, its engines, and the way new weights reach them."""

from __future__ import annotations

ENGINES = {
    "vllm": "verl_lite.rollout.vllm_engine:VllmEngine",
    "hf": "verl_lite.rollout.hf_engine:HfEngine",
}
