"""Kernel calls as tests vary them: one flat value of which a case changes a word."""

from dataclasses import dataclass

from torch import Tensor

from halfulp.calls import Call, Dropout, Sees


@dataclass(frozen=True)
class Options:
    """Everything that a kernel is asked but the three operands."""

    recipe: str = "halfulp"
    is_causal: bool = False
    scale: float = 1.0
    attn_mask: Tensor | None = None
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    seed: int = 0
    causal_offset: int = 0

    def of(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Call, str]:
        """The first two arguments of `supports`, `forward` and `backward`."""
        sees = Sees(self.is_causal, self.window, self.causal_offset, self.attn_mask)
        dropout = Dropout(self.dropout_p, self.seed) if self.dropout_p else None
        call = Call(query, key, value, sees, self.scale, self.softcap, self.sinks, dropout)
        return call, self.recipe
