"""The demo model's tokenizer: byte pairs merged until every word of the captions is one token.

The trainer of the tokenizers library breaks ties differently from run to run, and token numbers with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from transformers import CLIPTokenizer

from batchgen.models.demo import TEXT_LENGTH, tokenizer

Pair = tuple[str, str]


def trained_tokenizer(texts: Iterable[str]) -> Any:
    """A CLIP tokenizer of the byte alphabet, so that it takes any UTF-8, with merges for the words of these texts."""
    plain = tokenizer()
    steps = plain.backend_tokenizer
    words = {
        word for text in texts for word, _ in steps.pre_tokenizer.pre_tokenize_str(steps.normalizer.normalize_str(text))
    }
    merges = _merges(sorted(words))
    base = plain.get_vocab()
    made = dict.fromkeys(left + right for left, right in merges)
    vocabulary = base | {word: len(base) + number for number, word in enumerate(made)}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=TEXT_LENGTH)


def _merges(words: list[str]) -> list[Pair]:
    """Sennrich, Haddow and Birch 2016, algorithm 1: the commonest pair first, the last in the alphabet among equals."""
    split = [[*word[:-1], word[-1] + "</w>"] for word in words]
    counts = Counter(pair for symbols in split for pair in pairwise(symbols))
    found: list[Pair] = []
    while counts:
        best = max(counts, key=lambda pair: (counts[pair], pair))
        found.append(best)
        for number, symbols in enumerate(split):
            if best in pairwise(symbols):
                counts.subtract(pairwise(symbols))
                split[number] = _merged(symbols, best)
                counts.update(pairwise(split[number]))
        counts = +counts
    return found


def _merged(symbols: list[str], pair: Pair) -> list[str]:
    made: list[str] = []
    for symbol in symbols:
        if made and (made[-1], symbol) == pair:
            made[-1] += symbol
        else:
            made.append(symbol)
    return made
