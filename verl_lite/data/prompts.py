"""From chat messages to token ids: the tokenizer, the chat template, and encoding in several processes."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from verl_lite.config import num_cores
from verl_lite.data.files import Messages

logger = logging.getLogger(__name__)

# A process that encodes needs several seconds to import its libraries: not worth it for fewer prompts than this.
MIN_PROMPTS_PER_PROCESS = 5_000
# Far above what any data set needs; a process that takes longer is stuck.
ENCODING_TIMEOUT_S = 6 * 3600


def load_tokenizer(
    path: str,
    *,
    trust_remote_code: bool = False,
    custom_chat_template: str | None = None,
    key: str = "actor_rollout_ref.model.tokenizer_path",
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub id, with a pad token and a chat template for certain.

    Without a pad token the end token stands in: nothing here finds padding by its id. `custom_chat_template` is a Jinja
    template or the path of a file that holds one; `key` is named in errors.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # a broken tokenizer.json raises anything
        reason = f"{error}" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"cannot load a tokenizer from {path} ({key}): {reason}") from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.get_added_vocab()):  # made up where the file is not there
        raise ValueError(f"the tokenizer of {path} ({key}) has no vocabulary; is its tokenizer.json missing?")
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {path} has neither a pad token nor an end token; set one in its files")
        tokenizer.pad_token = tokenizer.eos_token
        logger.warning("the tokenizer of %s has no pad token; its end token %r is used", path, tokenizer.eos_token)
    if custom_chat_template is not None:
        is_file = os.path.isfile(custom_chat_template)  # Path.is_file would raise for a template of 256 characters
        try:
            template = Path(custom_chat_template).read_text(encoding="utf-8") if is_file else custom_chat_template
        except (OSError, UnicodeDecodeError) as error:
            name = "actor_rollout_ref.model.custom_chat_template"
            raise ValueError(f"{name}={custom_chat_template} cannot be read: {error}") from error
        tokenizer.chat_template = template
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer of {path} has no chat template; set actor_rollout_ref.model.custom_chat_template to a "
            "Jinja template, e.g. \"{% for m in messages %}{{ m['content'] }}{% endfor %}\" for a base model"
        )
    return tokenizer


class EncodingError(ValueError):
    """The chat template or the tokenizer failed on one prompt."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(index, message)
        self.index, self.message = index, message


@dataclass(frozen=True)
class TokenTable:
    """Ragged rows of token ids in two flat arrays (a list per row would take eight times the memory)."""

    ids: np.ndarray  # int32, all rows one after the other
    ends: np.ndarray  # int64 [rows], where each row ends in `ids`

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> np.ndarray:
        return self.ids[self.ends[row - 1] if row else 0 : self.ends[row]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.ends, prepend=0)


def encode_prompts(
    prompts: Sequence[Messages],
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: dict[str, Any],
    *,
    num_workers: int,
) -> TokenTable:
    """Token ids of every prompt under the chat template, generation prompt included. Raises `EncodingError`."""
    # The tokenizer's own threads serve one process well; several pay off where the chat template is what takes time.
    num_processes = max(1, min(num_workers, num_cores(), len(prompts) // MIN_PROMPTS_PER_PROCESS))
    if num_processes == 1:
        return _encode(prompts, tokenizer, template_kwargs)
    cuts = [len(prompts) * i // num_processes for i in range(num_processes + 1)]
    jobs = [(prompts[start:end], tokenizer, template_kwargs) for start, end in zip(cuts, cuts[1:], strict=False)]
    with ThreadPoolExecutor(num_processes) as threads:
        answers = list(threads.map(_encode_in_process, jobs))
    for start, answer in zip(cuts, answers, strict=False):
        if isinstance(answer, EncodingError):
            raise EncodingError(start + answer.index, answer.message)
    offsets = np.cumsum([0] + [len(answer.ids) for answer in answers])
    return TokenTable(
        np.concatenate([answer.ids for answer in answers]),
        np.concatenate([answer.ends + offset for answer, offset in zip(answers, offsets, strict=False)]),
    )


def _encode(
    prompts: Sequence[Messages], tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]
) -> TokenTable:
    kwargs = {"add_generation_prompt": True, **template_kwargs, "tokenize": False}
    ids: list[np.ndarray] = []
    lengths: list[int] = []
    for start in range(0, len(prompts), 1000):
        chunk = list(prompts[start : start + 1000])
        try:
            rows = _encode_chunk(chunk, tokenizer, kwargs)
        except Exception:
            # Once more, one by one, to name the row.
            for i, prompt in enumerate(chunk):
                try:
                    _encode_chunk([prompt], tokenizer, kwargs)
                except Exception as error:
                    raise EncodingError(start + i, f"chat template: {type(error).__name__}: {error}") from error
            raise
        lengths += map(len, rows)
        ids += [np.asarray(row, dtype=np.int32) for row in rows]
    return TokenTable(np.concatenate(ids), np.cumsum(lengths, dtype=np.int64))


def _encode_chunk(
    prompts: list[Messages], tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any]
) -> list[list[int]]:
    texts = tokenizer.apply_chat_template(prompts, **kwargs)
    # The template writes the special tokens itself; a second <bos> would shift every position.
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def _encode_in_process(job: tuple) -> Any:
    # A plain child process, not multiprocessing, which would import the driver's main module again.
    code = f"import sys; sys.path[:] = {sys.path!r}; from verl_lite.data.prompts import encode_job; encode_job()"
    process = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(job), stdout=subprocess.PIPE,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        timeout=ENCODING_TIMEOUT_S, check=False,
    )  # fmt: skip
    if process.returncode != 0:
        raise ValueError(
            f"a process that measures prompts failed (exit code {process.returncode}, its traceback is above); "
            "try data.filter_overlong_prompts_workers=1"
        )
    return pickle.loads(process.stdout)


def encode_job() -> None:
    """What an encoding process does: one pickled job from stdin, one pickled answer to stdout."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a print in a tokenizer's code must not end up in the answer
    job = pickle.load(sys.stdin.buffer)
    try:
        answer: Any = _encode(*job)
    except EncodingError as error:
        answer = error
    with answers:
        pickle.dump(answer, answers, protocol=5)
