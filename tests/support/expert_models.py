"""Mixtures of experts as tasks: of transformers, from its config classes, and of a user's own modules."""

from __future__ import annotations

from typing import Any, Final, Literal

import torch
import transformers
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar

WORDS, LENGTH, WIDTH, EXPERTS = 61, 12, 32, 8

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SIZES: Final[dict[str, dict[str, Any]]] = {
    "Mixtral": {"intermediate_size": 48, "num_local_experts": EXPERTS},
    "Qwen3Moe": {"intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": EXPERTS, "head_dim": 8},
    "Olmoe": {"intermediate_size": 24, "num_experts": EXPERTS},
    "GptOss": {"intermediate_size": 24, "num_local_experts": EXPERTS, "head_dim": 8},
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "n_routed_experts": EXPERTS,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}
_WITH_AUXILIARY_LOSS = ("Mixtral", "Qwen3Moe", "Olmoe", "GptOss")


class _Words(unipar.Task):
    """Next-word prediction on random words."""

    @override
    def data(self) -> Any:
        return TensorDataset(torch.randint(3, WORDS, (64, LENGTH), generator=Generator().manual_seed(1)))

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        (words,) = batch
        return model(input_ids=words, labels=words).loss


class OfTransformers(_Words):
    """A mixture of transformers; routers have weights that choose clearly, so that rounding moves few tokens."""

    def __init__(
        self,
        name: str = "Mixtral",
        kernel: str = "eager",
        auxiliary: bool = True,
        attention: str | None = None,
        **sizes: Any,
    ) -> None:
        self.name, self.kernel, self.auxiliary, self.sizes = name, kernel, auxiliary, sizes
        self.attention = attention

    @override
    def model(self) -> nn.Module:
        sizes = _COMMON | _SIZES[self.name] | self.sizes
        if self.auxiliary and self.name in _WITH_AUXILIARY_LOSS:
            sizes |= {"output_router_logits": True, "router_aux_loss_coef": 0.1}
        config: Any = getattr(transformers, f"{self.name}Config")(**sizes)
        config._experts_implementation = self.kernel
        make: Any = getattr(transformers, f"{self.name}ForCausalLM")
        model: Any = make._from_config(config, experts_implementation=self.kernel, attn_implementation=self.attention)
        for p in model.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.15)
        return model


class StackedExperts(nn.Module):
    """Experts whose parameters are stacked, in a loop."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 24) * 0.2)
        self.down = nn.Parameter(torch.randn(experts, 24, WIDTH) * 0.2)

    @override
    def forward(self, rows: Tensor, which: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for expert in range(len(self.up)):
            row, slot = (which == expert).nonzero(as_tuple=True)
            if len(row):
                made = F.gelu(rows[row] @ self.up[expert]) @ self.down[expert]
                out = out.index_add(0, row, (made * weights[row, slot, None]).to(out.dtype))
        return out


def _feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))


class Mixture(nn.Module):
    """Router over stacked experts or a list of them, with an expert that all tokens share; some are never chosen."""

    def __init__(self, kind: str, experts: int, rare: float = 0.0) -> None:
        super().__init__()
        self.router, self.shared = nn.Linear(WIDTH, experts), _feed_forward()
        self.experts: Any = (
            StackedExperts(experts) if kind == "stacked" else nn.ModuleList(_feed_forward() for _ in range(experts))
        )
        with torch.no_grad():
            self.router.bias[-2:] = -100.0
            self.router.bias[0] += rare

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, 1)
        weights, which = self.router(rows).softmax(-1).topk(2, -1)
        if isinstance(self.experts, StackedExperts):
            out = self.experts(rows, which, weights)
        else:
            out = torch.zeros_like(rows)
            for number, expert in enumerate(self.experts):
                row, slot = (which == number).nonzero(as_tuple=True)
                if len(row):
                    made = expert(rows[row]) * weights[row, slot, None]
                    out = out.index_add(0, row, made.to(out.dtype))
        return (out + self.shared(rows)).view_as(hidden)


class Layer(nn.Module):
    """Residual layer of a running mean and a mixture."""

    def __init__(self, kind: str, experts: int, rare: float = 0.0) -> None:
        super().__init__()
        self.first, self.second, self.mix = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixture = Mixture(kind, experts, rare)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.first(x)).cumsum(1) / LENGTH
        return x + self.mixture(self.second(x))


class Net(nn.Module):
    """Layers between an embedding and a head."""

    def __init__(self, kind: str, experts: int, rare: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Layer(kind, experts, rare) for _ in range(2))

    @override
    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class OfUser(_Words):
    """A user's mixture: stacked experts, or a list of modules."""

    def __init__(self, kind: Literal["stacked", "list"] = "stacked", experts: int = EXPERTS, rare: float = 0.0) -> None:
        """`rare`: what the router adds to the score of the first expert, so that few tokens choose it."""
        self.kind, self.number, self.rare = kind, experts, rare

    @override
    def model(self) -> nn.Module:
        return Net(self.kind, self.number, self.rare)

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        (words,) = batch
        return F.cross_entropy(model(words)[:, :-1].flatten(0, 1), words[:, 1:].flatten())


class TiedRouter(nn.Linear):
    """Router whose first two scores are the same sum in other orders, so that rounding decides which is larger."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        scores = super().forward(input)
        tied = [(input.flip(-1) * self.weight[0].flip(0)).sum(-1), (input * self.weight[0]).cumsum(-1)[..., -1]]
        bias = torch.tensor([0.5, 0.5, 1.5, *[0.0] * (scores.shape[-1] - 5), -1.0, -1.0])
        return torch.cat([torch.stack(tied, -1), scores[..., 2:]], -1) + bias.to(scores.dtype)


class Tied(OfUser):
    """A user's mixture of stacked experts, in which rounding decides for many tokens which expert they go to."""

    @override
    def model(self) -> nn.Module:
        net: Any = super().model()
        for layer in net.layers:
            layer.mixture.router = TiedRouter(WIDTH, self.number)
        return net
