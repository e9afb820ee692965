"""Long words in sentences."""

from __future__ import annotations

from unipar.utils.text import cut_middle, cut_words


def test_a_text_is_cut_in_its_middle() -> None:
    """Its beginning and its end stay, in as many characters as were given."""
    assert cut_middle("layers.0.weight", 15) == "layers.0.weight"
    assert cut_middle("decoder.layers.31.attention.weight", 15) == "decode...weight"
    assert len(cut_middle("x" * 100, 44)) == 44


def test_long_words_of_a_sentence_are_cut() -> None:
    """Commas and the words between them stay as they are."""
    sentence = "decoder.layers.31.attention.weight, a and decoder.layers.31.attention.bias differ"
    assert cut_words(sentence, 15) == "decode...weight, a and decode...n.bias differ"
