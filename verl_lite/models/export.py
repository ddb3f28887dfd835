"""Trained weights as HF folders, which transformers and vLLM load as they are."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

Kind = Literal["policy", "value"]


@dataclass(frozen=True)
class HFExport:
    """Writes models of one architecture. A value model becomes a token classifier of one label, its value."""

    kind: Kind
    path: str  # the HF folder or hub id that training started from
    override_config: Mapping[str, Any]
    trust_remote_code: bool = False

    def read(self) -> None:
        """Read what saving needs of `path`: when a step is saved, the folder may be gone or the hub out of reach."""
        _ = self._skeleton
        if self.kind == "policy":
            _ = self._generation_config

    def save_settings(self, folder: Path, dtype: torch.dtype) -> None:
        """config.json and, of a policy, generation_config.json: enough to export the weights later."""
        model = self._skeleton.to(dtype)
        model.config.dtype, model.config.architectures = str(dtype).removeprefix("torch."), [type(model).__name__]
        model.config.save_pretrained(folder)
        if self.kind == "policy":
            self._generation_config.save_pretrained(folder)

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """All of it. tensors: whole ones, as `distributed.checkpoint.model_tensors` names them."""
        dtype = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
        model = self._skeleton.to(dtype)
        if self.kind == "policy":
            model.generation_config = self._generation_config
        own = {"lm.": "", "backbone.": "" if model.base_model is model else f"{model.base_model_prefix}."}
        named = {}
        for name, tensor in tensors.items():
            prefix = next((prefix for prefix in own if name.startswith(prefix)), "")
            named[own.get(prefix, "") + name.removeprefix(prefix)] = tensor
        model.save_pretrained(str(folder), state_dict=named)
        # safetensors writes files that their owner alone may read, whatever the umask says.
        mode = (folder / "config.json").stat().st_mode & 0o777
        for weights in folder.glob("*.safetensors"):
            weights.chmod(mode)

    @functools.cached_property
    def _skeleton(self) -> PreTrainedModel:
        """The modules without storage."""
        override = {k: v for k, v in self.override_config.items() if k != "attn_implementation"}
        labels = {"num_labels": 1} if self.kind == "value" else {}
        config: PretrainedConfig = AutoConfig.from_pretrained(
            self.path, trust_remote_code=self.trust_remote_code, **override, **labels
        )
        with torch.device("meta"):
            options: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
            if self.kind == "policy":
                return AutoModelForCausalLM.from_config(config, **options)
            try:
                return AutoModelForTokenClassification.from_config(config, **options)
            except ValueError:  # transformers has none of this architecture: the bare model, and the head beside it
                return AutoModel.from_config(config, **options)

    @functools.cached_property
    def _generation_config(self) -> GenerationConfig:
        try:
            return GenerationConfig.from_pretrained(self.path)
        except OSError:  # it has none
            return self._skeleton.generation_config or GenerationConfig()
