"""Number formats as plain data.

Everything else in halfulp asks one question of a format: which values does it hold, and what
becomes of a number that it does not hold? `Format` answers with seven numbers and three policies,
and nothing here computes on tensors. The policies are fields because implementations disagree on
them: torch saturates a float8_e4m3fn that overflows, ml_dtypes makes it NaN, and both call it e4m3.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, TypeAlias, get_args

import torch

Rounding: TypeAlias = Literal[
    "nearest_even", "nearest_away", "toward_zero", "up", "down", "stochastic"
]
Overflow: TypeAlias = Literal["infinity", "saturate", "nan"]
Specials: TypeAlias = Literal["ieee", "nan_only", "none"]

# Stands for "2**(exponent_bits - 1) - 1" until __post_init__ has put the number there.
_IEEE_BIAS: Final = -(2**31)

# A policy must end in something that the format's codes can say.
_OVERFLOWS: Final[dict[Specials, tuple[Overflow, ...]]] = {
    "ieee": ("infinity", "saturate", "nan"),
    "nan_only": ("saturate", "nan"),
    "none": ("saturate",),
}


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: sign, exponent and fraction, with what happens at both ends
    of its range.

    Values are (-1)**s * 2**(E - bias) * (1 + f / 2**mantissa_bits) for exponent fields E > 0 and
    (-1)**s * 2**(1 - bias) * f / 2**mantissa_bits for E = 0, as in IEEE 754. A format must fit into
    float64.

    Raises:
        ValueError: a field is out of range or two fields contradict each other; one line says
            which.
    """

    name: str  # how it is printed and parsed
    exponent_bits: int  # width of the exponent field, 1 to 11
    mantissa_bits: int  # width of the stored fraction, 0 to 52; the leading one is not stored
    # subtracted from the exponent field; by default 2**(exponent_bits - 1) - 1
    bias: int = _IEEE_BIAS
    # False flushes to zero: a number is first rounded as if subnormals were there, and what is then
    # still smaller than min_normal becomes a zero of the same sign. So a number that rounds up to
    # min_normal survives.
    subnormals: bool = True
    # What the top codes hold. "ieee": the top exponent is infinity and NaN. "nan_only": all ones is
    # NaN, there is no infinity, and the rest of the top exponent is numbers. "none": every code is
    # a number.
    specials: Specials = "ieee"
    # What a number becomes whose rounded magnitude exceeds max. "infinity": infinity. "saturate":
    # max, infinities too. "nan": NaN; an infinity stays one where the format has it. Directed
    # rounding towards zero stops at max whatever the policy, as IEEE 754 has it.
    overflow: Overflow = "infinity"
    # how numbers are put into it; a recipe replaces it per step
    rounding: Rounding = "nearest_even"

    def __repr__(self) -> str:
        """Return the constant's name for a built-in format: signatures that hold thirty of them
        stay readable.
        """
        if self in SCALAR_FORMATS:
            return self.name.upper()
        default = custom(self.exponent_bits, self.mantissa_bits)
        said = [repr(self.name), str(self.exponent_bits), str(self.mantissa_bits)]
        for field in fields(self)[3:]:
            value = getattr(self, field.name)
            if value != getattr(default, field.name):
                said.append(f"{field.name}={value!r}")
        return f"Format({', '.join(said)})"

    def __post_init__(self) -> None:
        _check_choice("exponent_bits", self.exponent_bits, range(1, 12), "an integer from 1 to 11")
        _check_choice("mantissa_bits", self.mantissa_bits, range(53), "an integer from 0 to 52")
        _check_choice(
            "specials", self.specials, get_args(Specials), f"one of {', '.join(get_args(Specials))}"
        )
        _check_choice(
            "rounding", self.rounding, get_args(Rounding), f"one of {', '.join(get_args(Rounding))}"
        )
        allowed = _OVERFLOWS[self.specials]
        described = f"one of {', '.join(allowed)} where specials is {self.specials}"
        _check_choice("overflow", self.overflow, allowed, described)
        if self.bias == _IEEE_BIAS:
            object.__setattr__(self, "bias", _ieee_bias(self.exponent_bits))
        if self.max_exponent < self.min_exponent:
            raise ValueError(
                f"exponent_bits={self.exponent_bits} leaves no normal number where specials is"
                f" {self.specials}; accepted: more exponent bits or specials='none'"
            )
        lowest, highest = self.bias + self.max_exponent - 1023, 1023
        if lowest > highest:
            raise ValueError(
                f"exponent_bits={self.exponent_bits} has more range than float64 where specials is"
                f" {self.specials}; accepted: at most 10"
            )
        if not lowest <= self.bias <= highest:
            raise ValueError(
                f"bias={self.bias} leaves the range of float64; accepted: {lowest} to {highest}"
            )

    @property
    def bits(self) -> int:
        """Width of a code, sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def significand_bits(self) -> int:
        """Precision p: the stored fraction and the leading one."""
        return self.mantissa_bits + 1

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite number."""
        reserved = self.specials == "ieee" or (
            self.specials == "nan_only" and self.mantissa_bits == 0
        )
        return (1 << self.exponent_bits) - 1 - reserved - self.bias

    @property
    def max(self) -> float:
        """Largest finite number."""
        steps_below_two = 2 if self.specials == "nan_only" and self.mantissa_bits > 0 else 1
        return (2.0 - steps_below_two * 2.0**-self.mantissa_bits) * 2.0**self.max_exponent

    @property
    def min_normal(self) -> float:
        """Smallest positive normal number."""
        return 2.0**self.min_exponent

    @property
    def min_subnormal(self) -> float:
        """Spacing of the numbers below min_normal: the smallest positive number, unless subnormals
        are flushed.

        Equal to min_normal in a format without mantissa bits.
        """
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding to nearest in the normal range: half an ulp of one."""
        return 2.0 ** -(self.mantissa_bits + 1)

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The torch dtype with exactly these values, or None. Its own overflow policy may differ
        from this format's.
        """
        if not self.subnormals:
            return None
        return _TORCH_DTYPES.get((self.exponent_bits, self.mantissa_bits, self.bias, self.specials))

    def with_(self, **changes: Any) -> Format:
        """Return a copy with some fields replaced, validated like a new one.

        A new width brings the default bias and the name "eXmY" with it, unless those are given too
        or the bias was not the default one.

        Raises:
            ValueError: an unknown field or a value that the field does not accept.
        """
        known = tuple(field.name for field in fields(self))
        for name, value in changes.items():
            _check_choice(
                "field", name, known, f"one of {', '.join(known)} (value given: {value!r})"
            )
        if self.bias == _ieee_bias(self.exponent_bits) and "exponent_bits" in changes:
            changes.setdefault("bias", _IEEE_BIAS)
        if "exponent_bits" in changes or "mantissa_bits" in changes:
            exponent_bits = changes.get("exponent_bits", self.exponent_bits)
            mantissa_bits = changes.get("mantissa_bits", self.mantissa_bits)
            changes.setdefault("name", f"e{exponent_bits}m{mantissa_bits}")
        return replace(self, **changes)

    def holds(self, dtype: torch.dtype) -> bool:
        """Whether rounding any tensor of this floating-point dtype changes nothing."""
        source = _DTYPE_FORMATS.get(dtype)
        if (
            source is None
            or self.specials != "ieee"
            or self.overflow == "saturate"
            or not self.subnormals
        ):
            return False
        return (
            self.mantissa_bits >= source.mantissa_bits
            and self.max >= source.max
            and self.min_subnormal <= source.min_subnormal
        )

    def __str__(self) -> str:
        return self.name


