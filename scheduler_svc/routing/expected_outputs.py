"""How many tokens a sequence will have in the end: about as many as those of its model that ended last."""

from __future__ import annotations

FIRST_NUM_OUTPUTS = 128.0  # tokens of a sequence, before any of its model has ended
NEWEST_OUTPUT = 0.02  # weight of the newest one in their moving average
MAX_MODELS = 64  # that are remembered; the one whose last sequence ended longest ago is forgotten first


class ExpectedOutputs:
    """A moving average for each model, by fingerprint; "" where nobody tells models apart."""

    def __init__(self) -> None:
        self._by_model: dict[str, float] = {}  # in the order of their last ends

    def __len__(self) -> int:
        return len(self._by_model)

    def of(self, model: str) -> float:
        """Tokens that a sequence of the model is expected to have."""
        return self._by_model.get(model, FIRST_NUM_OUTPUTS)

    def ended(self, model: str, num_outputs: float) -> None:
        """A group of the model has ended with so many tokens a sequence."""
        expected = self._by_model.pop(model, FIRST_NUM_OUTPUTS)
        self._by_model[model] = expected + NEWEST_OUTPUT * (num_outputs - expected)
        if len(self._by_model) > MAX_MODELS:
            del self._by_model[next(iter(self._by_model))]
