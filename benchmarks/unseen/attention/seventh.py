"""The seventh set of faults of attention, small: mistakes as in common kinds of kernel, and ten
drawn from the sixth set's grid by another seed. What is right was set down before anything ran.
All err more than 1.5 × their sound twin
(`python -m benchmarks.unseen.draw attention.seventh --check`).
"""

# ruff: noqa: ARG002, D101, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import sixth_grid
from benchmarks.unseen.attention.fifth_kernel import LOG2_E, Kernel, attention
from benchmarks.unseen.attention.sixth_kernel import Divided, Kept

FAULTS: list[Fault] = []
SOUND: list[Fault] = []


def fault(right: str, dtype: str = "bfloat16"):
    def put(kind: type[Kernel]) -> type[Kernel]:
        FAULTS.append(Fault(kind.__name__, frozenset(right.split()), attention(kind), dtype,
                            frozenset({"elements"})))  # fmt: skip
        return kind

    return put


def sound(kind: type[Kernel], dtype: str = "bfloat16") -> type[Kernel]:
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
    return kind


@fault("softcap backward-scores", "float16")
class slope_of_the_cap_forgotten(Kernel):
    """As in a backward pass older than the cap: dS is not multiplied by 1 − tanh²."""

    def slope(self, q, k):
        return 1.0


@fault("causal-mask mask")
class diagonal_hidden(Kernel):
    """As in a mask with < for ≤, in both passes; the first row sees itself."""

    def causal(self, i, j, back):
        return (j < i) | ((i == 0) & (j == 0))


@fault("window backward-mask mask causal-mask")
class window_shifted_backward(Kernel):
    """As in a backward pass whose window lies one key further left."""

    def window(self, i, j, back):
        return super().window(i, j + (1 if back else 0), back)


@fault("grad-accumulator grad-tail tiles-skipped other-data")
class dq_overwritten(Kernel):
    """As in a kernel that stores dQ of each block of keys where it has to be added."""

    def add(self, name, total, part, rows, cols):
        return part if name == "dq_acc" else total + part


@fault("scale backward-scores")
class dk_scaled_twice(Kernel):
    """As in a kernel whose queries were scaled before dK is scaled again."""

    def key_gradients(self, cols):
        dk, dv = super().key_gradients(cols)
        return dk * self.at.scale, dv


@fault("lse-other lse backward-weights", "float32")
class lse_in_nats_read_in_base_2(Kernel):
    """As in a forward pass that stores ln and a backward pass that reads log2."""

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        return o, lse / LOG2_E


@fault("group-sum key-heads", "float16")
class gradient_of_one_head_of_the_group(Kernel):
    """As in grouped kernels whose last head of a group overwrites dK and dV."""

    def group(self, grad):
        return grad.unflatten(1, (-1, self.at.groups))[:, :, -1]


@fault("rescale accumulator unnormalized weights-row-sum")
class output_not_rescaled(Kernel):
    """As in an online softmax that rescales the sum of the row alone."""

    def add_values(self, acc, a, p, v):
        return acc + self.at.low(p) @ v


@fault("row-sum weights-row-sum unnormalized weights-disagree")
class sum_of_half_the_lanes(Kernel):
    """As in a reduction by shuffles that lacks its last step: even columns, doubled."""

    def add_row(self, l, a, p):
        return l * a + 2 * p[..., ::2].sum(-1, keepdim=True)


@fault("no-delta delta")
class delta_of_the_first_half(Kernel):
    """As in a kernel whose δ is of the features that one block holds."""

    def delta(self, do, o):
        half = do.shape[-1] // 2
        return super().delta(do[..., :half], o[..., :half])


@fault("mask")
class bias_without_log2_e(Kernel):
    """As in a kernel in base 2 that adds a bias given in nats."""

    def bias(self, s, mask, back):
        return s + mask.float()


@fault("sinks row-sum")
class sink_without_its_maximum(Kernel):
    """As in a kernel that adds exp(sink) at the end, the maximum not taken off."""

    def begin(self, q, first=True):
        return super().begin(q, False)

    def finish(self, m, l, acc, rows):
        if self.at.sinks is not None:
            l = l + torch.exp2(self.at.sinks.view(1, -1, 1, 1) * LOG2_E)
        return super().finish(m, l, acc, rows)


DRAWN: tuple[tuple[str, str, str, str, str], ...] = (
    ("normalized", "clamp", "later_sequences", "kept", "float32"),
    ("b_v", "exchanged", "last_block", "tiles", "bfloat16"),
    ("weights", "flush", "everywhere", "tiles", "bfloat16"),
    ("b_weights", "toward_zero", "everywhere", "divided", "bfloat16"),
    ("b_scores", "clamp", "last_block", "tiles", "bfloat16"),
    ("row_max", "clamp", "everywhere", "tiles", "float16"),
    ("dk", "clamp", "upper_half", "tiles", "bfloat16"),
    ("product", "neighbor", "odd_heads", "divided", "float16"),
    ("do", "off_by_one", "upper_half", "kept", "float32"),
    ("b_v", "codes", "first_block", "tiles", "bfloat16"),
)
FAULTS += [sixth_grid.fault(*one) for one in DRAWN]


# --- sound kernels, written otherwise
@sound
class small_tiles(Kernel):
    rows, cols = 16, 48


@sound
class keys_from_the_end(Divided):
    def key_blocks(self, rows):
        return super().key_blocks(rows)[::-1]


sound(small_tiles, "float16")
sound(Kept, "float16")
