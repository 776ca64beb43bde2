"""Which faults of structure cannot be, by the weights that a kernel gives pairs."""

from __future__ import annotations

from halfulp.reconstruct.emulating import Emulator, Model, Twist
from halfulp.reconstruct.weights_read import compared, forward_weights

_PAIRS = {"causal-mask", "mask", "key-tail", "query-tail"}
_SUMS = {"rescale", "split-merge", "tiles-skipped"}
_OFF = frozenset({*_PAIRS, *_SUMS, "padding", "mask-finite"})
UNLIKELY: dict[str, frozenset[str]] = {
    **dict.fromkeys(("causal-mask", "mask", "key-tail", "query-tail"),
                    frozenset({"scale", "rescale", "split-merge", "unnormalized"})),
    **dict.fromkeys(("scale", "ragged"), _OFF),
    **dict.fromkeys(("unnormalized", "row-sum", "rescale", "split-merge"),
                    frozenset({*_PAIRS, "scale", "layout"})),
    "": frozenset({*_OFF, "scale", "exponential", "softcap", "sinks", "window", "ragged"}),
}  # fmt: skip
"""What the faults are that weights which were read so rule out, by the cause that they tell."""


def left(emulator: Emulator, stock: Model, twists: tuple[Twist, ...]) -> tuple[Twist, ...]:
    """The faults of structure that go with the weights as they are read on the worst trial."""
    outs = [t for t, name in emulator.observed if name == "out"]
    fits = emulator.fits(stock, frozenset({"out"}))
    worst = max(outs, key=lambda t: (t != "long", fits[t, "out"].left))
    trial = emulator.trials[worst]
    weights = forward_weights(emulator.run, trial)
    if weights is None:
        return twists
    never = UNLIKELY.get(compared(trial, weights).cause, frozenset())
    return tuple(twist for twist in twists if twist.cause not in never)
