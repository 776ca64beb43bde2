"""The inputs that a kernel is asked on to find out what it does: small, and each telling apart what
another leaves together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from halfulp.calls import Call, Result, Sees
from halfulp.targets.manner import APART, VALUES, laid_out

SMALL = 200_000  # pairs of queries and keys
FLAT = 16  # tokens of a call whose scores are one number
Draw = Callable[[torch.Generator], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Trial:
    """One call with the gradient that reaches its out; `name` stands for it in caches and
    reports.
    """

    name: str
    call: Call
    grad_out: Tensor
    about: str = ""  # what is telling in it

    @property
    def manner(self) -> str:
        """In which memory a kernel is given it: `targets.manner`."""
        q, v, do = self.call.query, self.call.value, self.grad_out
        alike = q.is_contiguous() == v.is_contiguous()
        lies = "contiguous" if q.is_contiguous() else "transposed"
        lies = lies if alike else VALUES
        lies = lies if q.stride(-1) == 1 else APART
        return f"{lies}/{'contiguous' if do.is_contiguous() else 'transposed'}/once"


Run = Callable[[Trial], Result | None]
"""A kernel, asked for a trial's results; None where it gives none."""


def _operands(
    g: torch.Generator,
    heads: tuple[int, int, int],
    lengths: tuple[int, int],
    widths: tuple[int, int],
) -> dict[str, Any]:
    """Standard normal operands: (batch, query heads, key heads), (queries, keys), (D, D_v)."""
    (b, h, hk), (n, nk), (d, dv) = heads, lengths, widths
    return {
        "query": torch.randn(b, h, n, d, generator=g),
        "key": torch.randn(b, hk, nk, d, generator=g),
        "value": torch.randn(b, hk, nk, dv, generator=g),
        "grad_out": torch.randn(b, h, n, dv, generator=g),
    }


def _plain(g: torch.Generator) -> dict[str, Any]:
    return _operands(g, (1, 2, 2), (192, 192), (64, 64))


def _sharp(g: torch.Generator) -> dict[str, Any]:
    """Few keys carry a row, scores lie around −40, values have one sign, all keys share a
    feature.
    """
    x = _plain(g)
    x["query"] *= 2.5
    x["query"][..., 0], x["key"][..., 0] = 18.0, -18.0
    x["value"] = x["value"].abs() + 0.5
    return x


def _rising(g: torch.Generator) -> dict[str, Any]:
    """Scores rise with the key's position, so that the running maximum changes in every block."""
    x = _plain(g)
    x["query"][..., 0] = 4.0
    x["key"][..., 0] = torch.linspace(-10, 10, 192) * math.sqrt(64) / 4.0
    return x


def _small(g: torch.Generator) -> dict[str, Any]:
    """Values and gradients so small that fp16 loses them, rows that average over all keys."""
    x = _plain(g)
    x["query"] *= 0.25
    x["value"] *= 2.0**-14
    x["grad_out"] *= 2.0**-19
    return x


def _masked(g: torch.Generator) -> dict[str, Any]:
    """A boolean mask of each head and sequence, with rows that may attend to nothing."""
    x = _operands(g, (2, 3, 3), (80, 80), (32, 32))
    mask = torch.rand(2, 3, 80, 80, generator=g) > 0.3
    mask[:, :, ::27] = False
    return x | {"sees": Sees(mask=mask)}


def _biased(g: torch.Generator) -> dict[str, Any]:
    """An additive mask of another slope in each head (ALiBi)."""
    x = _operands(g, (2, 3, 3), (75, 75), (32, 32))
    i = torch.arange(75.0)
    slopes = 2.0 ** -(1 + torch.arange(3.0))[:, None, None]
    return x | {"sees": Sees(mask=(-(i[:, None] - i).abs() * slopes)[None])}


def _softcap(g: torch.Generator) -> dict[str, Any]:
    x = _operands(g, (1, 2, 2), (96, 96), (32, 32))
    x["query"] *= 3.0
    return x | {"softcap": 5.0, "sees": Sees(causal=True)}


