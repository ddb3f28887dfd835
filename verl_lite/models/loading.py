"""HF model folders → modules ready to shard: dropout off, attention chosen, weights on rank 0 only if asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from verl_lite.config import ModelConfig, RewardModelBackboneConfig
from verl_lite.models.attention import PACKED_ATTENTION
from verl_lite.models.folder import weight_shapes
from verl_lite.models.forward import ValueModel

# Layers that look at other tokens through attention alone, which is told where a row ends.
PACKABLE_LAYERS = {"full_attention", "sliding_attention"}


Source = ModelConfig | RewardModelBackboneConfig


def load_causal_lm(source: Source, dtype: torch.dtype, *, on_meta: bool = False) -> PreTrainedModel:
    """A causal language model, on the CPU.

    on_meta: the modules without storage, for ranks that get their weights from rank 0.
    """
    return _load(AutoModelForCausalLM, source, dtype, on_meta)


def load_value_model(source: Source, dtype: torch.dtype, *, on_meta: bool = False) -> ValueModel:
    """The transformer in an HF folder under a scalar head: the folder's `score` of one output if it has one, else 0."""
    backbone = _load(AutoModel, source, dtype, on_meta)
    with torch.device("meta" if on_meta else "cpu"):
        model = ValueModel(backbone)
    if not on_meta:
        for file in sorted(_folder(source).glob("*.safetensors")):
            with safe_open(file, framework="pt") as weights:
                for name in ("weight", "bias"):
                    key, parameter = f"score.{name}", getattr(model.score, name)
                    if key in weights.keys() and weights.get_slice(key).get_shape() == list(parameter.shape):  # noqa: SIM118
                        parameter.data.copy_(weights.get_tensor(key))
    return model


def _folder(source: Source) -> Path:
    """The model's folder; of a hub id, whose weights have just been loaded, that of its downloaded files."""
    path = str(source.path)
    return Path(path if Path(path).is_dir() else snapshot_download(path, allow_patterns="*.safetensors"))


def load_reward_model(source: Source, dtype: torch.dtype, *, on_meta: bool = False) -> ValueModel:
    """The sequence classifier of one output in an HF folder: its transformer under its `score`."""
    model = _load(AutoModelForSequenceClassification, source, dtype, on_meta)
    # All of transformers' decoders that classify name their head so.
    score = getattr(model, "score", None)
    if not isinstance(score, nn.Linear) or score.out_features != 1:
        raise ValueError(
            f"reward.reward_model.model.path={source.path}: {type(model).__name__} has no head `score` of one output; "
            "a reward model is an AutoModelForSequenceClassification with num_labels=1"
        )
    return ValueModel(model.base_model, score)


def check_weights(model: PreTrainedModel, path: str) -> None:
    """Raise `ValueError` where the weights in a local model folder cannot be those of `model` (on the meta device)."""
    found = weight_shapes(Path(path))
    prefix = f"{model.base_model_prefix}."
    wanted = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, shape in found.items():
        if wanted.get(name, shape) != shape:
            raise ValueError(
                f"{path}: its config.json makes {name} of shape {wanted[name]}, its weights have {shape}; they do not "
                "belong together"
            )
    known = {alias for name in found for alias in (name, prefix + name, name.removeprefix(prefix))}
    missing = sorted(wanted.keys() - known - set(model.all_tied_weights_keys))
    # Where the file has names that the model does not, transformers may know how to turn one into the other.
    if missing and all({name, prefix + name, name.removeprefix(prefix)} & wanted.keys() for name in found):
        raise ValueError(_lacks(path, missing))


def _lacks(path: str, missing: list[str]) -> str:
    names = ", ".join(missing[:3]) + (" …" if len(missing) > 3 else "")
    return f"{path}: {len(missing)} weights that its config.json asks for are not in its files: {names}"


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Keep only the layers' inputs for backward. Works in eval mode, where transformers would ignore it."""
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True  # this module's own flag: what is inside it stays in eval mode


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks that are sharded one by one: those the architecture says must not be split over devices."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _load_config(source: Source) -> PretrainedConfig:
    override, path, packed = dict(source.override_config), str(source.path), source.use_remove_padding
    default_attention = PACKED_ATTENTION if packed else "sdpa"
    attention = override.pop("attn_implementation", default_attention)
    if packed and attention not in (PACKED_ATTENTION, "flash_attention_2", "flash_attention_3"):
        raise ValueError(
            f"model.override_config.attn_implementation={attention} cannot run rows without padding; "
            "leave it out, or set model.use_remove_padding=False"
        )
    config, unused = AutoConfig.from_pretrained(
        path, return_unused_kwargs=True, trust_remote_code=source.trust_remote_code, **override
    )
    if unused:
        raise ValueError(
            f"model.override_config: {type(config).__name__} has no {', '.join(sorted(unused))} "
            f"(the folder {path} is a {config.model_type} model)"
        )
    # Dropout would make the ratio to the old policy differ from 1 before the first update, and KL to the reference
    # from 0; some models read it from the config at every call, so it is turned off here and not in the modules.
    for name, value in config.to_dict().items():
        if ("drop" in name or name == "router_jitter_noise") and isinstance(value, float):
            setattr(config, name, 0.0)
    config._attn_implementation = attention
    return config


def _load(auto_class: Any, source: Source, dtype: torch.dtype, on_meta: bool) -> PreTrainedModel:
    path, packed, config = str(source.path), source.use_remove_padding, _load_config(source)
    options: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": config._attn_implementation,
        "trust_remote_code": source.trust_remote_code,
    }
    if on_meta:
        with torch.device("meta"):
            model = auto_class.from_config(config, **options)
    else:
        model, loading = auto_class.from_pretrained(
            path, config=config, **options,
            use_safetensors=True,  # a pickle can run code when it is read
            output_loading_info=True,
        )  # fmt: skip
        if missing := sorted(loading["missing_keys"]):
            # transformers would fill them with random numbers and go on.
            raise ValueError(_lacks(path, missing))
    if packed and not model._supports_attention_backend:
        raise ValueError(
            f"{type(model).__name__} does not support other attention functions, which packing needs; "
            "set model.use_remove_padding=False"
        )
    others = set(getattr(config.get_text_config(), "layer_types", None) or ()) - PACKABLE_LAYERS
    if packed and (others or model._is_stateful):
        raise ValueError(
            f"{type(model).__name__} has layers ({', '.join(sorted(others)) or 'recurrent'}) that would mix rows which "
            "stand end to end; set model.use_remove_padding=False"
        )
    return model.eval()
