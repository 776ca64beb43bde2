"""The fifty-ninth set's faults of what is not finite, and of blocks that hold no keys
(fiftyninth.py has the others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fiftyninth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault, logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows, repeated

FAULTS: list[Fault] = []


@fault(FAULTS, "masked-row unwritten non-finite nan-escapes", "float16")
class sequence_that_has_no_keys(ForwardAlone):
    """facebookresearch/xformers PR 492: where a sequence of the batch has queries and no keys, its
    O is NaN or what memory held, and is to be 0; here NaN, for a sequence whose keys are all
    hidden.
    """

    rows, cols = 64, 128

    def forward(self):
        o, lse = super().forward()
        if self.at.mask is None or self.at.mask.dtype != torch.bool:
            return o, lse
        return torch.where(ways.unhidden_sequences(self.at.mask), o, torch.nan), lse


def image_that_is_padding_alone(query, key, value, *, is_causal, scale, attn_mask=None,
                                window=None, softcap=0.0, sinks=None):  # fmt: skip
    """facebookresearch/detr issue 101: an image much smaller than the batch's largest has a mask of
    padding alone once it is resized, and the softmax of −∞ everywhere is NaN.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    if sinks is not None:
        s = torch.cat([s, sinks.float().view(1, -1, 1, 1).expand(b, heads, n, 1)], -1)
    return (s.softmax(-1)[..., :nk] @ v).to(query.dtype)


FAULTS.append(
    Fault("image_that_is_padding_alone", frozenset({"masked-row", "non-finite", "nan-escapes"}),
          image_that_is_padding_alone, "float32", frozenset({"elements"}))
)  # fmt: skip


@fault(FAULTS, "window mask other-data")
class null_block_before_the_window(ForwardAlone):
    """vllm-project/vllm PR 36939: pages that have left the window are the null block in the table,
    and the kernel reads one of them all the same; what the capture of a graph left in it draws the
    weights of the true keys to nothing. Here it holds keys of 30 and values of 0, in the page
    before the window's first.
    """

    rows, cols = 16, 16

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        self.memory["null"] = None
        if self.at.window is None or self.at.window[0] < 0:
            return every
        first = max(0, rows.start - self.at.window[0]) // self.cols
        self.memory["null"] = (first - 1) * self.cols
        return [c for c in every if c.start >= self.memory["null"]]

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        if part.start != self.memory.get("null"):
            return found
        return torch.full_like(found, 30.0 if name == "k" else 0.0)

    def hide(self, s, rows, cols, back):
        found = super().hide(s, rows, cols, back)
        return s if cols.start == self.memory.get("null") else found


@fault(FAULTS, "nan-escapes non-finite padding ragged", "bfloat16")
class entries_that_are_hidden_gather_slot_zero(ForwardAlone):
    """vllm-project/vllm PR 57158 (issue 57156): entries that pad a list of keys gather slot 0,
    which −10³⁰ for the score is to hide; the capture of a graph has left NaN there, and 0 · NaN in
    P V is NaN. Here what fills the last block is such a slot, with one feature of V in 32 not a
    number.
    """

    rows, cols = 64, 64

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        if name != "v" or part.stop <= self.at.nk:
            return found
        padded = torch.arange(part.start, part.stop)[:, None] >= self.at.nk
        stale = torch.arange(found.shape[-1]) % 32 == 5
        return found.masked_fill(padded & stale, torch.nan)


@fault(FAULTS, "mask maximum underflow unnormalized", "float32")
class softmax_that_hidden_scores_lead(ForwardAlone, WholeRows):
    """allenai/allennlp PR 437: `masked_softmax` is the softmax of all scores, times the mask, over
    what its sum is then and 10⁻¹³: a hidden score far above the visible ones leaves weights that
    are 0 in fp32, and the row is 0.
    """

    rows = 64

    def hide(self, s, rows, cols, back):
        found = super().hide(s, rows, cols, back)
        self.memory["keep"] = keep = found != -INF
        return torch.where(keep, found, s)

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        p, a = torch.exp2(s - new), torch.exp2(m - new)
        total = self.add_row(l, a, p)
        p = p / total * self.memory["keep"]
        left = p.sum(-1, keepdim=True) + l * a / total + 1e-13
        return new, left, self.add_values(acc, a, p, v)