def _capped_far(g: torch.Generator) -> dict[str, Any]:
    """Scores 100 times as far from 0 as they are capped, so that all are one of two numbers."""
    x = _operands(g, (1, 2, 2), (70, 70), (64, 64))
    x["query"], x["key"] = torch.zeros_like(x["query"]), torch.zeros_like(x["key"])
    x["query"][..., 0] = torch.where(torch.rand(70, generator=g) > 0.5, 20.0, -20.0)
    x["key"][..., 0] = torch.where(torch.rand(70, generator=g) > 0.5, 40.0, -40.0)
    return x | {"softcap": 1.0}


def _sinks(g: torch.Generator) -> dict[str, Any]:
    x = _operands(g, (1, 3, 3), (96, 96), (32, 32))
    return x | {"sinks": torch.tensor([3.0123, 5.9877, -1.0093]), "sees": Sees(causal=True)}


def _deep(n: int, sees: Sees, g: torch.Generator) -> dict[str, Any]:
    """Scores around −150: exp(−lse) is no float32, and a finite number for −∞ lies above them."""
    x = _operands(g, (1, 2, 2), (n, n), (64, 64))
    x["query"][..., 0], x["key"][..., 0] = 34.0, -34.0
    return x | {"sees": sees}


def _biased_wide(g: torch.Generator) -> dict[str, Any]:
    """A mask whose rows, and whose size, no small number holds."""
    x = _operands(g, (1, 2, 2), (150, 300), (32, 32))
    return x | {"sees": Sees(mask=torch.randn(1, 2, 150, 300, generator=g))}


def _many(g: torch.Generator) -> dict[str, Any]:
    """More heads than a GPU has processors, so that programs must go over several."""
    return _operands(g, (14, 19, 19), (8, 8), (32, 32))


def _strided(g: torch.Generator) -> dict[str, Any]:
    """Operands and dO that lie as [B, N, H, D] in memory."""
    x = _operands(g, (2, 3, 3), (48, 48), (32, 32))
    return {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in x.items()}


def _strided_operands(g: torch.Generator) -> dict[str, Any]:
    """Operands that lie so, and a dO that does not."""
    x = _strided(g)
    return x | {"grad_out": x["grad_out"].contiguous()}


def _strided_values(g: torch.Generator) -> dict[str, Any]:
    """Values that lie so, and nothing else."""
    x = _operands(g, (2, 3, 3), (48, 48), (32, 32))
    return x | {"value": x["value"].transpose(1, 2).contiguous().transpose(1, 2)}


def _apart(g: torch.Generator) -> dict[str, Any]:
    """Operands of which every second element in memory is a feature."""
    return _operands(g, (2, 2, 2), (48, 48), (32, 32)) | {"memory": APART}


def _unequal(small: str, large: str, g: torch.Generator) -> dict[str, Any]:
    """Scores as always, of an operand that float16 has about six bits for, and one so large that
    float16 just holds it, times the scale as well.
    """
    x = _operands(g, (1, 2, 2), (96, 96), (64, 64))
    # of one sign in each feature: what adds up at random is no score
    sign = torch.where(torch.rand(64, generator=g) > 0.5, 1.0, -1.0)
    each = torch.randn(1, 2, 96, 1, generator=g)
    x[small] = x[small].abs() * sign * 2.0**-18
    x[large] = (1 + 0.3 * x[large]) * each * sign * 3000.0
    return x | {"scale": 2.0}


def _zeros(g: torch.Generator) -> dict[str, Any]:
    """The last sequence is shorter, and zeros behind its end, as padding is."""
    x = _operands(g, (2, 2, 2), (192, 192), (32, 32))
    for operand in ("query", "key", "value"):
        x[operand][1, :, 40:] = 0.0
    return x


def _of(
    heads: tuple[int, int, int], lengths: tuple[int, int], widths: tuple[int, int], **options: Any
) -> Draw:
    """Standard normal operands with options."""
    return lambda g: _operands(g, heads, lengths, widths) | options


