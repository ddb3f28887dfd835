"""What a user can get wrong, one row each: refused with exit code 2, by a message that names the thing and the way out.

Every case goes through `main_ppo.main` in this process. EARLY ones are refused before Ray starts; LATE ones need
torch, a tokenizer or the user's own code and are found while Ray starts (here a stand-in: that the real one then ends
without a trace is shown by `test_main_ppo`). AT_WORK ones show only when a response is scored. A refusal leaves nothing
behind.

What one key alone can hold wrong is in `test_config`, sizes that do not fit in `test_batching`, checkpoints in
`trainer/test_checkpoints`, clusters and signals in `test_main_ppo`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prepare_quickstart
import psutil
import pytest
import torch
from test_dead_keys import InProcess
from tiny import addition_rows, tiny_model, tiny_reward_model, write_jsonl, write_parquet

from verl_lite import main_ppo
from verl_lite.distributed import cluster, placement
from verl_lite.distributed.process_group import RankContext, free_port, init_process_group
from verl_lite.rollout import weight_transfer
from verl_lite.trainer import setup

M, A, R = (f"actor_rollout_ref.{section}." for section in ("model", "actor", "rollout"))
REWARD = "reward.custom_reward_function."
BASE = [
    "data.train_files=train.jsonl",
    "data.train_batch_size=4",
    "data.max_prompt_length=9",
    "data.max_response_length=4",
    M + "path=./model",
    A + "ppo_mini_batch_size=2",
    A + "ppo_micro_batch_size_per_gpu=2",
    R + "name=hf",
    R + "n=2",
    "algorithm.adv_estimator=grpo",
    "trainer.device=cpu",
    "trainer.total_training_steps=1",
    "trainer.run_dir=run",
]

# --- what is wrong with the folder a run is started in ----------------------------------------------------------------

Spoil = Callable[[Path], Any]


def text(name: str, content: str = "") -> Spoil:
    """A file of that content."""
    return lambda folder: (folder / name).write_text(content)


def rows(name: str = "train.jsonl", **changes: Any) -> Spoil:
    """Twelve rows, the last with these changes; None in a change stands for null."""

    def write(folder: Path) -> None:
        made = addition_rows(4)
        made[-1] |= changes
        (write_parquet if name.endswith(".parquet") else write_jsonl)(made, folder / name)

    return write


def without(column: str) -> Spoil:
    def write(folder: Path) -> None:
        write_parquet([{k: v for k, v in row.items() if k != column} for row in addition_rows(4)], folder / "a.parquet")

    return write


def cut(name: str, keep: float) -> Spoil:
    """The file, with its end missing."""

    def shorten(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * keep)])

    return shorten


def parquet_cut_off(folder: Path) -> None:
    rows("a.parquet")(folder)
    cut("a.parquet", 0.8)(folder)


def without_file(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


def edit(name: str, **changes: Any) -> Spoil:
    """A JSON file with these fields changed, or without them where the change is None."""

    def write(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps({k: v for k, v in content.items() if v is not None}))

    return write


def pickled_weights(folder: Path) -> None:
    (folder / "model" / "model.safetensors").unlink()
    (folder / "model" / "pytorch_model.bin").write_bytes(b"\x80\x04")


def missing_shard(folder: Path) -> None:
    (folder / "model" / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(index))


def missing_shard_names(folder: Path) -> None:
    missing_shard(folder)
    (folder / "model" / "model.safetensors.index.json").write_text('{"weight_map": {"a": null, "b": 3}}')


def unreadable_file(folder: Path) -> None:
    """Who runs as root may read everything: a name in a loop is unreadable for all."""
    (folder / "loop.jsonl").symlink_to("loop.jsonl")


def without_template(folder: Path) -> None:
    (folder / "model" / "chat_template.jinja").unlink()


def needs_remote_code(folder: Path) -> None:
    edit("model/config.json", model_type="mine", auto_map={"AutoConfig": "mine.Config"})(folder)
    (folder / "model" / "mine.py").write_text("raise RuntimeError('it ran')")


def reward_code(body: str, signature: str = "data_source, solution_str, ground_truth, extra_info=None") -> Spoil:
    return text("reward.py", f"import time\n\ndef compute_score({signature}):\n    {body}\n")


@dataclass(frozen=True)
class Case:
    name: str
    words: tuple[str, ...]
    """What the message has to hold: the key, the value, the way out."""
    overrides: tuple[str, ...] = ()
    spoil: Spoil = lambda folder: None
    environment: tuple[tuple[str, str], ...] = ()


def case(name: str, *overrides: str, words: list[str], spoil: Spoil = lambda folder: None, **environment: str) -> Case:
    return Case(name, tuple(words), overrides, spoil, tuple(environment.items()))


TRAIN, VAL = "data.train_files=", "data.val_files="
MY_REWARD = REWARD + "path=reward.py"

# fmt: off
EARLY = [
    # configuration
    case("unknown key", "trainer.total_epoch=3", words=["trainer.total_epoch: no such key", "trainer.total_epochs"]),
    case("unknown key behind a plus", "+actor_rollout_ref.actor.ppo_minibatch_size=4",
         words=["ppo_minibatch_size", "ppo_mini_batch_size"]),
    case("not supported", "actor_rollout_ref.rollout.name=sglang",
         words=["rollout.name=sglang: not supported", "vllm, hf"]),
    case("two names of one thing", A + "grad_clip=1", A + "optim.clip_grad=2",
         words=["grad_clip=1", "optim.clip_grad=2", "give one of them"]),
    case("not a number", A + "optim.lr=fast", words=[A + "optim.lr=fast", "must be float >= 0"]),
    case("NaN", A + "optim.lr=nan", words=[A + "optim.lr=nan", ">= 0"]),
    *(case(f"no limit for {key}", f"{key}=1e9", words=[f"{key}=1000000000.0", "<= 1e+06"])
      for key in ("reward.timeout_s", *(f"trainer.{name}_s" for name in
                  ("start_timeout", "step_timeout", "collective_timeout", "preempt_grace")))),
    case("negative", "trainer.total_epochs=-1", words=["trainer.total_epochs=-1", ">= 1"]),
    case("estimator mistyped", "algorithm.adv_estimator=grppo", words=["adv_estimator=grppo", "did you mean grpo?"]),
    case("loss option unknown", A + "policy_loss.clip_cov_ration=0.1", words=["clip_cov_ration", "clip_cov"]),
    case("batches that do not divide", A + "ppo_mini_batch_size=3",
         words=["ppo_mini_batch_size=3", "train_batch_size=4", "nearest: 2, 4"]),
    case("mini-batch larger than the batch", A + "ppo_mini_batch_size=16", words=["16", "4"]),
    case("no micro-batch size", A + "ppo_micro_batch_size_per_gpu=null",
         words=["ppo_micro_batch_size_per_gpu", "use_dynamic_bsz"]),
    case("temperature 0", R + "temperature=0", words=[R + "temperature=0", "val_kwargs.do_sample=False"]),
    case("temperature vLLM refuses", R + "name=vllm", R + "temperature=3",
         words=[R + "temperature=3", "0.01", "2", R + "name=hf"]),
    case("validation temperature vLLM refuses", R + "name=vllm", R + "val_kwargs.temperature=2.5",
         R + "val_kwargs.do_sample=True", words=[R + "val_kwargs.temperature=2.5", "2"]),
    case("fewer tokens than sequences at once", R + "name=vllm", R + "max_num_batched_tokens=100",
         words=["max_num_batched_tokens=100", "max_num_seqs=256"]),
    case("no room for the longest sequence", R + "max_model_len=12", words=["max_model_len=12", "9 + 4 = 13"]),
    case("a sweep", R + "n=2,4", words=[R + "n=2,4", "sweep"]),
    case("an override without a value", "trainer.total_epochs", words=["trainer.total_epochs: write key=value"]),
    # recipes
    case("recipe not there", "--config-name=ppo_traner", words=["--config-name ppo_traner", "ppo_trainer"]),
    case("recipe of a name too long", f"--config-name={'x' * 300}", words=["--config-name xxx", "no such recipe"]),
    case("recipe of nobody's home", "--config-name=~nonsuch/mine.yaml", words=["--config-name mine", "no such recipe"]),
    case("recipe folder of a name too long", f"--config-dir={'x' * 300}", words=["--config-dir", "no such folder"]),
    case("recipe folder in nobody's home", "--config-dir=~nonsuch", words=["--config-dir", "no such folder"]),
    case("recipe on itself", "--config-name=mine.yaml", spoil=text("mine.yaml", "defaults: [mine]\n"),
         words=["mine.yaml", "recursion"]),
    case("recipe not YAML", "--config-name=mine.yaml", spoil=text("mine.yaml", "data:\n  seed: [\n"),
         words=["mine.yaml", "line 3"]),
    case("recipe is a list", "--config-name=mine.yaml", spoil=text("mine.yaml", "- a\n"),
         words=["mine.yaml", "key: value"]),
    case("recipe empty of sense", "--config-name=mine.yaml", spoil=text("mine.yaml", "data:\n  seed: ${nowhere.key}\n"),
         words=["data.seed", "nowhere.key"]),
    case("recipe on a recipe not there", "--config-name=mine.yaml", spoil=text("mine.yaml", "defaults: [ppo_traner]\n"),
         words=["mine.yaml", "defaults list", "ppo_traner", "there are: ppo_trainer"]),
    case("old tree of a verl recipe", "--config-name=mine.yaml",
         spoil=text("mine.yaml", "defaults: [{model@actor_rollout_ref.model: hf_model}]\n"),
         words=["mine.yaml", "hf_model"]),
    # data files
    case("train file missing", TRAIN + "trian.jsonl", words=["data.train_files", "trian.jsonl", "there: train.jsonl"]),
    case("train file not set", TRAIN + "[]", words=["data.train_files is not set", "parquet, json or jsonl"]),
    case("train file a folder", TRAIN + "model", words=["data.train_files", "model is a folder", "name the files"]),
    case("train file empty", TRAIN + "a.jsonl", spoil=text("a.jsonl"), words=["a.jsonl has no rows"]),
    case("train file csv", TRAIN + "a.csv", spoil=text("a.csv", "x\n"), words=["a.csv", ".parquet, .json, .jsonl"]),
    case("parquet in name only", TRAIN + "a.parquet", spoil=text("a.parquet", "PAR0"),
         words=["data.train_files", "a.parquet is not a readable parquet"]),
    case("parquet of no bytes", TRAIN + "a.parquet", spoil=text("a.parquet"),
         words=["a.parquet is not a readable parquet"]),
    case("parquet cut off", TRAIN + "a.parquet", spoil=parquet_cut_off, words=["a.parquet is not a readable parquet"]),
    case("parquet without rewards", TRAIN + "a.parquet", spoil=without("reward_model"),
         words=["a.parquet has no column 'reward_model'", "its columns: data_source, prompt"]),
    case("prompt under another name", TRAIN + "a.parquet", "data.prompt_key=question", spoil=rows("a.parquet"),
         words=["no column 'question'", "data.prompt_key"]),
    case("null prompt", TRAIN + "a.parquet", spoil=rows("a.parquet", prompt=None),
         words=["a.parquet, row 3", "'prompt'", "null"]),
    case("prompt a number", spoil=rows(prompt=7), words=["train.jsonl, row 3", "expected a list of messages, got 7"]),
    case("prompt with an image", spoil=rows(prompt=[{"role": "user", "content": [{"type": "image"}]}]),
         words=["row 3", "only text parts are supported"]),
    case("JSON torn", spoil=cut("train.jsonl", 0.97), words=["data.train_files", "train.jsonl is not valid jsonl"]),
    case("JSON of something else", TRAIN + "a.json", spoil=text("a.json", '{"rows": 3}'),
         words=["a.json", "list of objects"]),
    case("file that cannot be read", TRAIN + "loop.jsonl", spoil=unreadable_file,
         words=["data.train_files", "loop.jsonl"]),
    case("JSON in lists without end", TRAIN + "a.jsonl", spoil=text("a.jsonl", "[" * 100_000),
         words=["a.jsonl is not valid jsonl", "recursion"]),
    case("JSON with an endless number", TRAIN + "a.json", spoil=text("a.json", "[" + "9" * 5000 + "]"),
         words=["a.json is not valid json", "5000 digits"]),
    case("source a number", spoil=rows(data_source=7), words=["train.jsonl, row 3", "'data_source' is not text but 7"]),
    case("source a list", spoil=rows(data_source=["a"]), words=["train.jsonl, row 3", "'data_source'", "['a']"]),
    case("bytes that are no text", spoil=lambda folder: (folder / "train.jsonl").write_bytes(b"\xff\xfe{}"),
         words=["train.jsonl is not valid jsonl"]),
    case("validation file of another schema", VAL + "b.parquet",
         spoil=lambda f: write_parquet([{"q": "1"}], f / "b.parquet"),
         words=["data.val_files", "b.parquet has no column 'prompt'", "its columns: q"]),
    case("terminal commands in the data", TRAIN + "a.jsonl", spoil=text("a.jsonl", '{"\\u001b[2Jprompt": 1}'),
         words=["a.jsonl has no column 'prompt'", "its columns: \\x1b[2Jprompt"]),
    *(case(f"{key} of a name too long", f"{key}={'x' * 300}.py{':f' * ('loss' in key)}", *more,
           words=[f"{key}=", "File name too long", "another path"])
      for key, *more in (
        ["data.train_files"], ["data.val_files"], [M + "path", M + f"path=./{'x' * 300}"], [MY_REWARD[:-10]],
        [A + "policy_loss.loss_mode"], ["trainer.run_dir"], ["trainer.rollout_data_dir"],
        ["trainer.default_local_dir", "trainer.save_freq=1"],
        ["trainer.resume_from_path", "trainer.resume_mode=resume_path"],
      )),
    case("run folder with a zero byte", "trainer.run_dir='a\0b'", words=["trainer.run_dir=", "\\x00", "null byte"]),
    case("train file behind a loop of links", TRAIN + "loop/a.jsonl", words=["loop/a.jsonl", "symbolic links"],
         spoil=lambda folder: (folder / "loop").symlink_to("loop")),
    # models and tokenizers
    case("model folder missing", M + "path=./modle", words=[M + "path", "modle", "there: model"]),
    case("model not set", M + "path=null", words=[M + "path is not set"]),
    case("model without config", spoil=without_file("model/config.json"), words=[M + "path: no config.json in"]),
    case("model config cut off", spoil=cut("model/config.json", 0.5), words=[M + "path", "config.json cannot be read"]),
    case("model config of something else", spoil=edit("model/config.json", model_type=None), words=["no model_type"]),
    case("model without weights", spoil=without_file("model/model.safetensors"),
         words=[M + "path: no weights in", "model.safetensors"]),
    case("weights cut off", spoil=cut("model/model.safetensors", 0.9),
         words=["model.safetensors is not a readable safetensors file, or not all of one", "once more"]),
    case("weights no weights", spoil=text("model/model.safetensors", "<html>"),
         words=["model.safetensors is not a readable"]),
    case("shards without names", spoil=missing_shard_names, words=["index.json cannot be read", "NoneType"]),
    case("model config in lists without end", spoil=text("model/config.json", "[" * 100_000),
         words=["config.json cannot be read", "recursion"]),
    case("shard missing", spoil=missing_shard, words=["model-00001-of-00002.safetensors", "No such file"]),
    case("weights as pickle", spoil=pickled_weights, words=["pytorch_model.bin", "can run code", "save_pretrained"]),
    case("critic without weights", "algorithm.adv_estimator=gae", "critic.model.path=./empty",
         spoil=lambda folder: (folder / "empty").mkdir(), words=["critic.model.path: no config.json in"]),
    case("no tokenizer", M + "tokenizer_path=./empty", spoil=lambda folder: (folder / "empty").mkdir(),
         words=["no tokenizer in", "tokenizer.json", "tokenizer_path"]),
    case("template that is a missing file", M + "custom_chat_template=chat.jinja",
         words=["custom_chat_template=", "chat.jinja", "neither a file"]),
    # the user's code
    case("reward file missing", MY_REWARD, words=[REWARD + "path: no such file", "reward.py"]),
    case("reward with a syntax error", MY_REWARD, spoil=text("reward.py", "def compute_score(:\n"),
         words=["reward.py is not valid Python", "line 1"]),
    case("reward under another name", MY_REWARD, spoil=text("reward.py", "def score(): ...\n"),
         words=[REWARD + "name=compute_score", "defines score, but no compute_score"]),
    case("loss file missing", A + "policy_loss.loss_mode=loss.py:mine", words=["loss_mode: no such file", "loss.py"]),
    case("data set class half set", "data.custom_cls.path=data.py",
         words=["data.custom_cls.path", "data.custom_cls.name"]),
    # folders, trackers, machines
    case("run folder is a file", "trainer.run_dir=train.jsonl", words=["trainer.run_dir=", "train.jsonl"]),
    case("run folder below a file", "trainer.run_dir=train.jsonl/run", words=["trainer.run_dir=", "train.jsonl/run"]),
    case("run folder nobody can write", "trainer.run_dir=/proc/run", words=["trainer.run_dir=/proc/run"]),
    case("sample folder is a file", "trainer.rollout_data_dir=train.jsonl/samples",
         words=["trainer.rollout_data_dir=", "is a file", "another folder"]),
    case("checkpoints below a file", "trainer.save_freq=1", "trainer.default_local_dir=train.jsonl/here",
         words=["trainer.default_local_dir=", "train.jsonl is a file", "another folder"]),
    case("checkpoints where a link leads nowhere", "trainer.save_freq=1", "trainer.default_local_dir=link/here",
         words=["trainer.default_local_dir=", "link leads nowhere", "another folder"],
         spoil=lambda folder: (folder / "link").symlink_to("nowhere")),
    case("checkpoints at a URL", "trainer.save_freq=1", "trainer.default_local_dir=s3://bucket/run",
         words=["trainer.default_local_dir=s3://bucket/run is a URL", "mounted here"]),
    case("tracker unknown", "trainer.logger=[consol]", words=["trainer.logger=", "did you mean console?"]),
    case("tracker not installed", "trainer.logger=[swanlab]", words=["'swanlab'", "pip install swanlab"]),
    case("GPUs that are not there", "trainer.device=cuda", "trainer.n_gpus_per_node=8",
         words=["trainer.device=cuda", "n_gpus_per_node=8", "has 0 GPUs", "trainer.device=cpu"]),
    case("more ranks than the machine bears", "trainer.n_gpus_per_node=4000",
         "data.train_batch_size=4000", A + "ppo_mini_batch_size=4000",
         words=["4000 ranks", "type trainer.nnodes=1 trainer.n_gpus_per_node="]),
    case("cluster that is not there", "ray_kwargs.ray_init.address=127.0.0.1:1",
         words=["ray_kwargs.ray_init.address=127.0.0.1:1: nothing answers there", "is the cluster up"]),
    case("cluster of the environment not there",
         words=["RAY_ADDRESS=127.0.0.1:1: nothing answers"], RAY_ADDRESS="127.0.0.1:1"),
    case("cluster without a port", "ray_kwargs.ray_init.address=head",
         words=["ray_init.address=head: write host:port"]),
    case("prepared model not there", M + "path=${verl_lite_home:}/quickstart/model",
         words=["no such folder: /nowhere/quickstart/model", "scripts/quickstart.sh"], VERL_LITE_HOME="/nowhere"),
]

LATE = [
    case("architecture unknown", spoil=edit("model/config.json", model_type="nonsuch"), words=[M + "path", "nonsuch"]),
    case("model that brings code", spoil=needs_remote_code, words=[M + "path", M + "trust_remote_code=True"]),
    case("no language model", spoil=edit("model/config.json", model_type="vit"), words=[M + "path", "vit"]),
    case("override of a field that is none", M + "override_config.nonsuch=1", words=["override_config", "nonsuch"]),
    case("weights of another shape", spoil=edit("model/config.json", intermediate_size=96),
         words=[M + "path", "shape", "config.json"]),
    case("weights that lack a layer", spoil=edit("model/config.json", num_hidden_layers=2, layer_types=None),
         words=[M + "path", "are not in its files", "layers.1"]),
    case("fewer embeddings than tokens", M + "tokenizer_path=./large", spoil=lambda folder: large_tokenizer(folder),
         words=[M + "path", "vocab_size=75", "not this model's"]),
    case("too few positions", "data.max_prompt_length=200", words=["max_position_embeddings=128", "204"]),
    case("tokenizer broken", spoil=text("model/tokenizer.json", "{}"),
         words=["cannot load a tokenizer", M + "tokenizer_path"]),
    case("tokenizer without a vocabulary", spoil=without_file("model/tokenizer.json"),
         words=["no vocabulary", M + "tokenizer_path", "is its tokenizer.json missing?"]),
    case("template of bytes that are no text", M + "custom_chat_template=model/model.safetensors",
         words=["custom_chat_template=model/model.safetensors cannot be read"]),
    case("generation config cut off", spoil=cut("model/generation_config.json", 0.5),
         words=["generation_config.json cannot be used"]),
    case("generation config a list", spoil=text("model/generation_config.json", "[]"),
         words=["generation_config.json cannot be used"]),
    case("end token a word", spoil=edit("model/generation_config.json", eos_token_id="<eos>"),
         words=["generation_config.json cannot be used", "eos_token_id=<eos>"]),
    case("tokenizer without a template", spoil=without_template,
         words=["no chat template", M + "custom_chat_template"]),
    case("end token that the model does not know", spoil=edit("model/tokenizer_config.json", eos_token="<end>"),
         words=[M + "path", "vocab_size=75", "end token", "not this model's"]),
    case("template with an error", M + "custom_chat_template='{{ messages[ }}'",
         words=["cannot tokenize row 0", "template"]),
    case("prompts too long", "data.max_prompt_length=3", words=["data.max_prompt_length=3", "filter_overlong_prompts"]),
    case("all prompts filtered out", "data.max_prompt_length=3", "data.filter_overlong_prompts=True",
         words=["0 of 4 prompts left", "data.max_prompt_length=3", "6"]),
    case("more rows than can be listed", "data.train_batch_size=1000000000000", A + "ppo_mini_batch_size=1000000000000",
         words=["data.train_batch_size=1000000000000", "4 prompts", "at most 4"]),
    case("fewer rows than a batch", "data.train_batch_size=6",
         words=["data.train_batch_size=6", "4 prompts", "at most 4"]),
    case("null far down in the file", spoil=lambda folder: write_jsonl(
        [*addition_rows(20), {**addition_rows(1)[0], "reward_model": None}], folder / "train.jsonl"),
         words=["train.jsonl, row 20", "'reward_model'", "null"]),
    case("source nobody can score", spoil=rows(data_source="my/task"),
         words=["'my/task'", "reward.custom_reward_function.path"]),
    case("reward of another signature", MY_REWARD, spoil=reward_code("return 0.0", "answer"),
         words=["compute_score", "reward.py", "cannot be called with data_source"]),
    case("reward that fails to load", MY_REWARD,
         spoil=text("reward.py", "import nonsuch\ndef compute_score(**k): ...\n"),
         words=["reward.py, line 1", "nonsuch"]),
    case("reward that leaves while it loads", MY_REWARD,
         spoil=text("reward.py", "import sys\nsys.exit('bye')\ndef compute_score(**k): ...\n"),
         words=["reward.py, line 2", "SystemExit: bye"]),
    case("reward that never loads", MY_REWARD, "trainer.start_timeout_s=1",
         spoil=text("reward.py", "import time\ntime.sleep(600)\ndef compute_score(**k): ...\n"),
         words=["reward.py", "took over 1 s", "trainer.start_timeout_s"]),
    case("reward that ends its process", MY_REWARD,
         spoil=text("reward.py", "import os\nos._exit(3)\ndef compute_score(**k): ...\n"),
         words=["reward.py", "exited with code 3"]),
    case("reward option unknown", MY_REWARD, REWARD + "reward_kwargs.factr=2", spoil=reward_code("return 0.0"),
         words=["reward_kwargs ['factr']"]),
    case("manager option unknown", "reward.reward_manager.name=dapo",
         "reward.reward_kwargs.overlong_buffer_cfg={lenn:2}", words=["overlong_buffer_cfg", "lenn", "len"]),
    case("data set class of another kind", "data.custom_cls.path=data.py", "data.custom_cls.name=Mine",
         spoil=text("data.py", "class Mine: pass\n"), words=["data.custom_cls.name=Mine", "PromptDataset"]),
    case("loss with an error", A + "policy_loss.loss_mode=loss.py:mine",
         spoil=text("loss.py", "1 / 0\ndef mine(): ...\n"),
         words=["loss_mode", "loss.py, line 1", "ZeroDivisionError"]),
    case("reward model that judges nothing", "reward.reward_model.enable=True",
         "reward.reward_model.model.path=./judge",
         "reward.reward_model.micro_batch_size_per_gpu=2", words=["reward.reward_model.enable=True", 'style "model"']),
    case("reward model that writes", "reward.reward_model.enable=True", "reward.reward_model.model.path=./model",
         "reward.reward_model.micro_batch_size_per_gpu=2", spoil=rows(reward_model={"style": "model"}),
         words=["reward.reward_model.model.path", "num_labels=1"]),
    case("hub out of reach", M + "path=owner/nonsuch", words=["owner/nonsuch", M]),
]

AT_WORK = [
    case("reward returns text", MY_REWARD, spoil=reward_code("return 'good'"),
         words=["returned str 'good'", "a number"]),
    case("reward returns NaN", MY_REWARD, spoil=reward_code("return float('nan')"), words=["returned nan", "None"]),
    case("reward returns a dict without a score", MY_REWARD, spoil=reward_code("return {'acc': 1}"),
         words=["dict without 'score'", "acc"]),
    case("reward raises", MY_REWARD, spoil=reward_code("raise KeyError('nonsuch')"),
         words=["KeyError: 'nonsuch'", "reward.py"]),
    case("reward never returns", MY_REWARD, "reward.timeout_s=0.3", spoil=reward_code("time.sleep(600)"),
         words=["no score after 0.3 s (reward.timeout_s)"]),
]
# fmt: on


def large_tokenizer(folder: Path) -> None:
    """A tokenizer whose digits have ids that the model has no embeddings for."""
    shutil.copytree(folder / "model", folder / "large")
    content = json.loads((folder / "large" / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = {token: i + 100 * token.isdigit() for token, i in vocab.items()}
    (folder / "large" / "tokenizer.json").write_text(json.dumps(content))


# --- running one ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    tiny_model(folder / "model", layers=1)
    tiny_reward_model(folder / "judge", layers=1)
    write_jsonl(addition_rows(4), folder / "train.jsonl")
    return folder


@dataclass
class Bench:
    """A folder a run is started in, and what it has started."""

    folder: Path
    patch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]
    ray_started: bool = False
    reached_workers: bool = False

    def run(self, case: Case) -> tuple[int, str]:
        """(exit code, message) of the case; fails if anything is left behind."""
        case.spoil(self.folder)
        for name, value in case.environment:
            self.patch.setenv(name, value)
        before = self.left()
        code = main_ppo.main([*BASE, *case.overrides])
        message = self.capsys.readouterr().err
        if code == main_ppo.REFUSED:
            assert self.left() == before, "something was left behind"
        return code, message

    def left(self) -> set[str]:
        files = {str(path.relative_to(self.folder)) for path in self.folder.rglob("*")}
        return files | {str(child.pid) for child in psutil.Process().children(recursive=True)}


@pytest.fixture
def bench(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Bench]:
    folder = tmp_path / "w"
    shutil.copytree(template, folder)
    (folder / "tmp").mkdir()
    bench = Bench(folder, monkeypatch, capsys)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def start_ray(**options: Any) -> Any:
        bench.ray_started = True
        return types.SimpleNamespace(wait=lambda: None, close=lambda: None)

    def reach_workers(**options: Any) -> Any:
        bench.reached_workers = True
        return types.SimpleNamespace(slots=[types.SimpleNamespace(node_address="127.0.0.1")], device="cpu")

    monkeypatch.setattr(cluster, "RayCluster", start_ray)
    monkeypatch.setattr(cluster, "Watchdog", lambda log_dir: types.SimpleNamespace(ray_dir="", finish=lambda: None))
    monkeypatch.setattr(placement, "ResourcePool", reach_workers)
    monkeypatch.setattr(main_ppo, "_log_to", lambda *args: sys.stderr)
    yield bench


def ids(cases: list[Case]) -> dict[str, Any]:
    return {"argvalues": cases, "ids": [case.name for case in cases]}


@pytest.mark.parametrize("case", **ids(EARLY))
def test_it_is_refused_before_anything_starts(case: Case, bench: Bench) -> None:
    code, message = bench.run(case)
    check(code, message, case)
    assert not bench.ray_started


@pytest.mark.parametrize("case", **ids(LATE))
def test_it_is_refused_while_ray_starts(case: Case, bench: Bench) -> None:
    code, message = bench.run(case)
    check(code, message, case)
    assert not bench.reached_workers


def test_a_folder_closed_to_this_user_is_named(bench: Bench) -> None:
    """Who runs as root may read everything: the system's answer is made up."""
    stat = os.stat

    def closed(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).endswith("/closed/train.jsonl"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, *args, **options)

    bench.patch.setattr(os, "stat", closed)
    words = ["data.train_files=", "closed/train.jsonl: Permission denied"]
    refused = case("a folder closed to this user", TRAIN + "closed/train.jsonl", words=words)
    check(*bench.run(refused), refused)
    assert not bench.ray_started


