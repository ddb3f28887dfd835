"""Make the quickstart's model and data: two-digit addition, learnt about half by supervised steps.

Writes `$VERL_LITE_HOME/quickstart/{model,train.parquet,val.parquet,prepared.json}` (VERL_LITE_HOME defaults to
`verl_lite` under the user's cache folder). The Qwen2 of 0.9M parameters is trained on the training problems until its
greedy accuracy on the validation problems lies between 0.48 and 0.55: low enough that GRPO has something to teach, high
enough that most groups hold both right and wrong answers. A second call finds everything in place and returns.

With --critic also `critic/`, which quickstart_ppo.yaml starts its critic from: the same model taught for a minute, on
the training problems, to tell right answers from wrong ones.

    python scripts/prepare_quickstart.py [--critic] [--force] [--seed N]
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RECIPE_VERSION = 1  # counts up when what this script writes changes, so that an older preparation is made anew
CHARACTERS = "0123456789+-*/=?.,:# abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
DATA_SOURCE = "verl_lite/addition"
NUM_VALIDATION = 512
TARGET_ACCURACY = (0.48, 0.55)
BATCH_SIZE = 32  # small on purpose: steps with noise leave weights that reinforcement can still move
TIME_LIMIT_S = 600.0
CRITIC_STEPS = 1000  # after 500 it does not see a wrong carry yet


def home() -> Path:
    """The folder that holds prepared models and data."""
    configured = os.environ.get("VERL_LITE_HOME")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(configured).expanduser().resolve() if configured else cache / "verl_lite"


def save_character_tokenizer(
    path: Path | str, *, chat_template: str | None = CHAT_TEMPLATE, pad_token: str | None = "<pad>"
) -> None:
    """Save a tokenizer with one id per character: <pad>=0, <eos>=1, then CHARACTERS from 2 on.

    A byte-level BPE without merges: AutoTokenizer gives every qwen2 folder a byte-level pre-tokenizer of its own,
    whatever tokenizer.json says, and a word-level one would then lose its spaces.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *CHARACTERS.replace(" ", "Ġ")])}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad_token, eos_token="<eos>", clean_up_tokenization_spaces=False
    )
    fast.chat_template = chat_template
    fast.save_pretrained(str(path))


def addition_row(a: int, b: int, index: int, split: str) -> dict[str, Any]:
    """One problem in verl's columns: prompt "12+34=", ground truth "46"."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{a}+{b}="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": split, "index": index},
    }


def split_problems(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All 8,100 sums of two two-digit numbers, shuffled: (training, validation), without a common problem."""
    problems = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(problems)
    return problems[NUM_VALIDATION:], problems[:NUM_VALIDATION]


def encode(problems: list[tuple[int, int]]) -> Any:
    """Token ids [rows, 10]: "ab+cd=" (6 tokens), the sum (2 or 3), <eos>, padded with <pad>."""
    import torch

    ids = {character: i + 2 for i, character in enumerate(CHARACTERS)}
    rows = [[*(ids[c] for c in f"{a}+{b}={a + b}"), 1] for a, b in problems]
    return torch.tensor([row + [0] * (10 - len(row)) for row in rows])


def greedy_accuracy(model: Any, tokens: Any) -> float:
    """Share of problems whose whole answer, <eos> included, is the most likely token at every place.

    Equal to greedy decoding, in one pass: a decode leaves the right answer at its first wrong token.
    """
    import torch

    with torch.no_grad():
        predicted = model(input_ids=tokens).logits[:, 5:-1].argmax(-1)
    answer = tokens[:, 6:]
    return float(((predicted == answer) | (answer == 0)).all(-1).float().mean())