def _given(heads: tuple[int, int, int], n: int, *, additive: bool) -> Draw:
    """A mask for all heads, additive ones another for each sequence."""

    def draw(g: torch.Generator) -> dict[str, Any]:
        x, many = _operands(g, heads, (n, n), (32, 32)), heads[0] if additive else 1
        noise = torch.randn(many, 1, n, n, generator=g)
        return x | {"sees": Sees(mask=noise if additive else (noise > -0.5) | torch.eye(n).bool())}

    return draw


def _both(*, additive: bool = True, causal: bool = False, **options: Any) -> Draw:
    """A mask and other options at once."""

    def draw(g: torch.Generator) -> dict[str, Any]:
        x = _operands(g, (1, 2, 2), (56, 72), (32, 32))
        mask = torch.randn(1, 2, 56, 72, generator=g)
        mask = mask if additive else (mask[:, :1] > -0.5) | torch.eye(56, 72).bool()
        return x | {"sees": Sees(causal=causal, mask=mask)} | options

    return draw


def _masked_window(g: torch.Generator) -> dict[str, Any]:
    """A boolean mask and a window at once, as many queries as keys."""
    x = _operands(g, (2, 2, 2), (60, 60), (32, 32))
    mask = (torch.rand(2, 1, 60, 60, generator=g) > 0.3) | torch.eye(60).bool()
    return x | {"sees": Sees(window=(15, 10), mask=mask)}


def _biased_cross(g: torch.Generator) -> dict[str, Any]:
    """An additive mask of each head and sequence whose rows are longer than its columns."""
    x = _operands(g, (2, 2, 2), (66, 90), (32, 32))
    return x | {"sees": Sees(mask=torch.randn(2, 2, 66, 90, generator=g))}


def _padded_keys(last: int, rows: int, g: torch.Generator) -> dict[str, Any]:
    """A mask of each sequence that hides what is past its length, of so many rows."""
    x, lengths = _operands(g, (3, 2, 2), (70, 70), (32, 32)), torch.tensor([70, 41, last])
    mask = (torch.arange(70) < lengths.view(-1, 1, 1, 1)).expand(-1, -1, rows, -1)
    return x | {"sees": Sees(mask=mask.contiguous())}


def _hidden_peaks(above: float, g: torch.Generator) -> dict[str, Any]:
    """What a mask hides scores so far above what it shows, which no weight may come near."""
    x = _operands(g, (1, 2, 2), (70, 70), (64, 64))
    seen = torch.rand(70, generator=g) > 0.3
    x["query"][..., 0], x["key"][..., 0] = 8.0, torch.where(seen, -above / 2, above / 2)
    return x | {"sees": Sees(mask=seen.expand(1, 1, 70, 70).contiguous())}


def _decode_masked(
    heads: tuple[int, int, int], n: int, each: bool, g: torch.Generator
) -> dict[str, Any]:
    """Few queries under a boolean mask, another in each sequence and, or not, of each head."""
    x, of = _operands(g, heads, (n, 90), (32, 32)), heads[1] if each else 1
    return x | {"sees": Sees(mask=torch.rand(heads[0], of, n, 90, generator=g) > 0.4)}