def test_no_room_for_the_weights_is_refused_while_ray_starts(bench: Bench) -> None:
    full = shutil.disk_usage(bench.folder)._replace(free=1000)
    bench.patch.setattr(weight_transfer.shutil, "disk_usage", lambda place: full)
    room = case("no room for the weights", words=["no room for", "MiB of weights", "set TMPDIR"])
    check(*bench.run(room), room)
    assert not bench.reached_workers


@pytest.mark.parametrize("run_dir", ["run", "../other/new/run"])
def test_a_refusal_leaves_the_folders_that_were_there_and_no_other(bench: Bench, run_dir: str) -> None:
    """Started in an empty folder: nothing but the run folder would have kept it."""
    start = bench.folder / "empty" / "start"
    (bench.folder / "empty" / "other").mkdir(parents=True)
    start.mkdir()
    bench.patch.chdir(start)
    elsewhere = (TRAIN + f"{bench.folder}/train.jsonl", M + f"path={bench.folder}/model", f"trainer.run_dir={run_dir}")
    code, message = bench.run(case("prompts too long", *elsewhere, "data.max_prompt_length=3", words=[]))
    assert code == main_ppo.REFUSED and "data.max_prompt_length=3" in message


def test_a_run_folder_that_is_made_in_part_is_removed_again(bench: Bench) -> None:
    assert bench.run(case("a name too long", f"trainer.run_dir=new/{'x' * 300}", words=[]))[0] == main_ppo.REFUSED


