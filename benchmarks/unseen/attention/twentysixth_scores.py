"""The twenty-sixth set's faults of precision and the backward pass (twentysixth.py has the others,
and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import twentysixth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, bf16, fp16, load, to
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

FAULTS: list[Fault] = []
e5m2 = to(torch.float8_e5m2)
NORMAL = torch.tensor([0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0691, 2.7326])
LAPLACE = torch.tensor([0.0663, 0.2221, 0.4184, 0.6604, 0.9703, 1.3981, 2.0502, 3.2014])


# --- precision
@fault(FAULTS, "accumulator products", "float16")
class half_sums_folded_every_sixteen_keys(ForwardAlone):
    """ikawrakow/ik_llama.cpp PR 2151: weights times values are added up in fp16, and what sixteen
    keys have come to is added to a sum in fp32.
    """

    def add_values(self, acc, a, p, v):
        p, v = self.at.low(p).unflatten(-1, (-1, 16)), v.unflatten(2, (-1, 16))
        part = torch.zeros_like(acc)[:, :, :, None]
        for key in range(16):
            part = fp16(part + fp16(p[..., key, None] * v[:, :, None, :, key]))
        return acc * a + part.sum(3)


@fault(FAULTS, "exponential", "float32")
class exponential_by_the_bits_of_its_argument(ForwardAlone):
    """sonos/tract PR 2318: the softmax is made with Schraudolph's exponential, which takes the bits
    of a line for those of a power of two.
    """

    @staticmethod
    def power(x):
        bits = ((x.clamp_min(-126.0) + 127) * 2**23 - 366393).to(torch.int32)
        return torch.where(x == -INF, 0.0, bits.view(torch.float32))

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = self.power(s - safe), torch.exp2(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "scores prescaled weights-normalized")
class every_step_of_the_math_backend_in_16_bits(ways.Whole):
    """pytorch/pytorch PR 128922: the math backend keeps all that lies between its operations in the
    operands' 16 bits: Q and K by the root of the scale, their product, and the weights.
    """

    def load_query(self, name, x, part):
        return self.at.low(super().load_query(name, x, part) * self.at.scale**0.5)

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        return self.at.low(found * self.at.scale**0.5) if name == "k" else found

    def product(self, q, k, back):
        return self.at.low(super().product(q, k, back))

    def scaled(self, s, rows, cols, back):
        return s * LOG2_E


@fault(FAULTS, "operand", "float16")
class cache_of_two_bits_behind_the_point(ForwardAlone):
    """vllm-project/vllm PR 2279: keys and values lie in the cache as E5M2, without a scale."""

    def load_key(self, name, x, part):
        return e5m2(super().load_key(name, x, part))


@fault(FAULTS, "operand", "float16")
class codes_read_by_the_table_of_another_distribution(ForwardAlone):
    """TheTom/llama-cpp-turboquant issue 203: keys and values are codes of four bits beside a norm;
    Vulkan reads them by a table of centroids that is not the one they were made with.
    """

    def load_key(self, name, x, part):
        x = super().load_key(name, x, part)
        norm = x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
        edges = (NORMAL[1:] + NORMAL[:-1]) / 2
        code = torch.bucketize((x / norm).abs(), edges)
        return LAPLACE[code] * x.sign() * norm


@fault(FAULTS, "products scores", "float16")
class queries_and_keys_multiplied_into_half(ForwardAlone):
    """kekzl/imp PR 643: the matrix instruction for Q Kᵀ has an accumulator of fp16, to which
    sixteen features are added at a time.
    """

    def product(self, q, k, back):
        total = torch.zeros(())
        for part in range(0, q.shape[-1], 16):
            there = slice(part, part + 16)
            total = fp16(total + q[..., there] @ k[..., there].mT)
        return total


# --- precision of the backward pass
@fault(FAULTS, "lse backward-weights")
class row_sums_of_a_fixed_gauge_for_the_way_back(Kernel):
    """facebookexperimental/triton PR 3408: the fast path's row sums are good enough for O, and too
    coarse for the softmax's statistics that the backward pass takes from them.
    """

    def row(self, rows):
        self.memory["sum"] = 0.0
        return super().row(rows)

    def add_row(self, l, a, p):
        total = bf16(torch.as_tensor(self.memory["sum"]) * a)
        if isinstance(self.memory["sum"], float):
            total = l * a
        for eight in p.split(8, -1):
            total = bf16(total + bf16(eight.sum(-1, keepdim=True)))
        self.memory["sum"] = total
        return super().add_row(l, a, p)

    def finish(self, m, l, acc, rows):
        return super().finish(m, l, acc, rows)[0], m + self.memory["sum"].log2()


@fault(FAULTS, "grad-accumulator")
class dq_added_to_one_bf16_image(Kernel):
    """AMD-AGI/Primus-Turbo PR 480: what blocks of keys give to dQ is added to one image in bf16 by
    packed atomics, in place of a workspace in fp32.
    """

    cols = 32

    def add(self, name, total, part, rows, cols):
        if name == "dq_acc":
            return bf16(total + bf16(part))
        return super().add(name, total, part, rows, cols)


# --- the backward pass
@fault(FAULTS, "backward-weights other-data", "float16")
class weights_stored_over_scores_not_yet_read(Kernel):
    """facebookexperimental/triton PR 1992: weights are stored where the scores lie, and warps do
    not wait: of some tiles, here an odd head's, 32 by 32 scores are weights of a faster warp.
    """

    def weights_again(self, s, lse):
        p, stale = super().weights_again(s, lse), s.clone()
        stale[:, 1::2, 32:, 32:] = p[:, 1::2, 32:, :32]
        return torch.where(s == -INF, 0.0, super().weights_again(stale, lse))


@fault(FAULTS, "backward-weights mask", "float16")
class bias_read_where_ds_was_written(Kernel):
    """HKUSTDial/flash-sparse-attention PR 145: the bias and dS share their place in shared memory,
    and from the second tile on the bias that is added is dS of the tile before.
    """

    def again(self, rows, cols, which):
        if rows.start == 0 if which == "queries" else self.memory.get("cols") != cols.start:
            self.memory["ds"] = None
        self.memory["cols"] = cols.start
        found = super().again(rows, cols, which)
        self.memory["ds"] = found[-1]
        return found

    def bias(self, s, mask, back):
        stale = self.memory.get("ds") if back else None
        return super().bias(s, mask if stale is None else stale, back)


@fault(FAULTS, "other-data")
class ds_under_the_store_of_dk(Kernel):
    """Dao-AILab/flash-attention PR 2035: dK is staged for its store where dS lies, which the last
    product of dQ still reads: dK is right, and the last tile's dQ is not.
    """

    def again(self, rows, cols, which):
        *others, ds = super().again(rows, cols, which)
        if which == "queries" and rows.stop >= self.at.n:
            dk = self.at.low(self.key_gradients(cols)[0])
            ds, wide = ds.clone(), min(dk.shape[-1], ds.shape[-1])
            ds[..., :wide] = dk[..., :wide]
        return (*others, ds)


@fault(FAULTS, "other-data grad-tail")
class staged_dk_overwritten_before_it_is_added(Kernel):
    """NVIDIA/cudnn-frontend PR 1049: no barrier keeps threads from writing a block's dK to where
    the one before is still read from: of some rows, here every fourth, the next is added instead.
    """

    def key_gradients(self, cols):
        _, dv = super().key_gradients(cols)
        parts = []
        for rows in self.query_blocks(cols):
            q, _, _, _, ds = self.again(rows, cols, "keys")
            parts.append(ds.mT @ q)
        raced = (torch.arange(self.cols) % 4 == 3)[:, None]
        dk = torch.zeros_like(load(self.at.k, cols))
        for part, later in zip(parts, parts[1:] + parts[-1:], strict=True):
            dk = dk + torch.where(raced, later, part)
        return dk * self.at.scale, dv


@fault(FAULTS, "layout other-data", "float16")
class ds_of_dk_not_transposed_within_its_blocks(Kernel):
    """fla-org/flash-linear-attention PR 826: on Hopper dSᵀ, in the layout that a transposed result
    of a product has, is multiplied by Q wrongly; here every 16 by 16 of it lies as in dS.
    """

    def again(self, rows, cols, which):
        *others, ds = super().again(rows, cols, which)
        return (*others, ways.swapped(ds) if which == "keys" else ds)


class NotCausal(Kernel):
    """A kernel that may forget on the way back that it is causal."""

    def forgets(self):
        return False

    def backward(self):
        self.at.causal = self.at.causal and not self.forgets()
        return super().backward()


@fault(FAULTS, "backward-mask")
class calls_with_sinks_not_causal_on_the_way_back(NotCausal):
    """AMD-AGI/Primus-Turbo PR 262, review: the backward pass for sinks is given the window's left
    side alone, and ignores whether the call is causal.
    """

    def forgets(self):
        return self.at.sinks is not None


@fault(FAULTS, "backward-mask", "float16")
class causal_whatever_is_asked_on_the_way_back(Kernel):
    """triton-lang/triton issue 5660: the tutorial's gradients are right where it is causal, and far
    off where it is not: its backward pass knows no other stage.
    """

    def backward(self):
        self.at.causal = True
        return super().backward()


@fault(FAULTS, "masked-row nan-escapes non-finite")
class hidden_rows_are_no_numbers_on_the_way_back(Kernel):
    """tenstorrent/tt-metal issue 53207: for a row that sees no key the backward pass takes −∞ off
    −∞, and all that its weights enter is NaN.
    """

    def weights_again(self, s, lse):
        return torch.exp2(s - lse)


@fault(FAULTS, "backward-weights other-data lse-other", "float16")
class statistics_read_as_if_packed(Kernel):
    """NVIDIA/cudnn-frontend PR 304: the backward pass does not read the strides of lse, which lies
    by tokens and heads, and takes it for packed by heads and tokens.
    """

    def backward(self):
        lse = self.at.lse
        self.at.lse = lse.transpose(1, 2).reshape(lse.shape)
        return super().backward()


@fault(FAULTS, "unwritten")
class workspace_too_small_for_head_major_statistics(Kernel):
    """NVIDIA/cudnn-frontend PR 462: where lse lies by heads, too little room is reserved for sums
    of the softmax, and dQ, dK and dV are all 0.
    """

    def backward(self):
        return tuple(torch.zeros_like(x) for x in super().backward())
