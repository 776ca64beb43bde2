"""The seventy-fourth set's faults of windows, scores, rows of nothing and caches (seventyfourth.py
has the others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import seventyfourth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import LOG2_E, Kernel, fp16
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock, OtherOperands
from torch import Tensor
from torch.nn import functional

FAULTS: list[Fault] = []


# --- windows
@fault(FAULTS, "window")
class first_memory_is_never_seen(Kernel):
    """huggingface/transformers PR 14832: `torch.tril(ones, -mask_shift_len)` with a shift of 0
    hides what is on that diagonal too, the first memory that a query is to see.
    """

    rows, cols = 48, 32

    def window(self, i, j, back):
        left, right = self.at.window
        keep = j > i - left if left >= 0 else j >= 0
        return keep & (j <= i + right) if right >= 0 else keep & (i >= 0)


@fault(FAULTS, "window", "float16")
class window_a_key_wider_than_that_of_gemma(Kernel):
    """NVIDIA-NeMo/Speech PR 9672, a comment: `torch.triu` of the window's mask lacks a + 1, so that
    a query sees one key more than it does in Hugging Face's model.
    """

    rows, cols = 64, 64

    def window(self, i, j, back):
        left, right = self.at.window
        keep = j >= i - left - 1 if left >= 0 else j >= 0
        return keep & (j <= i + right) if right >= 0 else keep & (i >= 0)


@fault(FAULTS, "window")
class window_that_the_config_switches_off(Kernel):
    """GradientHQ/parallax PR 373: a model whose config has a `sliding_window`, here 48, is taken
    for one that uses it, whatever `use_sliding_window` says.
    """

    rows, cols = 32, 32

    def forward(self):
        at = self.at
        if at.causal and at.window is None:
            at.window = (47, -1)
        return super().forward()


# --- scores, and rows that may see nothing
@fault(FAULTS, "scores", "float16")
class scores_in_half_before_and_behind_their_scale(WholeRows):
    """huggingface/transformers PR 13573: GPT-2 trained in mixed precision is unstable, since K Q is
    made in half and scaled afterwards, in half as well, before a softmax that is not upcast.
    """

    rows = 64

    def product(self, q, k, back):
        return fp16(super().product(q, k, back))

    def scaled(self, s, rows, cols, back):
        return fp16(s * self.at.scale) * LOG2_E


@fault(FAULTS, "causal-mask masked-row", "float32")
class diagonal_nine_tokens_back(ways.InfinityLessInfinity):
    """trymirai/lalamo PR 273, review: `query > key + 8` in place of `query >= key`: a token sees
    neither itself nor the eight before it, and the first nine rows are NaN.
    """

    rows = 64

    def unsafe(self):
        return self.at.causal

    def causal(self, i, j, back):
        return i > j + 8


@fault(FAULTS, "masked-row non-finite", "float32")
class exported_rows_of_padding_are_nan(ways.InfinityLessInfinity):
    """pytorch/pytorch PR 159973: the exported graph makes −∞ of a boolean mask, and a row of that
    is NaN behind the softmax, where the original gives zeros.
    """

    rows = 32

    def unsafe(self):
        return self.at.mask is not None and self.at.mask.dtype == torch.bool


# --- caches
@fault(FAULTS, "cache layout other-data", "float16")
class cross_cache_without_its_room(ways.Across):
    """NVIDIA/FasterTransformer issue 270: keys and values of an encoder depend on the length that
    it is padded to where the cache is batch major: lengths of the memory are not handled. Written
    with the room of whole blocks of 32 rows, heads are read here as if they had no room to spare.
    """

    rows, cols = 32, 64

    def across(self, x):
        b, h, nk, d = x.shape
        held = functional.pad(x, (0, 0, 0, -nk % 32))
        return held.flatten(0, 2)[: b * h * nk].view(b, h, nk, d)


@fault(FAULTS, "padding", "float16")
class zeros_of_the_static_cache_attended_to(OtherOperands):
    """huggingface/transformers PR 30437 (PR 30414 is another way to mend it): no causal mask is
    made, and the keys are the whole static cache, whose rows past the last token are zeros that
    nothing hides. It has a multiple of 256 rows here.
    """

    rows, cols = 64, 128

    def read(self, k, v):
        at = self.at
        if at.mask is not None or at.window is not None:
            return k, v
        return self.whole(k), self.whole(v)

    @staticmethod
    def whole(x: Tensor) -> Tensor:
        return functional.pad(x, (0, 0, 0, -x.shape[2] % 256))


@fault(FAULTS, "causal-mask padding")
class flash_from_the_end_of_the_static_cache(EveryBlock, OtherOperands):
    """huggingface/transformers PR 46914: the mask is set to None for flash attention, and
    `is_causal` with keys that are padded puts the diagonal's end at the cache's, here the next
    multiple of 96.
    """

    rows, cols = 128, 32

    def read(self, k, v):
        at = self.at
        self.memory["apart"] = 0
        if not at.causal or at.mask is not None or at.window is not None:
            return k, v
        high = (at.nk // 96 + 1) * 96
        self.memory["apart"] = high - at.n
        return tuple(functional.pad(x, (0, 0, 0, high - at.nk)) for x in (k, v))

    def causal(self, i, j, back):
        return j <= i + self.memory["apart"]


@fault(FAULTS, "key-tail cache", "float32")
class memory_begins_where_it_ends(ways.Across):
    """dhruvramani/Transformers-RL issue 7: where the memory that is kept begins is reckoned with
    the length that it has, which is 0 at first, and not with that which it may have: it stays
    empty, and tokens attend to those of their own segment alone, which are the last ones here.
    """

    rows, cols = 40, 40

    def across(self, x):
        return x[:, :, max(0, x.shape[2] - self.at.n) :]


@fault(FAULTS, "key-tail cache")
class encoder_cut_to_the_decoders_window(ways.Across):
    """huggingface/transformers PR 46111: the cache of cross attention is made by the decoder's
    config, whose layers have a window, here of 96: of the encoder's keys the last 95 are kept.
    """

    rows, cols = 64, 64

    def across(self, x):
        return x[:, :, -95:]


@fault(FAULTS, "key-tail mask cache", "float16")
class mask_cut_at_the_other_end_than_the_encoder(OtherOperands):
    """huggingface/transformers PR 41890: the cache of cross attention has the layers of the
    decoder's own, so that the last keys of a window are kept, here 95, and SDPA cuts the mask,
    whose first columns it takes.
    """

    rows, cols = 32, 96

    def read(self, k, v):
        if self.at.causal or self.at.mask is None:
            return k, v
        return k[:, :, -95:], v[:, :, -95:]


@fault(FAULTS, "cache other-data")
class rejected_drafts_stay_in_the_cache(ways.Across):
    """mlc-ai/mlc-llm PR 2939: tokens of the draft that are not accepted are not taken out of its
    model's cache: here four, in front of what is new; what they hold is chosen.
    """

    rows, cols = 64, 32

    def across(self, x):
        if self.at.n > x.shape[2]:
            return x
        chance = torch.Generator().manual_seed(2939)
        first = x.shape[2] - self.at.n
        draft = torch.randn(*x.shape[:2], 4, x.shape[3], generator=chance)
        return torch.cat([x[:, :, :first], self.at.low(draft), x[:, :, first:]], 2)
