"""Blocks of many models, with the arguments their models call them with: for plans of tensor parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from examples.char_gpt import Block

WIDTH = 32
Called = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A block, and the arguments of a call."""


class NanoBlock(nn.Module):
    """nanoGPT's block as it is written there: a fused projection that is split by a literal width."""

    def __init__(self, heads: int = 4, dropout: float = 0.0, flash: bool = True) -> None:
        super().__init__()
        self.n_embd, self.n_head, self.dropout, self.flash = WIDTH, heads, dropout, flash
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c_fc, self.proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)  # one module for cut and whole activations
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def attend(self, x: Tensor) -> Tensor:
        B, T, C = x.size()  # noqa: N806 - nanoGPT's names
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            p = self.dropout if self.training else 0
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=p, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            bias: Any = self.bias
            scores = scores.masked_fill(bias[:, :, :T, :T] == 0, float("-inf"))
            y = self.drop(F.softmax(scores, dim=-1)) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attend(self.ln_1(x)))
        return x + self.drop(self.proj(self.drop(F.gelu(self.c_fc(self.ln_2(x))))))


class OddBlock(nn.Module):
    """Senseless names, literal sizes, and whole parameters that meet cut activations."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.h = heads
        self.zork, self.blip, self.frob, self.quux = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.a, self.b = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH // heads)
        self.x1, self.x2 = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.x3 = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.slope = nn.Parameter(torch.rand(heads, 1, 1))
        self.scale = nn.Parameter(torch.ones(2 * WIDTH))

    @override
    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        y = self.a(x)
        q, k, v = (
            layer(y).view(rows, length, self.h, width // self.h).transpose(1, 2)
            for layer in (self.zork, self.blip, self.frob)
        )
        q = self.b(q)  # its weight is whole, its input cut
        far = self.slope * torch.arange(length, device=x.device)  # a whole tensor, cut by heads
        seen = (q @ k.transpose(-2, -1) + far).softmax(-1) @ v
        x = x + self.quux(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.x3(F.silu(self.x1(x)) * self.x2(x) * self.scale)


class UnequalBlock(nn.Module):
    """One projection for queries and fewer keys and values; one for gate and value of the MLP."""

    def __init__(self, heads: int = 4, keys: int = 2) -> None:
        super().__init__()
        self.heads, self.keys, self.each = heads, keys, WIDTH // heads
        self.qkv, self.o = nn.Linear(WIDTH, (heads + 2 * keys) * self.each), nn.Linear(WIDTH, WIDTH)
        self.gu, self.down, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    @override
    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        all_of, at = self.qkv(self.norm(x)), self.heads * self.each
        q, k, v = all_of[..., :at], all_of[..., at : at + self.keys * self.each], all_of[..., -self.keys * self.each :]
        q = q.view(rows, length, self.heads, self.each).transpose(1, 2)
        k, v = (y.view(rows, length, self.keys, self.each).transpose(1, 2) for y in (k, v))
        more = self.heads // self.keys
        k = k[:, :, None].expand(rows, self.keys, more, length, self.each)
        k = k.reshape(rows, self.heads, length, self.each)
        y = F.scaled_dot_product_attention(q, k, v.repeat_interleave(more, 1), is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(rows, length, -1))
        gate, up = self.gu(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class LowRank(nn.Module):
    """A frozen layer beside two narrow ones, with the names and the shape that peft's LoRA gives them."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, outputs, bias=False)})

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * 0.5


class LowRankBlock(nn.Module):
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (LowRank(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = LowRank(WIDTH, 2 * WIDTH), LowRank(2 * WIDTH, WIDTH)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(x)))


class ImageBlock(nn.Module):
    """timm's attention, and an MLP in a Sequential with the same dropout behind both layers."""

    def __init__(self, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, WIDTH // heads
        self.qkv, self.proj, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        drop = nn.Dropout(dropout)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), drop, nn.Linear(64, WIDTH), nn.Dropout(dropout))

    @override
    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape  # noqa: N806 - timm's names
        qkv = self.qkv(self.norm(x)).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        shares = ((q * self.head_dim**-0.5) @ k.transpose(-2, -1)).softmax(dim=-1)
        x = x + self.proj((shares @ v).transpose(1, 2).reshape(B, N, C))
        return x + self.mlp(x)


