"""Prompts of many kinds for tests on the real model."""

from __future__ import annotations

_SHORT = [
    "The capital of France is",
    "Once upon a time",
    "2 + 2 =",
    "Q: Who wrote Hamlet?\nA:",
    "Dear Sir or Madam,",
    "a",
    " ",
    "The quick brown fox jumps over the lazy dog. The",
    "Water boils at",
    "My favourite colour is",
    "In 1969, humans first",
    "List three fruits:\n1.",
    "To be, or not to be,",
    "ERROR: file not",
    "Yes",
    "The opposite of hot is",
]

_CODE = [
    "def fibonacci(n):\n    ",
    "import numpy as np\n\nx = np.",
    "for (int i = 0; i < n; i++) {\n",
    "SELECT name, age FROM users WHERE",
    "<html>\n  <body>\n    <h1>",
    '{"name": "Ada", "born": 1815, "',
    "#!/bin/bash\nset -e\n\n",
    "fn main() {\n    println!(",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(",
    "// returns the larger of two numbers\nfunction max(a, b) {",
]

_OTHER_SCRIPTS = [
    "中国的首都是",
    "今天天气很好，我们",
    "人工智能是",
    "日本の首都は",
    "안녕하세요, 저는",
    "Столица России —",
    "Ελλάδα είναι",
    "مرحبا، اسمي",
    "Straße, Äpfel, naïve café, señor: these words",
    "नमस्ते, मेरा नाम",
]

_EMOJI = [
    "😀 😃 😄",
    "I love pizza 🍕 and",
    "👨‍👩‍👧‍👦 is a family. 🏳️‍🌈 is",
    "🎉🎉🎉 Happy birthday",
    "∑_{i=1}^{n} i = ",
]

_STORY = (
    "The old lighthouse keeper climbed the stairs every evening to light the lamp. "
    "From the top he could see the fishing boats return, one after another, their sails "
    "golden in the last light. Nobody in the village knew how long he had lived there. "
)


def long_prompt(num_characters: int) -> str:
    """Varied text of about so many characters; 4.5 of them make a token."""
    parts: list[str] = []
    while sum(map(len, parts)) < num_characters:
        parts.append(f"Chapter {len(parts) + 1}. {_STORY}")
    return "".join(parts)[:num_characters]


def varied_prompts() -> list[str]:
    """Fifty prompts: short, code, other scripts, emoji, and up to 1,500 tokens."""
    lengths = [300, 500, 800, 1200, 1800, 2500, 3500, 5000, 6750]
    prompts = [*_SHORT, *_CODE, *_OTHER_SCRIPTS, *_EMOJI, *map(long_prompt, lengths)]
    assert len(prompts) == 50
    return prompts
