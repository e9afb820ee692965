"""Language model of transformers on Python's help texts, in packed rows: `unipar run configs/causal_lm.yaml`."""
# pyright: reportImplicitOverride=false

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from pydoc_data.topics import topics  # what help("FORMATTING") and help("if") show
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM

import unipar

HELP = [topics[name] for name in sorted(topics)]
Row = dict[str, Tensor]


class Packed(IterableDataset[Row]):
    """Stream of rows that texts fill one after another; each text sees itself alone."""

    def __init__(self, texts: list[list[int]], context: int, *, shuffle: bool) -> None:
        self.texts, self.context, self.shuffle = texts, context, shuffle

    def __iter__(self) -> Iterator[Row]:
        codes, places, labels = (torch.empty(0, dtype=torch.long) for _ in range(3))
        order = torch.randperm if self.shuffle else torch.arange  # seeded for each epoch, alike on every rank
        for i in order(len(self.texts)).tolist():
            text = torch.tensor(self.texts[i])
            codes, places = torch.cat([codes, text]), torch.cat([places, torch.arange(len(text))])
            labels = torch.cat([labels, torch.tensor([-100]), text[1:]])  # no text predicts the next one's beginning
            while len(codes) >= self.context:
                row = {"input_ids": codes, "position_ids": places, "labels": labels}
                yield {name: column[: self.context] for name, column in row.items()}
                codes, places, labels = (column[self.context :] for column in (codes, places, labels))
                places = places - places[:1]  # the rest of a text that was cut begins at 0 again


class CausalLM(unipar.Task):
    def __init__(self, hidden: int = 64, layers: int = 2, heads: int = 4, context: int = 64, words: int = 1024) -> None:
        self.context, self.words = context, words
        self.sizes: dict[str, Any] = {
            "hidden_size": hidden,
            "intermediate_size": hidden * 8 // 3,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "vocab_size": words,
            "max_position_embeddings": context,
            "use_cache": False,
            "bos_token_id": None,
            "eos_token_id": 0,
        }
        self.file = Path("runs", f"tokenizer-{words}-python-{platform.python_version()}.json")

    def prepare(self) -> None:
        """Train the tokenizer: once on each machine, on which all ranks then read its file."""
        tokenizer: Any = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        start: dict[str, Any] = {"special_tokens": ["<end>"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
        trainer: Any = trainers.BpeTrainer(vocab_size=self.words, show_progress=False, **start)
        tokenizer.train_from_iterator(HELP, trainer)
        self.file.parent.mkdir(exist_ok=True)
        tokenizer.save(str(self.file))

    def documents(self) -> list[str]:
        return HELP

    @cached_property
    def texts(self) -> list[list[int]]:
        tokenizer = Tokenizer.from_file(str(self.file))
        return [[*tokenizer.encode(text).ids, 0] for text in self.documents()]

    def model(self) -> nn.Module:
        return LlamaForCausalLM(LlamaConfig(**self.sizes))

    def data(self) -> Packed:
        return Packed(self.texts[8:], self.context, shuffle=True)

    def validation(self) -> Packed:
        return Packed(self.texts[:8], self.context, shuffle=False)

    def weight(self, batch: Row) -> Tensor:
        return (batch["labels"][:, 1:] != -100).sum()  # the first token of a row is not predicted

    def loss(self, model: nn.Module, batch: Row) -> Tensor:
        return model(**batch).loss


if __name__ == "__main__":
    config = Path(__file__).parents[1] / "configs" / "causal_lm.yaml"
    print(unipar.launch(config, task=CausalLM, overwrite="--overwrite" in sys.argv))
