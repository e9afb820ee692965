"""A small GPT-2 of transformers that generates with the whole model, for the conformance suite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel
from typing_extensions import override

from tests.conformance import tasks

PROMPTS = ([3, 1, 4], [1, 5, 9, 2], [6, 5], [3, 5, 8, 9, 7])
"""As many as the largest world has ranks: each rank goes on from another number of them."""


class Generating(tasks.Plain):
    """Greedy generation, in the middle and at the end of the training."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[int]] = []
        with torch.random.fork_rng():  # generate imports for seconds at its first call: on all ranks at once, here
            tiny = GPT2Config(vocab_size=8, n_positions=4, n_embd=2, n_layer=1, n_head=1, pad_token_id=0)
            first: Any = GPT2LMHeadModel(tiny).eval()  # transformers' types do not let it generate
            first.generate(torch.ones(1, 1, dtype=torch.int64), max_new_tokens=1)

    @override
    def model(self) -> nn.Module:
        settings = GPT2Config(
            vocab_size=tasks.V, n_positions=32, n_embd=16, n_layer=tasks.BLOCKS[0], n_head=2, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, pad_token_id=0, initializer_range=0.3,
        )  # fmt: skip
        return GPT2LMHeadModel(settings)

    @override
    def loss(self, model: Any, batch: tasks.Batch) -> Tensor:
        logits = tasks.to_float32(model(input_ids=batch.tokens[:, :-1], use_cache=False).logits)
        return F.cross_entropy(logits.transpose(1, 2), batch.tokens[:, 1:])

    def generated(self, model: Any, prompts: int = len(PROMPTS)) -> list[list[int]]:
        """Return what follows each prompt."""
        found: list[list[int]] = []
        for prompt in PROMPTS[:prompts]:
            given = torch.tensor([prompt])
            out = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=8, do_sample=False)
            found.append(out[0].tolist())
        return found

    @override
    def train(self, run: Any) -> None:
        for local_batch in run.batches():
            run.step(local_batch)
            if run.done == 2:
                with run.whole() as model:
                    if run.rank == 0:  # which saves it: save_pretrained, too, reads state_dict
                        assert all(type(t) is Tensor and t.isfinite().all() for t in model.state_dict().values())
                    self.generated(model, run.rank)  # as many as the rank says: none on the first
                    assert not model.training
                    assert not torch.is_grad_enabled()
        with run.whole() as model:
            self.generated(model, run.rank)
            self.found = self.generated(model)