def calls(model: nn.Module, forward: Callable[[Any], Any], blocks: Sequence[nn.Module]) -> list[Called]:
    """Return these blocks with the arguments that the model calls them with."""
    found: dict[nn.Module, tuple[Any, Any]] = {}

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        found[module] = (args, kwargs)

    handles = [block.register_forward_pre_hook(hook, with_kwargs=True) for block in blocks]
    forward(model)
    for handle in handles:
        handle.remove()
    return [(block, *found[block]) for block in blocks]


def _made(model: Any, config: Any, **sizes: Any) -> Any:
    return model(config(**sizes))


def own_blocks(dropout: float = 0.0, heads: int = 4) -> dict[str, Called]:
    """Return blocks that are written out here, and torch's own layers."""
    x = torch.randn(2, 8, WIDTH, generator=Generator().manual_seed(0))
    causal = nn.Transformer.generate_square_subsequent_mask(8)
    torchs: dict[str, Any] = {"d_model": WIDTH, "nhead": heads, "dim_feedforward": 64, "dropout": dropout}
    keys = heads // 2 or 1
    return {
        "char_gpt": (Block(WIDTH, heads), (x,), {}),
        "nanogpt": (NanoBlock(heads, dropout), (x,), {}),
        "nanogpt slow": (NanoBlock(heads, dropout, flash=False), (x,), {}),
        "odd": (OddBlock(heads), (x,), {}),
        "unequal": (UnequalBlock(heads, keys), (x,), {}),
        "lora": (LowRankBlock(heads), (x,), {}),
        "timm": (ImageBlock(heads, dropout), (x,), {}),
        "torch": (nn.TransformerEncoderLayer(**torchs, batch_first=True), (x,), {}),
        "torch masked": (
            nn.TransformerEncoderLayer(**torchs, norm_first=True),
            (x.transpose(0, 1),),
            {"src_mask": causal, "is_causal": True},
        ),
        "torch decoder": (
            nn.TransformerDecoderLayer(**torchs, batch_first=True),
            (x, x[:, :5]),
            {"tgt_mask": causal},
        ),
    }


def library_blocks(dropout: float = 0.0, heads: int = 4, attention: str = "sdpa") -> dict[str, Called]:
    """Return blocks of transformers' models, made from their config classes."""
    ids = torch.randint(3, 31, (2, 8), generator=Generator().manual_seed(0))
    words: dict[str, Any] = {"vocab_size": 31, "attn_implementation": attention}
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": heads, "intermediate_size": 64}
    few: dict[str, Any] = {"num_key_value_heads": heads // 2 or 1, "use_cache": False, "attention_dropout": dropout}
    drops: dict[str, Any] = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    t = transformers
    gpt2 = {"n_positions": 16, "n_embd": WIDTH, "n_layer": 1, "n_head": heads, "use_cache": False, **ends}
    gpt2 |= {"attn_pdrop": dropout, "resid_pdrop": dropout, "embd_pdrop": 0.0}
    t5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": heads}
    t5 |= {"dropout_rate": dropout, "use_cache": False, "decoder_start_token_id": 0}
    image = {"image_size": 16, "patch_size": 8, "attn_implementation": attention}
    model = _made(t.GPT2Model, t.GPT2Config, **words, **gpt2)
    found = {"gpt2": calls(model, lambda m: m(ids), model.h)[0]}
    model = _made(t.LlamaModel, t.LlamaConfig, **words, **sizes, **few, **ends)
    found["llama"] = calls(model, lambda m: m(ids), model.layers)[0]
    model = _made(t.Qwen3Model, t.Qwen3Config, **words, **sizes, **few, **ends, head_dim=8)
    found["qwen3"] = calls(model, lambda m: m(ids), model.layers)[0]
    model = _made(t.BertModel, t.BertConfig, **words, **sizes, **drops, pad_token_id=0)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    found["bert"] = calls(model, lambda m: m(ids, attention_mask=mask), model.encoder.layer)[0]
    model = _made(t.ViTModel, t.ViTConfig, **image, **sizes, **drops)
    layers = model.layers if hasattr(model, "layers") else model.encoder.layer
    found["vit"] = calls(model, lambda m: m(torch.randn(2, 3, 16, 16)), layers)[0]
    model = _made(t.T5ForConditionalGeneration, t.T5Config, **words, **t5)
    blocks = [*model.encoder.block, *model.decoder.block]
    names = ("t5 encoder 0", "t5 encoder 1", "t5 decoder 0", "t5 decoder 1")
    found |= dict(zip(names, calls(model, lambda m: m(input_ids=ids, labels=ids), blocks), strict=True))
    return found
