"""Pages that `batchgen report` wrote, read back without a browser."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from PIL import Image

HOSTILE = [
    "<script>document.title='broken in'</script><img src=x onerror=\"document.title='broken in'\">",
    "\"double\" 'single' `back` & &amp; &lt;b&gt; {{ 7 * 7 }} ${7 * 7} </p></article></script><!-- -->]]>",
    "שלום עולם, مرحبا \u202egnp.exe\u202c and left again",
    "🦊🐉 \U0001f469\u200d\U0001f52c 龍 e\u0301 é \ufeff\u2028\u2029 end",
    "a word " * 1429,
    "two\nlines\tand  spaces ",
]
"""Prompts that must stay text: markup, quotes, right to left, emoji, 10,000 characters, blanks."""


@dataclass
class ReadCard:
    """A card of the gallery."""

    attributes: dict[str, str | None]
    texts: dict[str, str] = field(default_factory=dict)
    """By class: prompt, summary, reason; and the values by name."""
    picture: np.ndarray | None = None
    link: str | None = None


class ReadPage(HTMLParser):
    """The texts of a page, its tables and its cards."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.source = path.read_text(encoding="utf-8")
        self.cards: list[ReadCard] = []
        self.tags: list[str] = []
        self.sections: dict[str, str] = {}
        self._section = self._place = self._name = ""
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        if tag == "section":
            self._section = found.get("id") or "totals"
            self.sections[self._section] = ""
        elif tag == "article":
            self.cards.append(ReadCard(found))
        elif self.cards and tag == "img":
            data = (found["src"] or "").removeprefix("data:image/webp;base64,")
            self.cards[-1].picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
        elif self.cards and tag == "a":
            self.cards[-1].link = found["href"]
        if tag in ("p", "span", "dt", "dd"):
            self._place = found.get("class") or tag
            self._name = "" if tag == "dt" else self._name

    def handle_endtag(self, tag: str) -> None:
        if tag in ("p", "span", "dt", "dd"):
            self._place = ""

    def handle_data(self, data: str) -> None:
        if self._section:
            self.sections[self._section] += data
        if not self.cards or not self._place:
            return
        if self._place == "dt":
            self._name += data
        key = self._name if self._place == "dd" else self._place
        self.cards[-1].texts[key] = self.cards[-1].texts.get(key, "") + data

    @property
    def failed(self) -> list[ReadCard]:
        return [card for card in self.cards if card.attributes["data-status"] == "failed"]

    @property
    def made(self) -> list[ReadCard]:
        return [card for card in self.cards if card.attributes["data-status"] == "made"]

    def words(self, section: str) -> str:
        """A section's text, blanks made one."""
        return " ".join(self.sections[section].split())

    @property
    def addresses(self) -> list[str]:
        """All that the page could fetch."""
        return re.findall(r"""(?:src|href|url\()\s*=?\s*["']?((?!data:|#)[a-z]+:[^"')\s]+)""", self.source)
