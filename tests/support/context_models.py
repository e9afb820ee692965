"""Small models whose sequences are cut over ranks, and some that must be refused; each with its loss and its blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from examples.char_gpt import GPT

WORDS, LONGEST = 31, 64


@dataclass(frozen=True)
class Case:
    """A model, the loss of a batch of words, and its blocks."""

    model: Callable[[], nn.Module]
    loss: Callable[[Any, Tensor], Tensor]
    blocks: tuple[str, ...]


def char_gpt(longest: int = LONGEST) -> Case:
    def loss(model: Any, words: Tensor) -> Tensor:
        return F.cross_entropy(model(words).flatten(0, 1), words.roll(-1, 1).flatten())

    return Case(lambda: GPT(WORDS, 2, 16, 4, longest), loss, ("layers.0", "layers.1"))


def gpt2(*, drop: float = 0.0, attention: str = "sdpa", mask: bool = False, cache: bool = True) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: Any = {"vocab_size": WORDS, "n_positions": LONGEST, "n_embd": 16, "n_layer": 2, "n_head": 4}
    drops = {"resid_pdrop": drop, "embd_pdrop": drop, "attn_pdrop": drop}
    ends = {"bos_token_id": None, "eos_token_id": None, "use_cache": cache, "attn_implementation": attention}
    return Case(
        lambda: GPT2LMHeadModel(GPT2Config(**sizes, **drops, **ends)),  # pyright: ignore[reportArgumentType]
        _padded if mask else _plain,
        ("transformer.h.0", "transformer.h.1"),
    )


def llama(*, mask: bool = False, places: bool = False) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: Any = {"vocab_size": WORDS, "max_position_embeddings": LONGEST, "hidden_size": 16, "intermediate_size": 24}
    heads: Any = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    loss = _padded if mask else _placed if places else _plain
    return Case(lambda: LlamaForCausalLM(LlamaConfig(**sizes, **heads)), loss, ("model.layers.0", "model.layers.1"))


def mistral(*, cache: bool = True) -> Case:
    """Return a model whose attention has a window of 5 positions."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes: Any = {"vocab_size": WORDS, "max_position_embeddings": LONGEST, "hidden_size": 24, "intermediate_size": 24}
    heads: Any = {"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "sliding_window": 5}
    config = MistralConfig(**sizes, **heads, use_cache=cache)
    return Case(lambda: MistralForCausalLM(config), _plain, ("model.layers.0", "model.layers.1"))


def bert() -> Case:
    from transformers import BertConfig, BertForMaskedLM

    sizes: Any = {"vocab_size": WORDS, "max_position_embeddings": LONGEST, "hidden_size": 16, "intermediate_size": 24}
    more: Any = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_dropout_prob": 0.1}
    more["attention_probs_dropout_prob"] = 0.0
    return Case(
        lambda: BertForMaskedLM(BertConfig(**sizes, **more)),
        _padded,
        ("bert.encoder.layer.0", "bert.encoder.layer.1"),
    )


def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: Any = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    image: Any = {"image_size": 12, "patch_size": 4, "num_channels": 1, "num_labels": 5}

    def loss(model: Any, words: Tensor) -> Tensor:
        images = (words[:, :1, None, None] * torch.arange(144.0).reshape(1, 1, 12, 12).to(model.dtype)).sin()
        return model(pixel_values=images, labels=words[:, 0] % 5).loss

    model = ViTForImageClassification(ViTConfig(**sizes, **image))
    names = [n for n, m in model.named_modules() if type(m).__name__ == "ViTLayer"]
    return Case(lambda: ViTForImageClassification(ViTConfig(**sizes, **image)), loss, tuple(names))


def _plain(model: Any, words: Tensor) -> Tensor:
    return model(input_ids=words, labels=words).loss


def _padded(model: Any, words: Tensor) -> Tensor:
    """Return the loss of samples that end at several places."""
    shown = (torch.arange(words.shape[1]) < words.shape[1] - torch.arange(len(words)).unsqueeze(1)).long()
    return model(input_ids=words, attention_mask=shown, labels=words.masked_fill(shown == 0, -100)).loss


def _placed(model: Any, words: Tensor) -> Tensor:
    """Return the loss of samples whose positions begin at several numbers."""
    places = torch.arange(words.shape[1]) + torch.arange(len(words)).unsqueeze(1)
    return model(input_ids=words, position_ids=places, labels=words).loss


class Stack(nn.Module):
    """Blocks of any kind between an embedding and a head, given some things that depend on positions."""

    def __init__(self, *blocks: nn.Module, given: Callable[[Tensor], dict[str, Any]] | None = None) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.blocks, self.given = nn.ModuleList(blocks), given

    @override
    def forward(self, words: Tensor) -> Tensor:
        x = self.token(words)
        more = self.given(x) if self.given else {}
        for block in self.blocks:
            x = block(x, **more)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(x)


def stack(block: Callable[[], nn.Module], given: Callable[[Tensor], dict[str, Any]] | None = None) -> Case:
    def loss(model: Any, words: Tensor) -> Tensor:
        return F.cross_entropy(model(words).flatten(0, 1), words.roll(-1, 1).flatten())

    return Case(lambda: Stack(block(), block(), given=given), loss, ("blocks.0", "blocks.1"))


class Attending(nn.Module):
    """Attention of four heads, and something that a test adds."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def joined(self, heads: Tensor) -> Tensor:
        return self.out(heads.transpose(1, 2).flatten(2))

    @override
    def forward(self, x: Tensor) -> Any:
        return x + self.joined(F.scaled_dot_product_attention(*self.split(x), is_causal=True))


class PartlyCompiled(nn.Module):
    """Attention in a part of the block that its author compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attending()
        self.inner.compile(backend="aot_eager")

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Biased(Attending):
    """A bias of scores by distance that is learned outside the blocks, and a gate for each token."""

    @override
    def forward(self, x: Tensor, bias: Tensor, gate: Tensor, scale: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x + gate * self.joined(F.scaled_dot_product_attention(*self.split(x), attn_mask=bias)) * scale, bias


class Grouped(nn.Module):
    """Attention whose 6 heads share 3 of keys, which 2 ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 12 * 4), nn.Linear(6 * 4, 16)

    @override
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (12, 4)).transpose(1, 2).split((6, 3, 3), 1)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(seen.transpose(1, 2).flatten(2))


class Rescaling(Biased):
    """Makes a bias of its own from the rows that it is given."""

    @override
    def forward(self, x: Tensor, bias: Tensor, gate: Tensor, scale: Tensor) -> Any:
        return super().forward(x, bias * 0.5, gate, scale)[0]


class Remembering(Attending):
    """Has its mask from the start, for 24 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Buffer(torch.ones(24, 24, dtype=torch.bool).tril(), persistent=False)

    @override
    def forward(self, x: Tensor) -> Any:
        return x + self.joined(F.scaled_dot_product_attention(*self.split(x), attn_mask=self.seen))


class Crossing(Attending):
    """Looks at another sequence, whose gradient has a part from each rank, besides its own."""

    @override
    def forward(self, x: Tensor, other: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        _, k, v = self.split(other)
        x = super().forward(x)
        return x + self.joined(F.scaled_dot_product_attention(self.split(x)[0], k, v))


class OneHead(Attending):
    """Calls attention without a dimension for heads, on queries that lie by columns."""

    @override
    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5))


class Positioned(Attending):
    """Adds its positions by itself."""

    @override
    def forward(self, x: Tensor) -> Any:
        return super().forward(x + torch.arange(x.shape[1], dtype=x.dtype).sin().unsqueeze(-1))


class MasksItself(Attending):
    """Makes its causal mask from the length that it sees."""

    @override
    def forward(self, x: Tensor) -> Any:
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return x + self.joined(F.scaled_dot_product_attention(*self.split(x), attn_mask=seen))


class Products(Attending):
    """Computes causal attention by products of its own."""

    @override
    def forward(self, x: Tensor) -> Any:
        q, k, v = self.split(x)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-1, -2)).masked_fill(later, float("-inf"))
        return x + self.joined(scores.softmax(-1) @ v)