@pytest.mark.parametrize("home", ["train.jsonl", "/proc/home"])
def test_a_home_that_cannot_be_written_to_is_refused_by_the_preparation(bench: Bench, home: str) -> None:
    bench.patch.setenv("VERL_LITE_HOME", home)
    bench.patch.setattr(sys, "argv", ["prepare_quickstart.py"])
    with pytest.raises(SystemExit, match=f"^{main_ppo.REFUSED}$"):
        prepare_quickstart.main()
    message = bench.capsys.readouterr().err
    assert message.startswith("VERL_LITE_HOME=/") and f"{home} cannot be written to (" in message
    assert "set it to a folder that can" in message


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    init_process_group(RankContext(0, 1), "127.0.0.1", free_port(), 60)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("case", **ids(AT_WORK))
def test_it_ends_the_run_at_the_first_response(case: Case, bench: Bench, process_group: None) -> None:
    def spawn(pool: Any, roles: Any, **options: Any) -> dict[str, Any]:
        made = {role: spec.cls(RankContext(0, 1), **spec.kwargs) for role, spec in roles.items()}
        return {role: InProcess(role, [worker], []) for role, worker in made.items()}

    def spawn_rollout(pool: Any, spec: Any, **options: Any) -> InProcess:
        return InProcess("rollout", [spec.cls(RankContext(0, 1), **spec.kwargs)], [])

    bench.patch.setattr(setup, "spawn", spawn)
    bench.patch.setattr(setup, "spawn_rollout", spawn_rollout)
    before = psutil.Process().children()  # another test's Ray may be up
    code, message = bench.run(case)
    assert code == main_ppo.FAILED, message
    assert all(word in message for word in case.words), message
    assert f"logs: {bench.folder}/run/logs" in message
    assert [child for child in psutil.Process().children() if child not in before] == []


def check(code: int, message: str, case: Case) -> None:
    assert code == main_ppo.REFUSED, message
    refusal = message[message.index("refused: ") :]
    missing = [word for word in case.words if word not in refusal]
    assert not missing, f"{missing} not in {refusal}"
    assert "problems with" not in refusal and "Traceback" not in refusal and len(refusal) < 900, refusal
    assert "\x1b" not in refusal
