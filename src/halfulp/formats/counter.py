"""Random numbers that depend on a seed and a position and on nothing else.

Stochastic rounding needs one random number per element. A generator with a state would make the
result depend on the order in which a tensor is worked through; here element i gets a hash of (seed,
i), so a tensor rounded whole, in pieces or in another order has the same bits.

The same holds for dropout, whose backward pass has to drop what the forward pass dropped.

Sources: the finalizer of SplitMix64 (Steele, Lea, Flood 2014; "Mix13" of Stafford), applied to a
Weyl sequence; for dropout, which any kernel must be able to repeat in 32-bit integers, Wellons'
`lowbias32`.
"""

from __future__ import annotations

from typing import Final, TypeVar

import torch
from torch import Tensor

_Word = TypeVar("_Word", int, Tensor)
_WEYL: Final = 0x9E37_79B9_7F4A_7C15
_FIRST: Final = 0xBF58_476D_1CE4_E5B9
_SECOND: Final = 0x94D0_49BB_1331_11EB
_WORD: Final = 2**64 - 1
_HALF: Final = 2**32 - 1


def counters(count: int, device: torch.device) -> Tensor:
    """Return int64 [count], the positions 0 to count - 1 as steps of the sequence: what `uniform`
    starts from.
    """
    return torch.arange(count, dtype=torch.int64, device=device).mul_(_signed(_WEYL))


def uniform(seed: int, offset: int, steps: Tensor) -> Tensor:
    """Return float64 numbers uniform on the multiples of 2**-53 in [0, 1), for positions offset and
    following.

    Args:
        seed: any integer; its value modulo 2**64 counts.
        offset: position of the first number, modulo 2**64.
        steps: int64 [count] from `counters`; kept.
    """
    # The seed is hashed first: two seeds that differ by one would otherwise walk the same sequence
    # one step apart.
    start = (_mix(_mix(seed & _WORD) ^ _WORD) + offset * _WEYL) & _WORD
    z = steps + _signed(start)
    shifted = torch.empty_like(z)
    for places, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        z.bitwise_xor_(_shift_right(z, places, shifted))
        if factor is not None:
            z.mul_(_signed(factor))
    return _shift_right(z, 11, shifted).double().mul_(2.0**-53)


def keep_mask(seed: int, dropout_p: float, rows: Tensor, columns: Tensor) -> Tensor:
    """Return bool `[*rows.shape, columns]`: True, with probability 1 − dropout_p, where a weight is
    kept.

    With `mix` on 32-bit words: s = mix(mix(seed mod 2³²) ^ (seed div 2³² mod 2³²)), r = mix(s ^
    (row mod 2³²)), x = mix(r ^ (column · 0x9E3779B1 mod 2³²)); kept if x ≥ ⌊dropout_p · 2³²⌋.

    Args:
        seed: any integer; its value modulo 2**64 counts.
        dropout_p: from 0 to 1.
        rows: int64, any shape.
        columns: int64, one dimension.
    """
    r = _mix32(seed_word(seed) ^ (rows & _HALF))
    return _mix32(r[..., None] ^ (columns * 0x9E37_79B1 & _HALF)) >= least_kept(dropout_p)


def seed_word(seed: int) -> int:
    """s of `keep_mask`, which is the same in all rows: what a kernel is handed."""
    return _mix32(_mix32(seed & _HALF) ^ (seed >> 32 & _HALF))


def least_kept(dropout_p: float) -> int:
    """The least x of `keep_mask` that is kept, from 0 to 2³²."""
    return int(dropout_p * 2**32)


def _mix32(x: _Word) -> _Word:
    """Hash a 32-bit word, or an int64 tensor of them."""
    x = (x ^ (x >> 16)) * 0x7FEB_352D & _HALF
    x = (x ^ (x >> 15)) * 0x846C_A68B & _HALF
    return x ^ (x >> 16)


def _shift_right(z: Tensor, places: int, out: Tensor) -> Tensor:
    """Write z shifted as an unsigned number, which torch's shift is not, into out."""
    return torch.bitwise_right_shift(z, places, out=out).bitwise_and_((1 << (64 - places)) - 1)


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _FIRST) & _WORD
    z = ((z ^ (z >> 27)) * _SECOND) & _WORD
    return z ^ (z >> 31)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