_CAUSAL = Sees(causal=True)
_DRAWS: dict[str, tuple[str, Draw]] = {
    "plain": ("standard normal numbers, blocks whole", _plain),
    "sharp": ("few keys a row, scores around −40, values of one sign", _sharp),
    "rising": ("the maximum grows in every block", _rising),
    "small": ("values and gradients below fp16's normal numbers, diffuse rows", _small),
    "causal": ("causal", _of((1, 2, 2), (192, 192), (64, 64), sees=_CAUSAL)),
    "ragged": ("157 tokens, D = 40", _of((1, 2, 2), (157, 157), (40, 40))),
    "ragged_causal": ("93 tokens, D = 40, causal",
                      _of((1, 2, 2), (93, 93), (40, 40), sees=_CAUSAL)),
    # aligned at the top left
    "cross": ("80 queries, 176 keys, causal",
              _of((1, 2, 2), (80, 176), (32, 32), sees=_CAUSAL)),
    "grouped": ("3 sequences, 6 heads on 2 key heads", _of((3, 6, 2), (64, 80), (32, 32))),
    "masked": ("a boolean mask for each head, empty rows", _masked),
    "biased": ("an additive mask for each head", _biased),
    # not 1/√D, and no power of two
    "scaled": ("scale 0.3", _of((1, 2, 2), (96, 96), (64, 64), scale=0.3)),
    "wide": ("D = 128", _of((1, 2, 2), (96, 96), (128, 128))),
    # fewer queries than a tile has rows
    "decode": ("3 queries, 300 keys, 4 heads on 2 key heads",
               _of((2, 4, 2), (3, 300), (64, 64))),
    "window": ("causal, 37 keys back",
               _of((1, 2, 2), (150, 150), (32, 32), sees=Sees(causal=True, window=(37, 0)))),
    "softcap": ("causal, scores capped at 5", _softcap),
    "sinks": ("causal, a sink for each head", _sinks),
    "long": ("640 tokens", _of((1, 1, 1), (640, 640), (64, 64))),
}  # fmt: skip
_RARER: dict[str, tuple[str, Draw]] = {
    "deep": ("causal, scores around −150", partial(_deep, 48, Sees(causal=True))),
    "deep_ragged": ("77 tokens, scores around −150", partial(_deep, 77, Sees())),
    "biased_wide": ("150 queries, 300 keys, an additive mask for each head", _biased_wide),
    "many": ("266 heads of 8 tokens", _many),
    "grouped_causal": ("causal, 4 heads on 2 key heads",
                       _of((2, 4, 2), (72, 72), (32, 32), sees=_CAUSAL)),
    "fewer_keys": ("causal, 140 queries, 70 keys",
                   _of((1, 2, 2), (140, 70), (32, 32), sees=_CAUSAL)),
    "fewer_keys_seen": ("130 queries, 70 keys", _of((2, 2, 2), (130, 70), (32, 32))),
    "capped_ragged": ("77 queries, 150 keys, scores capped at 2",
                      _of((1, 2, 2), (77, 150), (32, 32), softcap=2.0)),
    "window_both": ("90 queries, 130 keys, 20 back and 10 on",
                    _of((1, 2, 2), (90, 130), (32, 32), sees=Sees(window=(20, 10)))),
    "window_grouped": ("causal, 20 keys back, 4 heads on 2 key heads",
                       _of((1, 4, 2), (77, 77), (32, 32), sees=Sees(causal=True, window=(20, 0)))),
    "sinks_grouped": ("77 queries, 150 keys, 4 heads on 2, a sink for each",
                      _of((2, 4, 2), (77, 150), (32, 32),
                          sinks=torch.tensor([1.0123, 2.0093, 0.0077, 3.0123]))),
    "masked_ragged": ("93 tokens, a boolean mask for all heads",
                      _given((2, 2, 2), 93, additive=False)),
    "biased_grouped": ("70 tokens, an additive mask for each sequence, 4 heads on 2",
                       _given((2, 4, 2), 70, additive=True)),
    "padded_keys": ("3 sequences of 70, 41 and 13 keys, by a mask", partial(_padded_keys, 13, 70)),
    "padded_rows": ("3 sequences of 70, 41 and no keys, by a mask of one row for all queries",
                    partial(_padded_keys, 0, 1)),
    "hidden_peaks": ("what a mask hides scores 200 above the rest", partial(_hidden_peaks, 200.0)),
    "biased_cross": ("66 queries, 90 keys, an additive mask for each head", _biased_cross),
    "other_widths": ("D = 80, of values 48", _of((1, 3, 3), (66, 130), (80, 48))),
    "wide_ragged": ("causal, 150 tokens, D = 96",
                    _of((1, 2, 2), (150, 150), (96, 96), sees=_CAUSAL)),
    "one_query": ("1 query, 200 keys, 4 heads on 2", _of((3, 4, 2), (1, 200), (64, 64))),
    "decode_masked": ("5 queries, 90 keys, a mask for each sequence",
                      partial(_decode_masked, (2, 2, 2), 5, False)),
    "one_query_masked": ("1 query, 4 heads on 2, a mask for each head",
                         partial(_decode_masked, (3, 4, 2), 1, True)),
    "one_query_window": ("1 query, 100 keys, 20 back and 10 on",
                         _of((2, 2, 2), (1, 100), (32, 32), sees=Sees(window=(20, 10)))),
    "as_many_heads": ("6 queries in each of 6 heads, a mask for each",
                      partial(_decode_masked, (2, 6, 6), 6, True)),
    "sequences_causal": ("causal, 3 sequences", _of((3, 2, 2), (48, 48), (32, 32), sees=_CAUSAL)),
    "padded_with_zeros": ("2 sequences, zeros after 40 tokens of the last", _zeros),
    "decode_capped": ("4 queries, 100 keys, scores capped at 2",
                      _of((2, 2, 2), (4, 100), (32, 32), softcap=2.0)),
    "decode_sinks": ("2 queries, 100 keys, a sink for each head",
                     _of((2, 2, 2), (2, 100), (32, 32), sinks=torch.tensor([4.0, 3.0]))),
    "few_tokens": ("17 tokens", _of((2, 3, 3), (17, 17), (64, 64))),
    "long_causal": ("causal, 520 tokens", _of((1, 1, 1), (520, 520), (32, 32), sees=_CAUSAL)),
    "wider_values": ("D = 48, of values 80", _of((1, 3, 3), (66, 130), (48, 80))),
    "capped_far": ("scores of ±100, capped at 1", _capped_far),
    "capped_biased": ("scores capped at 2, an additive mask for each head, scale 0.3",
                      _both(softcap=2.0, scale=0.3)),
    "capped_masked": ("scores capped at 2, a boolean mask for all heads",
                      _both(softcap=2.0, additive=False)),
    "capped_window": ("causal, 15 keys back, scores capped at 3, scale 0.3",
                      _of((1, 2, 2), (60, 60), (32, 32), softcap=3.0, scale=0.3,
                          sees=Sees(causal=True, window=(15, 0)))),
    "masked_window": ("15 keys back and 10 on, a boolean mask for each sequence", _masked_window),
    "sinks_window": ("causal, 15 keys back, a sink for each head, scale 0.3",
                     _of((1, 2, 2), (60, 60), (32, 32), sinks=torch.tensor([1.0, -1.0]), scale=0.3,
                         sees=Sees(causal=True, window=(15, 0)))),
    "sinks_biased": ("an additive mask and a sink for each head, scores capped at 4",
                     _both(softcap=4.0, sinks=torch.tensor([2.0, 0.0]))),
    "causal_biased": ("causal, an additive mask for each head", _both(causal=True)),
    "causal_masked": ("causal, a boolean mask for all heads", _both(additive=False, causal=True)),
    "four_key_heads": ("8 heads on 4 key heads", _of((2, 8, 4), (40, 40), (32, 32))),
    "one_key_head": ("4 heads on 1 key head", _of((2, 4, 1), (48, 72), (32, 32))),
    "widest": ("D = 256", _of((1, 2, 2), (70, 70), (256, 256))),
    "strided": ("[B, N, H, D] in memory", _strided),
    "strided_values": ("values alone [B, N, H, D] in memory", _strided_values),
    "features_apart": ("every second element in memory a feature", _apart),
    "small_queries": ("queries around 2⁻¹⁸, keys around 3000", partial(_unequal, "query", "key")),
    "small_keys": ("keys around 2⁻¹⁸, queries around 3000", partial(_unequal, "key", "query")),
    "strided_operands": ("[B, N, H, D] in memory, but for dO", _strided_operands),
}  # fmt: skip