def custom(exponent_bits: int, mantissa_bits: int, **changes: Any) -> Format:
    """Return a format of any width, named "e5m10" after it; further fields of `Format` by keyword.

    The overflow policy is, unless given, the strongest that the specials allow: infinity, else NaN,
    else saturation.

    Raises:
        ValueError: a width or a field is not accepted.
    """
    specials = changes.get("specials", "ieee")
    default: dict[Any, Overflow] = {"nan_only": "nan", "none": "saturate"}
    overflow = changes.pop("overflow", default.get(specials, "infinity"))
    name = changes.pop("name", f"e{exponent_bits}m{mantissa_bits}")
    plain = Format(name, exponent_bits, mantissa_bits, specials=specials, overflow=overflow)
    changes.pop("specials", None)
    return plain.with_(**changes) if changes else plain


def _ieee_bias(exponent_bits: int) -> int:
    return (1 << (exponent_bits - 1)) - 1


def _check_choice(argument: str, value: object, accepted: object, described: str) -> None:
    if isinstance(value, bool) or value not in accepted:  # type: ignore[operator]
        raise ValueError(f"{argument}={value!r} is not accepted; accepted: {described}")


FP64: Final = Format("fp64", 11, 52)
FP32: Final = Format("fp32", 8, 23)
TF32: Final = Format("tf32", 8, 10)
BF16: Final = Format("bf16", 8, 7)
FP16: Final = Format("fp16", 5, 10)
# OCP 8-bit floating point specification (OFP8) 1.0: e4m3 without infinities (max 448), e5m2 as in
# IEEE 754.
OCP_E4M3: Final = Format("ocp_e4m3", 4, 3, specials="nan_only", overflow="saturate")
OCP_E5M2: Final = Format("ocp_e5m2", 5, 2)
IEEE_E4M3: Final = Format("ieee_e4m3", 4, 3)  # max 240
# Element formats of the OCP microscaling (MX) specification 1.0; all their codes are numbers.
E3M2: Final = Format("e3m2", 3, 2, specials="none", overflow="saturate")
E2M3: Final = Format("e2m3", 2, 3, specials="none", overflow="saturate")
E2M1: Final = Format("e2m1", 2, 1, specials="none", overflow="saturate")

SCALAR_FORMATS: Final = (
    FP64,
    FP32,
    TF32,
    BF16,
    FP16,
    OCP_E4M3,
    OCP_E5M2,
    IEEE_E4M3,
    E3M2,
    E2M3,
    E2M1,
)

_DTYPE_FORMATS: Final = {
    torch.float64: FP64,
    torch.float32: FP32,
    torch.bfloat16: BF16,
    torch.float16: FP16,
    torch.float8_e5m2: OCP_E5M2,
    torch.float8_e4m3fn: OCP_E4M3,
}
_TORCH_DTYPES: Final = {
    (form.exponent_bits, form.mantissa_bits, form.bias, form.specials): dtype
    for dtype, form in _DTYPE_FORMATS.items()
}
