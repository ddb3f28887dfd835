"""A dataset of your own: tab-separated "question <tab> answer" lines become prompts.

python -m verl_lite.main_ppo … data.custom_cls.path=examples/custom_dataset.py data.custom_cls.name=TabSeparated \\
    data.train_files=problems.tsv data.val_files=problems_val.tsv

Everything else (chat template, length filter, order) works as for parquet files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_lite.data.dataset import PromptDataset


class TabSeparated(PromptDataset):
    def read_rows(self, path: str) -> Sequence[dict[str, Any]]:
        lines = [line.split("\t") for line in Path(path).read_text().splitlines() if line]
        return [
            {
                "prompt": [{"role": "user", "content": question}],
                "data_source": "verl_lite/addition",
                "reward_model": {"style": "rule", "ground_truth": answer},
            }
            for question, answer in lines
        ]