def warm_start(model: Any, train: Any, validation: Any, seed: int) -> float:
    """Supervised steps until the validation accuracy lies in TARGET_ACCURACY; returns it.

    A check that finds the accuracy above the range goes back to the last check's weights with half the rate.
    """
    import torch
    from torch.nn.functional import cross_entropy

    generator = torch.Generator().manual_seed(seed)
    learning_rate, check_every = 2e-3, 20
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    last = ({k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict())
    started, step, accuracy = time.monotonic(), 0, 0.0
    while time.monotonic() - started < TIME_LIMIT_S:
        step += 1
        rows = train[torch.randint(len(train), (BATCH_SIZE,), generator=generator)]
        target = rows[:, 6:].masked_fill(rows[:, 6:] == 0, -100)
        logits = model(input_ids=rows[:, :-1]).logits[:, 5:]
        loss = cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, step / 50)
        optimizer.step()
        if step % check_every:
            continue
        accuracy = greedy_accuracy(model, validation)
        print(f"  step {step:4d}  loss {loss.item():.3f}  validation accuracy {accuracy:.3f}", flush=True)
        if TARGET_ACCURACY[0] <= accuracy <= TARGET_ACCURACY[1]:
            return accuracy
        if accuracy > TARGET_ACCURACY[1]:
            model.load_state_dict(last[0])
            optimizer.load_state_dict(last[1])
            learning_rate, check_every = learning_rate / 2, max(1, check_every // 2)
        else:
            check_every = 5 if accuracy > 0.25 else check_every
            last = ({k: v.clone() for k, v in model.state_dict().items()}, copy.deepcopy(optimizer.state_dict()))
    raise SystemExit(
        f"error: after {TIME_LIMIT_S:.0f} s the validation accuracy is {accuracy:.2f}, not within {TARGET_ACCURACY}; "
        "run again with another --seed"
    )


def spoil(rows: Any, generator: Any) -> Any:
    """Problems with their answers [B, 10] → the same with some digits of the answers replaced, half of them by a
    neighbour (a carry forgotten is the policy's usual mistake); of a row's digits a tenth, a third or nearly all."""
    import torch

    answers = rows[:, 6:]
    random_digits = torch.randint(10, answers.shape, generator=generator)
    steps = torch.randint(2, answers.shape, generator=generator) * 2 - 1
    neighbours = (answers - 2 + steps) % 10
    digits = torch.where(torch.rand(answers.shape, generator=generator) < 0.5, random_digits, neighbours)
    share = torch.tensor([0.1, 0.3, 0.9])[torch.randint(3, (len(rows), 1), generator=generator)]
    chosen = (torch.rand(answers.shape, generator=generator) < share) & (answers >= 2)
    return torch.cat([rows[:, :6], torch.where(chosen, digits + 2, answers)], 1)


def teach_verifier(model: Any, train: Any, validation: Any, seed: int) -> float:
    """Teach a transformer without a head to judge answers; returns the share of validation tokens judged rightly.

    At each token of an answer it learns whether the answer is right so far, and which token would have been right:
    without the second, which teaches it to work out the sum where the answer stands, the first takes far longer.
    """
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    judge, solver = torch.nn.Linear(128, 1), torch.nn.Linear(128, 12)  # thrown away: the critic's head starts at 0
    parameters = [*model.parameters(), *judge.parameters(), *solver.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0)

    def judged(rows: Any) -> tuple[Any, Any, Any, Any]:
        read = spoil(rows, generator)
        hidden = model(input_ids=read).last_hidden_state[:, 6:]
        right_so_far = (read == rows)[:, 6:].int().cummin(1).values.float()
        return hidden, judge(hidden)[..., 0], right_so_far, rows[:, 6:] != 0

    for step in range(1, CRITIC_STEPS + 1):
        rows = train[torch.randint(len(train), (64,), generator=generator)]
        hidden, logits, labels, real = judged(rows)
        loss = binary_cross_entropy_with_logits(logits[real], labels[real])
        loss = loss + cross_entropy(solver(hidden[real]), rows[:, 6:][real])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, step / 50, max(0.1, 2 - 2 * step / CRITIC_STEPS))
        optimizer.step()
        if step % 200 == 0:
            print(f"  step {step:4d}  loss {loss.item():.3f}", flush=True)
    with torch.no_grad():
        _, logits, labels, real = judged(validation)
    return float(((logits > 0) == labels.bool())[real].float().mean())


