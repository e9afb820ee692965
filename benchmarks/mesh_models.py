"""Models as others wrote them, tiny, as tasks for `make mesh`: their code is unchanged, and nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, final

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar

WORDS, LENGTH, SAMPLES = 61, 16, 256
WIDTH, HEADS, LAYERS = 32, 4, 4
PAD, IGNORED = 0, -100


def texts(seed: int, shortest: int = 6) -> list[Tensor]:
    """Return texts of different lengths, as numbers of words; 0 is kept for padding."""
    g = Generator().manual_seed(seed)
    lengths = torch.randint(shortest, LENGTH + 1, (SAMPLES,), generator=g)
    return [torch.randint(1, WORDS, (int(n),), generator=g) for n in lengths]


def padded(rows: Sequence[Tensor], value: int = PAD) -> Tensor:
    """Return texts as one tensor, as long as the longest of them."""
    return pad_sequence(list(rows), batch_first=True, padding_value=value)


class _Texts(unipar.Task):
    """Texts of different lengths, padded to the longest of a microbatch; the loss is a mean over words."""

    shifts = True
    """Whether a word is predicted from those before it, so that the first has no part in the loss."""

    @override
    def data(self) -> Any:
        return texts(0)

    @override
    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        words, labels = padded(samples), padded(samples, IGNORED)
        return {"input_ids": words, "attention_mask": (words != PAD).long(), "labels": labels}

    @override
    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["labels"]
        return (labels[:, 1:] if self.shifts else labels).ne(IGNORED).sum()

    @override
    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch).loss


def _made(name: str, config: str, **sizes: Any) -> Any:
    """Return a model of transformers by the names of its class and config."""
    transformers: Any = import_module("transformers")
    make = getattr(transformers, name)
    return make(getattr(transformers, config)(**sizes))


class GPT2(_Texts):
    """GPT-2 as transformers has it: matrices are transposed, query, key and value are one, the head is tied."""

    def __init__(self, dropout: float = 0.1) -> None:
        self.dropout = dropout

    @override
    def model(self) -> nn.Module:
        drops = {f"{part}_pdrop": self.dropout for part in ("attn", "embd", "resid")}
        sizes: dict[str, Any] = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
        return _made("GPT2LMHeadModel", "GPT2Config", vocab_size=WORDS, use_cache=False, **sizes, **drops)


class Llama(_Texts):
    """Llama: grouped queries, and rotary tables that every block gets by keyword."""

    @override
    def model(self) -> nn.Module:
        sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
        heads = {"num_attention_heads": HEADS, "num_key_value_heads": 2}
        return _made("LlamaForCausalLM", "LlamaConfig", vocab_size=WORDS, use_cache=False, **sizes, **heads)


class LoRA(Llama):
    """Llama with LoRA layers of peft: all else is frozen."""

    @override
    def model(self) -> nn.Module:
        peft: Any = import_module("peft")
        base: Any = super().model()
        made: Any = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], lora_dropout=0.0)
        return peft.get_peft_model(base, made)


class Bert(_Texts):
    """BERT: attention in both directions, and every third word is to be found again."""

    shifts = False

    @override
    def model(self) -> nn.Module:
        sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
        heads = {"num_attention_heads": HEADS, "max_position_embeddings": LENGTH}
        return _made("BertForMaskedLM", "BertConfig", vocab_size=WORDS, **sizes, **heads)

    @override
    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        batch = super().collate(samples)
        hidden = torch.arange(batch["labels"].shape[1]) % 3 == 0
        batch["labels"] = torch.where(hidden, batch["labels"], IGNORED)
        batch["input_ids"] = torch.where(hidden & (batch["labels"] != IGNORED), WORDS - 1, batch["input_ids"])
        return batch


class T5(_Texts):
    """T5: a decoder whose blocks all read the encoder's output, and one table of relative positions for all blocks."""

    shifts = False

    @override
    def model(self) -> nn.Module:
        sizes = {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 2 * WIDTH, "num_layers": 2, "num_heads": HEADS}
        words = {"vocab_size": WORDS, "decoder_start_token_id": PAD, "use_cache": False}
        return _made("T5ForConditionalGeneration", "T5Config", **words, **sizes)


@final
class ViT(unipar.Task):
    """ViT: images in patches, and a class token before them."""

    @override
    def model(self) -> nn.Module:
        sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
        image = {"num_attention_heads": HEADS, "image_size": 16, "patch_size": 4, "num_labels": 8}
        return _made("ViTForImageClassification", "ViTConfig", **sizes, **image)

    @override
    def data(self) -> Any:
        g = Generator().manual_seed(0)
        return TensorDataset(torch.rand(SAMPLES, 3, 16, 16, generator=g), torch.randint(0, 8, (SAMPLES,), generator=g))

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        return model(pixel_values=batch[0], labels=batch[1]).loss


class EncoderModel(nn.Module):
    """Language model from torch's own parts."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    @override
    def forward(self, words: Tensor) -> Tensor:
        n = words.shape[1]
        x = self.words(words) + self.places(torch.arange(n, device=words.device))
        mask = nn.Transformer.generate_square_subsequent_mask(n, device=words.device, dtype=x.dtype)
        return self.head(self.encoder(x, mask=mask, is_causal=True))


@final
class Encoder(_Texts):
    """torch's TransformerEncoder as a language model."""

    @override
    def model(self) -> nn.Module:
        return EncoderModel()

    @override
    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        guessed = model(batch["input_ids"])[:, :-1]
        return F.cross_entropy(guessed.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)


class TranslatorModel(nn.Module):
    """Encoder and decoder of torch's own Transformer, with masks for padding in both."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 2, 2, 2 * WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def embedded(self, words: Tensor) -> Tensor:
        return self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))

    @override
    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device) < 0
        out = self.transformer(
            self.embedded(source),
            self.embedded(target),
            tgt_mask=causal,
            src_key_padding_mask=source == PAD,
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=source == PAD,
        )
        return self.head(out)


@final
class Translator(_Texts):
    """torch's Transformer: texts are to be turned around."""

    @override
    def model(self) -> nn.Module:
        return TranslatorModel()

    @override
    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        turned = [text.flip(0) for text in samples]
        return {"source": padded(samples), "target": padded(turned), "labels": padded(turned, IGNORED)}

    @override
    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        guessed = model(batch["source"], batch["target"])[:, :-1]
        return F.cross_entropy(guessed.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)


MODELS: dict[str, Callable[..., unipar.Task]] = {
    "gpt2": GPT2,
    "llama": Llama,
    "bert": Bert,
    "t5": T5,
    "vit": ViT,
    "encoder": Encoder,
    "translator": Translator,
    "lora": LoRA,
}
"""Tasks by the names that `python -m benchmarks.mesh` takes; the character GPT of examples/ is `gpt`."""
