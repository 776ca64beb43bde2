"""The noun of the house: one attention call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from halfulp.calls.dropout import Dropout
from halfulp.calls.sees import EVERYTHING, Sees


class Flat(NamedTuple):
    """A call as PyTorch's operators take it, whose schemas know tensors, numbers and lists of them.

    The names are those of `halfulp.attention`'s arguments.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    sinks: Tensor | None
    seed: Tensor | None
    is_causal: bool
    scale: float
    window: Sequence[int] | None
    softcap: float
    dropout_p: float
    causal_offset: int

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What autograd keeps apart from the numbers: the first fields, those that are tensors."""
        return self.query, self.key, self.value, self.attn_mask, self.sinks, self.seed

    @property
    def numbers(self) -> tuple[Any, ...]:
        """All other fields."""
        return self[TENSORS:]


TENSORS = Flat._fields.index("is_causal")
"""How many fields of `Flat` are tensors."""


@dataclass(frozen=True)
class Call:
    """One attention call, whatever computes it: softmax(scale · QKᵀ, of what is seen) V."""

    query: Tensor  # [B, H, N, D]
    key: Tensor  # [B, H_k, N_k, D], H_k a divisor of H
    value: Tensor  # [B, H_k, N_k, D_v]
    sees: Sees = EVERYTHING
    scale: float = 1.0
    softcap: float = 0.0  # c > 0: scaled scores become c·tanh(S / c), before any mask is added
    sinks: Tensor | None = None  # [H]: one more key with this score and a value of 0, for every row
    dropout: Dropout | None = None
    # of out, as the caller wrote its leading dimensions; None: [B, H, N, D_v]
    shape: tuple[int, ...] | None = None

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """query, key and value."""
        return self.query, self.key, self.value

    @property
    def groups(self) -> int:
        """Query heads to a key head."""
        return self.query.shape[1] // max(self.key.shape[1], 1)

    @property
    def scores_shape(self) -> tuple[int, int, int, int]:
        """[B, H, N, N_k], what a mask broadcasts to."""
        batch, heads, queries = self.query.shape[:3]
        return batch, heads, queries, self.key.shape[2]

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """The least and the greatest j − i that is seen; None: no bound."""
        return self.sees.bounds(self.query.shape[2], self.key.shape[2])

    @property
    def dropout_p(self) -> float:
        """Share of the weights that is dropped."""
        return 0.0 if self.dropout is None else self.dropout.p

    def flat(self) -> Flat:
        """The call as an operator's arguments."""
        sees, dropout = self.sees, self.dropout
        seed = None if dropout is None else dropout.seed
        assert not isinstance(seed, int), "an operator takes its seed as a tensor"
        return Flat(
            self.query,
            self.key,
            self.value,
            sees.mask,
            self.sinks,
            seed,
            sees.causal,
            self.scale,
            sees.window,
            self.softcap,
            0.0 if dropout is None else dropout.p,
            sees.offset,
        )

    @classmethod
    def of_flat(cls, flat: Flat) -> Call:
        """The call that `flat` was made of, the seed a number."""
        window = None if flat.window is None else (flat.window[0], flat.window[1])
        sees = Sees(flat.is_causal, window, flat.causal_offset, flat.attn_mask)
        dropout = None if flat.seed is None else Dropout(flat.dropout_p, int(flat.seed))
        return cls(
            flat.query, flat.key, flat.value, sees, flat.scale, flat.softcap, flat.sinks, dropout
        )

    def options(self, *, seeded: bool = False) -> dict[str, Any]:
        """Keyword arguments that ask `emulate`, `golden` or a kernel under audit for this call.

        is_causal and scale always; others where they say anything. Dropout's seed is among them
        only if `seeded`: kernels of others draw theirs.
        """
        said = {
            "attn_mask": self.sees.mask,
            "enable_gqa": self.groups != 1,
            "window": self.sees.window,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "dropout_p": self.dropout_p,
            "causal_offset": self.sees.offset,
        }
        given = {name: x for name, x in said.items() if isinstance(x, (Tensor, tuple)) or x}
        if seeded and self.dropout is not None:
            given["dropout_seed"] = self.dropout.number
        return {"is_causal": self.sees.causal, "scale": self.scale} | given