class Shifting(Attending):
    """Looks at the token before, besides attention."""

    @override
    def forward(self, x: Tensor) -> Any:
        return super().forward(x + F.pad(x[:, :-1], (0, 0, 1, 0)))


class Noisy(Attending):
    """Adds noise for each token."""

    @override
    def forward(self, x: Tensor) -> Any:
        return super().forward(x + torch.randn_like(x))


class Flat(Attending):
    """Has no attention: tokens do not see each other; dropout of tokens that are laid end to end."""

    @override
    def forward(self, x: Tensor) -> Any:
        return x + self.out(F.dropout(x.flatten(0, 1), 0.25, self.training)).view_as(x)


class Convolution(nn.Module):
    """A network whose hidden states are images."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(1, 1, 3, padding=1) for _ in range(2))

    @override
    def forward(self, words: Tensor) -> Tensor:
        x = words[:, None, :, None].to(next(self.parameters()).dtype)
        for block in self.blocks:
            x = block(x)
        return x.sum()


def sequence_first() -> Case:
    """Return a model whose hidden states are (sequence, batch, width)."""
    layer = nn.TransformerEncoderLayer

    def loss(model: Any, words: Tensor) -> Tensor:
        return model(words.T).square().mean()

    return Case(
        lambda: Stack(*(layer(16, 4, 24, 0.0, batch_first=False) for _ in range(2))), loss, ("blocks.0", "blocks.1")
    )


def transformer(*, padding: bool = False) -> Case:
    """Return a model of torch's own encoder layers, with a causal mask, or with a mask of padding."""

    def given(x: Tensor) -> dict[str, Any]:
        if padding:
            return {"src_key_padding_mask": torch.zeros(x.shape[:2], dtype=torch.bool)}
        return {
            "src_mask": nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype),
            "is_causal": True,
        }

    return stack(lambda: nn.TransformerEncoderLayer(16, 4, 24, 0.1, batch_first=True), given)
