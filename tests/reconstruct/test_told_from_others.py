"""Mistakes in a tiled kernel that look like others: which of them it is."""

import pytest
import torch
from benchmarks.unseen.attention.fifth_kernel import LOG2_E, Kernel, attention, bf16, cut, fp16
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

from halfulp.formats import MXFP4, round_to
from halfulp.reconstruct import reconstruct
from halfulp.reconstruct.weight_ratios import cut_to


class OutThroughHalf(Kernel):
    def finish(self, m, l, acc, rows):
        return self.at.low(fp16(acc / torch.where(l == 0, 1.0, l))), m + l.log2()


class GradientsThroughHalf(Kernel):
    some = (0, 1, 2)

    def backward(self):
        return tuple(fp16(x) if i in self.some else x for i, x in enumerate(super().backward()))


class GradValueThroughHalf(GradientsThroughHalf):
    some = (2,)


class GradientsOfScoresThroughHalf(GradientsThroughHalf):
    some = (0, 1)


class SmallTiles(Kernel):
    rows, cols = 32, 16


class RescaledOutInLow(SmallTiles):
    def add_values(self, acc, a, p, v):
        return super().add_values(acc, bf16(a), p, v)


class RescaledSumInLow(SmallTiles):
    def add_row(self, l, a, p):
        return super().add_row(l, bf16(a), p)


class RescaledInLow(RescaledOutInLow, RescaledSumInLow):
    pass


class LaterKeysUnscaled(Kernel):
    def scaled(self, s, rows, cols, back):
        return s * LOG2_E if cols.start > 0 else super().scaled(s, rows, cols, back)


class DeltaSummedInLow(Kernel):
    def delta(self, do, o):
        total = torch.zeros_like(do[..., :1])
        for i in range(0, do.shape[-1], 16):
            part = slice(i, i + 16)
            total = bf16(total + (do[..., part] * o[..., part]).sum(-1, keepdim=True))
        return total


class GradientsCut(Kernel):
    def backward(self):
        return tuple(cut(x) for x in super().backward())


class SharedOperandsThroughHalf(ForwardAlone):
    """K and V, where heads share them."""

    def load_key(self, name, x, part):
        x = super().load_key(name, x, part)
        return fp16(x) if self.at.groups > 1 else x


class LogarithmByACoarseNumber(Kernel):
    """log₂ l times a ln 2 of eight bits: a quarter of a percent too little."""

    def finish(self, m, l, acc, rows):
        out, _ = super().finish(m, l, acc, rows)
        return out, m + l.log2() * (0.69140625 / 0.6931471805599453)


class ScoresForWeightsInBackward(Kernel):
    def weights_again(self, s, lse):
        return torch.where(s == -torch.inf, 0.0, s / LOG2_E)


class GradientOfWeightsIsThatOfScores(Kernel):
    def grad_scores(self, p, dp, delta, slope):
        return dp * (p > 0) * slope


class OperandsInMxfp4(ForwardAlone):
    """Of Q and K: scores that are off at random, which looks like parts of the keys."""

    def load_query(self, name, x, part):
        return round_to(super().load_query(name, x, part), MXFP4)

    def load_key(self, name, x, part):
        x = super().load_key(name, x, part)
        return round_to(x, MXFP4) if name == "k" else x


class DeltaOfColumns(Kernel):
    def grad_scores(self, p, dp, delta, slope):
        return p * (dp - (p * dp).sum(-2, keepdim=True)) * slope


class RowsSummedKeyByKey(Kernel):
    def add_row(self, l, a, p):
        total = bf16(l * a)
        for term in p.unbind(-1):
            total = bf16(total + term.unsqueeze(-1))
        return total


class ScoresOfDistances(Kernel):
    """A number for each distance, that nobody asked for; of a wave no key has one factor."""

    wave = True

    def scaled(self, s, rows, cols, back):
        distance = (
            torch.arange(cols.start, cols.stop) - torch.arange(rows.start, rows.stop)[:, None]
        )
        by = torch.sin(1.7 * distance) if self.wave else 0.05 * distance
        return super().scaled(s, rows, cols, back) + by * LOG2_E


class ScoresFurther(ScoresOfDistances):
    wave = False


class GradientsThroughE5M2(Kernel):
    def backward(self):
        largest = torch.finfo(torch.float8_e5m2).max
        units = [(x.abs().amax() / largest, x) for x in super().backward()]
        return tuple((x / unit).to(torch.float8_e5m2).float() * unit for unit, x in units)


class NoGradientsOfSeveralHeads(Kernel):
    def backward(self):
        several = self.at.q.shape[1] > 1
        return tuple(torch.zeros_like(x) if several else x for x in super().backward())


class LaterQueriesOfSeveralSequencesLost(Kernel):
    def backward(self):
        if self.at.q.shape[0] > 1:
            self.at.do = self.at.do * (torch.arange(self.at.n) < 16)[:, None]
        return super().backward()


class HiddenRowsAreTheFirstValue(Kernel):
    def finish(self, m, l, acc, rows):
        out, lse = super().finish(m, l, acc, rows)
        return torch.where(l == 0, self.at.v[:, :, :1], out), lse


class BiasOfTheFirstSequence(Kernel):
    """Where all heads share it."""

    def given_mask(self, rows, cols):
        own = self.at.mask
        if own.dtype != torch.bool and own.shape[1] == 1:
            self.at.mask = own[:1]
        found = super().given_mask(rows, cols)
        self.at.mask = own
        return found