_OF_WIDER = ("small_queries", "small_keys")
"""What float16 itself has too few digits for."""

_SIMPLE = ("plain", "causal", "wide", "scaled", "ragged", "ragged_causal", "cross", "rising",
           "sharp", "grouped", "masked", "biased", "softcap", "window", "sinks", "small", "deep",
           "many", "decode", "long")  # fmt: skip


def simplicity(name: str) -> int:
    """How far a trial is from the simplest; those of callers come first."""
    return _SIMPLE.index(name) if name in _SIMPLE else -1


@lru_cache(maxsize=8)
def panel(dtype: torch.dtype, seed: int = 0, *, rarer: bool = False) -> tuple[Trial, ...]:
    """The trials in `dtype`, the same bits on every machine; the rarer ones show what only calls
    like them have.
    """
    draws = _RARER if rarer else _DRAWS
    left = _OF_WIDER if dtype == torch.float16 else ()
    return tuple(_trial(name, about, draw, dtype, seed)
                 for name, (about, draw) in draws.items() if name not in left)  # fmt: skip


def _trial(name: str, about: str, draw: Draw, dtype: torch.dtype, seed: int) -> Trial:
    number = sum(ord(c) * 257**i for i, c in enumerate(name)) * 1000003 + seed
    x = draw(torch.Generator().manual_seed(number % 2**63))
    operands = {part: x[part].to(dtype) for part in ("query", "key", "value")}
    if "memory" in x:
        operands = {part: laid_out(t, x["memory"]) for part, t in operands.items()}
    call = Call(
        **operands,
        sees=x.get("sees", Sees()),
        scale=x.get("scale", 1 / math.sqrt(x["query"].shape[-1])),
        softcap=x.get("softcap", 0.0),
        sinks=x.get("sinks"),
    )
    if name == "small" and dtype == torch.float16:
        x["grad_out"] *= 2.0**10  # what bf16 holds with all its bits, fp16 does not
    return Trial(name, call, x["grad_out"].to(dtype), about)


