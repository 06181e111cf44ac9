"""Makes the models in tests/worker/sentencepiece/, and writes down what the sentencepiece library does with them.

    pip install sentencepiece && python -m tests.worker.sentencepiece_fixtures

The library is not needed to run the tests: `expected.json` has its ids and texts, for texts of words, many scripts,
odd spaces and random letters.
"""

from __future__ import annotations

import json
import random
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

from tests.scheduler.tiny_tokenizers import TEXTS

FOLDER = Path(__file__).parent / "sentencepiece"
_WORDS = "the quick brown fox jumps over a lazy dog while seven 24 wizards box 1999 quietly, don't they? ﬁne naïve café"
MODELS: dict[str, dict[str, Any]] = {
    # As Llama 2: nothing is normalised, every byte has a token.
    "bpe": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "split_digits": True,
            "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True},
    # No space in front, and symbols of the user.
    "bpe_no_prefix": {"model_type": "bpe", "add_dummy_prefix": False, "normalization_rule_name": "identity",
                      "remove_extra_whitespaces": False,
"user_defined_symbols": ["<sep>", "[tool]"]},
    # Rules of normalisation, extra spaces removed, unknown letters.
    "unigram": {"model_type": "unigram", "normalization_rule_tsv": "rules"},
    "unigram_bytes": {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "identity",
                      "remove_extra_whitespaces": False},
}  # fmt: skip


def main() -> None:
    import sentencepiece

    rng = random.Random(0)
    words = _WORDS.split()
    training = [" ".join(rng.choices(words, k=rng.randint(3, 12))) for _ in range(300)] + [
        text for text in TEXTS if text
    ]
    # Marks that join the letter before are left out: `tokenizers` normalises such a cluster as one.
    letters = sorted(letter for letter in set("".join(training)) if unicodedata.category(letter)[0] not in "MC")
    texts = [text for text in TEXTS if "<s>" not in text] + ["  a  b ", "   ", "\ta\n", "ﬁve", "a<sep>b [tool]c", "▁x"]
    texts += [" ".join(rng.choices(words, k=20)) for _ in range(10)]
    texts += ["".join(rng.choices(letters, k=rng.randint(1, 40))) for _ in range(40)]
    FOLDER.mkdir(exist_ok=True)
    expected: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        corpus, rules = Path(scratch) / "corpus.txt", Path(scratch) / "rules.tsv"
        corpus.write_text("\n".join(line for text in training for line in text.splitlines() if line.strip()))
        rules.write_text("FB01\t66 69\nE9\t65\n9\t20\n")  # ﬁ -> fi, é -> e, tab -> space
        for name, options in MODELS.items():
            options = {key: str(rules) if value == "rules" else value for key, value in options.items()}
            sentencepiece.SentencePieceTrainer.train(
                input=str(corpus), model_prefix=f"{scratch}/{name}", vocab_size=480, hard_vocab_limit=False,
                character_coverage=0.99, minloglevel=2, **options,
            )  # fmt: skip
            data = (Path(scratch) / f"{name}.model").read_bytes()
            (FOLDER / f"{name}.model").write_bytes(data)
            library = sentencepiece.SentencePieceProcessor(model_proto=data)
            ids = [library.encode(text) for text in texts]
            expected[name] = [
                {"text": text, "ids": found, "decoded": library.decode(found)}
                for text, found in zip(texts, ids, strict=True)
            ]
    (FOLDER / "expected.json").write_text(json.dumps(expected, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
