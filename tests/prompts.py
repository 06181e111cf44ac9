"""24 prompts that differ in all that matters to a server: length, script, code, emoji, repetition."""

from __future__ import annotations

from collections.abc import Callable

_STORY = (
    "The lighthouse keeper had not spoken to anyone for eleven days when the boat came. It was small and grey, and the "
    "woman who rowed it did not look up until its bow touched the stones. She had brought bread, three letters, and a "
    "clock that no longer worked. He read the letters in the order of their dates, which was the wrong order. "
)
_CODE = '''def merge(left, right):
    """Merges two sorted lists."""
    result, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
            result.append(right[j])
            j += 1
    return result + left[i:] + right[j:]

'''
_RECORDS = "".join(
    f'{{"id": {number}, "name": "item-{number * 7 % 13}", "price": {number * 3.25}}}\n' for number in range(12)
)

SHORT = [
    "A",
    "The",
    "1, 2, 3,",
    "Once upon a time",
    "The capital of France is",
    "Q: What is 17 + 25?\nA:",
    "Roses are red,\nviolets are",
    "Dear Sir or Madam,\n\n",
]
SCRIPTS = [
    "Das Wetter in München ist heute",
    "Привет, меня зовут",
    "今日はとても",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "👍🏽 👩‍👩‍👧 🇩🇪 means",
    "naïve café résumé — “quoted” …",
]
CODE = [
    _CODE + "def sort(items):\n",
    "SELECT name, COUNT(*) FROM orders\nWHERE",
    "<html>\n  <body>\n    <h1>",
    _RECORDS + '{"id": 12,',
]
LONG = [
    _STORY + "Then",
    _STORY * 3 + "In the end",
    " ".join(["again"] * 300),
    (_STORY + _CODE + _RECORDS) * 2 + "Summary:",
]
LONGEST_TOKENS = 1500

PROMPTS = [*SHORT, *SCRIPTS, *CODE, *LONG]


def token_ids(encode: Callable[[str], list[int]], max_tokens: int = LONGEST_TOKENS) -> list[list[int]]:
    """All 24 as ids: the texts cut to `max_tokens`, and one prompt of exactly that length, made of all of them."""
    prompts = [encode(text)[:max_tokens] for text in PROMPTS]
    endless = [token_id for _ in range(8) for prompt in prompts for token_id in prompt]
    return [*prompts, endless[:max_tokens]]