def lying_at(level: float, dtype: torch.dtype, hidden: str, scale: float = 1.0) -> Trial:
    """A small call of which all scores are one number, about `level`, below 0, in any format, and
    before the scale as well where this is 1. What is hidden is so by causality, by a window as
    well, or by a mask; no gradient reaches rows that see more than the first quarter of the keys.
    """

    def draw(g: torch.Generator) -> dict[str, Any]:
        x = _operands(g, (1, 2, 2), (FLAT, FLAT), (64, 64))
        x["query"], x["key"] = torch.zeros_like(x["query"]), torch.zeros_like(x["key"])
        number = torch.tensor(level / scale / 128).bfloat16()
        x["query"][..., 0], x["key"][..., 0] = 128.0, float(number)
        x["grad_out"][:, :, FLAT // 4 :] = 0
        later = torch.rand(FLAT, FLAT, generator=g) > 0.5
        later[: FLAT // 4, FLAT // 4 :] = False
        sees = {
            "causal": Sees(causal=True),
            "window": Sees(causal=True, window=(FLAT // 4, 0)),
            "mask": Sees(mask=(later | torch.eye(FLAT).bool())[None, None]),
            "nothing": Sees(),
        }
        return x | {"scale": scale, "sees": sees[hidden]}

    return _trial(f"{hidden} at {level:g}", f"scores of {level:g}", draw, dtype, 0)


def with_peaks(above: float, dtype: torch.dtype) -> Trial:
    """A small call of which a boolean mask hides what scores so far above the rest."""
    draw = partial(_hidden_peaks, above)
    return _trial(f"hidden {above:g} above", f"{above:g} above", draw, dtype, 0)


def some_heads(trial: Trial, most: int) -> Trial:
    """The first heads of the first sequence, at most so many, whole groups, of a large trial; masks
    go along.
    """
    call, groups = trial.call, trial.call.groups
    if math.prod(call.scores_shape) <= SMALL:
        return replace(trial, call=replace(call, shape=None))
    keys = max(1, min(most // groups, call.key.shape[1]))
    heads = keys * groups
    mask = call.sees.mask
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
        mask = mask[:1, :heads] if mask.shape[1] > 1 else mask[:1]
    cut = replace(
        call,
        query=call.query[:1, :heads],
        key=call.key[:1, :keys],
        value=call.value[:1, :keys],
        sees=replace(call.sees, mask=mask),
        sinks=None if call.sinks is None else call.sinks[:heads],
        shape=None,
    )
    return Trial(trial.name, cut, trial.grad_out[:1, :heads], trial.about)