def prepare_critic(folder: Path, seed: int) -> None:
    """Write `critic` under the prepared `folder`, from its model; nothing if it is there."""
    from transformers import AutoModel

    if (folder / "critic").exists():
        print(f"quickstart critic: already there ({folder / 'critic'})")
        return
    print("quickstart critic: teaching a copy of the model to judge answers (about a minute)", flush=True)
    started, model = time.monotonic(), AutoModel.from_pretrained(folder / "model")
    train, validation = split_problems(seed)
    share = teach_verifier(model, encode(train), encode(validation), seed)
    beside = Path(tempfile.mkdtemp(prefix="critic-", dir=folder))
    try:
        model.save_pretrained(str(beside))
        beside.rename(folder / "critic")
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    seconds = time.monotonic() - started
    print(f"quickstart critic: judges {share:.3f} of the validation problems' tokens rightly, {seconds:.1f} s")


def prepare(folder: Path, seed: int) -> dict[str, Any]:
    """Write model, data and `prepared.json` under `folder`, which must not exist; returns what prepared.json holds."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    started = time.monotonic()
    train, validation = split_problems(seed)
    for split, problems in (("train", train), ("val", validation)):
        rows = [addition_row(a, b, i, split) for i, (a, b) in enumerate(problems)]
        pq.write_table(pa.Table.from_pylist(rows), str(folder / f"{split}.parquet"))

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(CHARACTERS) + 2,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype="float32",
        initializer_range=0.06,  # at the usual 0.02 so small a model learns three times as slowly
    )
    model = Qwen2ForCausalLM(config).to(torch.float32)
    accuracy = warm_start(model, encode(train), encode(validation), seed)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 1, 0
    model.save_pretrained(str(folder / "model"))
    save_character_tokenizer(folder / "model")
    facts = {
        "recipe_version": RECIPE_VERSION,
        "seed": seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "validation_accuracy": accuracy,
        "train_rows": len(train),
        "val_rows": len(validation),
        "seconds": round(time.monotonic() - started, 1),
    }
    (folder / "prepared.json").write_text(json.dumps(facts, indent=2) + "\n")
    return facts


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the quickstart's model and data.")
    parser.add_argument("--critic", action="store_true", help="also make what quickstart_ppo starts its critic from")
    parser.add_argument("--force", action="store_true", help="make them again even when they are there")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split, the model and its warm start")
    arguments = parser.parse_args()

    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # actively waiting threads crawl on a busy machine
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    folder = home() / "quickstart"
    stamp = folder / "prepared.json"
    facts = json.loads(stamp.read_text()) if stamp.exists() and not arguments.force else {}
    if (facts.get("recipe_version"), facts.get("seed")) == (RECIPE_VERSION, arguments.seed):
        print(f"quickstart model and data: already there ({folder}, accuracy {facts['validation_accuracy']:.3f})")
    else:
        make(folder, arguments.seed)
    if arguments.critic:
        prepare_critic(folder, arguments.seed)
    return 0


def make(folder: Path, seed: int) -> None:
    """Put a new preparation in the folder's place."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix="quickstart-", dir=folder.parent))  # renamed when whole, never half there
    except OSError as error:
        print(f"VERL_LITE_HOME={home()} cannot be written to ({error}); set it to a folder that can", file=sys.stderr)
        raise SystemExit(2) from error
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    print(f"quickstart model and data: making them under {folder} (about a minute)", flush=True)
    try:
        facts = prepare(beside, seed)
        if folder.exists():
            shutil.rmtree(folder)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    print(
        f"quickstart model and data: {facts['parameters']:,} parameters, validation accuracy "
        f"{facts['validation_accuracy']:.3f}, {facts['train_rows']} training and {facts['val_rows']} validation "
        f"problems, {facts['seconds']} s"
    )


if __name__ == "__main__":
    sys.exit(main())