class RootsOfTheScaleInForwardAlone(ForwardAlone):
    def product(self, q, k, back):
        root = self.at.scale**0.5
        return self.at.low(q * root) @ self.at.low(k * root).mT

    def scaled(self, s, rows, cols, back):
        return s * LOG2_E


class WeightsCutForTheKeysGradients(Kernel):
    def again(self, rows, cols, which):
        self.memory["keys"] = which == "keys"
        return super().again(rows, cols, which)

    def weights_again(self, s, lse):
        p = super().weights_again(s, lse)
        return cut(p, 13) if self.memory["keys"] else p


class RescaledByAParabola(ForwardAlone):
    cols = 32

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -torch.inf, 0.0, new)
        p, x = torch.exp2(s - safe), (m - safe).clamp_min(-100)
        f = x - x.floor()
        a = torch.ldexp(1 + f * (0.6565 + 0.3435 * f), x.floor().int())
        a = torch.where(m == -torch.inf, 0.0, a)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


class ColumnsOfTheMaskWrap(ForwardAlone):
    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols)
        if cols.start < 256:
            return found
        return super().given_mask(rows, slice(cols.start - 256, cols.stop - 256))


class CoarseScalesOfValues(ForwardAlone):
    """Codes whose scale is a power of two, made with another: V is off by up to √2."""

    def load_key(self, name, x, part):
        y = super().load_key(name, x, part)
        scale = y.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 7
        return (y / scale).round() * torch.exp2(scale.log2().round())


class ScalesOfTheFirstSequenceLost(ForwardAlone):
    def load_key(self, name, x, part):
        y = super().load_key(name, x, part)
        return torch.cat([y[:1] * 9, y[1:]]) if name == "v" else y


class LastTileOfQueriesLost(Kernel):
    def query_blocks(self, cols):
        return [rows for rows in super().query_blocks(cols) if rows.stop <= self.at.n]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("kernel", "cause", "told"),
    [
        (OutThroughHalf, "out", "O passes through float16"),
        (GradientsThroughHalf, "grad-stored", "gradients pass through float16"),
        (GradValueThroughHalf, "grad-stored", "dV passes through float16"),
        (GradientsOfScoresThroughHalf, "grad-stored", "dQ and dK pass through float16"),
        (GradientsCut, "grad-stored", "grad_query=bf16/toward_zero"),
        (OperandsInMxfp4, "operand", "Q and K in MXFP4"),
        (RescaledOutInLow, "rescale", "rescale_of=out"),
        (RescaledSumInLow, "rescale", "rescale_of=row_sum"),
        (RescaledInLow, "rescale", "rescale=bf16"),
    ],
)
def test_the_mistake_is_told_from_others_like_it(kernel, cause, told):
    found = reconstruct(attention(kernel))
    # what does no harm is named as well
    named = [(n.cause.key, n.text) for n in found.causes] or [
        (d.cause, d.text) for d in found.harmless if d.cause]  # fmt: skip
    assert any(told in text for key, text in named if key == cause)
    assert {key for key, _ in named} == {cause}


@pytest.mark.thorough(keep=0)
@pytest.mark.parametrize(
    ("kernel", "cause"),
    [
        (LaterKeysUnscaled, "scale"),
        (DeltaSummedInLow, "delta"),
        (DeltaOfColumns, "no-delta"),
        (LogarithmByACoarseNumber, "lse"),
        (ScoresForWeightsInBackward, "backward-weights"),
        (GradientOfWeightsIsThatOfScores, "no-delta"),
        (RowsSummedKeyByKey, "row-sum"),
        (ScoresOfDistances, "mask"),
        (ScoresFurther, "mask"),
        (GradientsThroughE5M2, "grad-stored"),
        (NoGradientsOfSeveralHeads, "unwritten"),
        (LaterQueriesOfSeveralSequencesLost, "grad-tail"),
        (HiddenRowsAreTheFirstValue, "masked-row"),
        (BiasOfTheFirstSequence, "mask"),
    ],
)
def test_what_is_read_is_told_from_what_it_looks_like(kernel, cause):
    found = reconstruct(attention(kernel))
    named = [n.cause.key for n in found.causes] + [p.cause for p in found.places]
    assert named[0] == cause


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("kernel", "cause", "dtype"),
    [
        (RootsOfTheScaleInForwardAlone, "prescaled", "bfloat16"),
        (SharedOperandsThroughHalf, "operand", "float32"),
        (WeightsCutForTheKeysGradients, "probabilities", "float32"),
        (RescaledByAParabola, "rescale", "float16"),
        (ColumnsOfTheMaskWrap, "mask", "bfloat16"),
        (CoarseScalesOfValues, "operand", "bfloat16"),
        (ScalesOfTheFirstSequenceLost, "value-factor", "bfloat16"),
        (LastTileOfQueriesLost, "grad-tail", "bfloat16"),
    ],
)
def test_what_one_pass_has_or_few_calls_show_is_told(kernel, cause, dtype):
    found = reconstruct(attention(kernel), dtype=dtype)
    named = [n.cause.key for n in found.causes] + [p.cause for p in found.places]
    assert named[0] == cause


@pytest.mark.parametrize("dropped", [12, 13, 16])
def test_how_many_bits_weights_are_cut_to_is_read(dropped):
    weights = torch.rand(4096, generator=torch.Generator().manual_seed(0))
    ratios = (cut(weights, dropped).double() / weights.double()).log()
    assert cut_to(ratios) == 23 - dropped
