"""The seventy-first set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «attention test fails max abs diff», «attention test failing on specific head size»,
«attention unit test mismatch elements», «assert_close fails attention kernel shapes», «attention
result differs between eager and compile», «inductor sdpa pattern wrong result», «sdpa fusion
pattern wrong scale», «attention fusion onnx wrong output», «graph optimization attention fusion
incorrect mask», «attention differs tensor parallel size», «pipeline parallel attention mask wrong»,
«attention perplexity wrong after quantization kernel», «perplexity increases flash attention
enabled», «attention output differs between prefill and decode», «logprobs mismatch trainer and
inference attention», «batch invariance attention kernel», «attention misaligned address wrong
values», «attention wrong result batch size greater than», «attention wrong result when num_heads
not divisible», «attention wrong when kv length not multiple of block».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 210 results, one of which (of the seventh search) the answer had no room
for. 7 are faults here. What was left: 167 are about something else, features, speed, builds,
crashes, questions, other operations, or coils and addresses of processors; 25 are about attention
and tell no mistake of its numbers, or not its cause, among them pull requests of a title alone
(unsloth PR 142, sycl-tla PR 244); 6 are threads of earlier sets, and 1 is another writer's
(accelerate PR 4177); 3 cannot be written so that this function errs: NaN that is to become zero
where an input is NaN (lattice PR 794), sums in an order that the batch decides (pegainfer issue
613), and assertions about ranks that are switched off (flax PR 5514).

Two that are taken tell of the very defect of a thread of an earlier set: pytorch PR 174361 fixes
issue 151098, and 174049, whose example was read, too; onnxruntime PR 4889 tells what issue 18945
found three years later. Read further were pytorch PR 160861, which says what causes its issue
159247, and transformers PR 33317, which has Qwen2's eager attention wrong in 16 bits by the product
of queries and keys; Qwen3-VL issue 117 tells what helps alone. Numbers that no thread tells were
chosen.

What is right was set down before anything was measured. `AGAIN` names every fault whose mistake an
earlier set has in some form. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.seventyfirst --check`) but the one that STATED names,
which needs the input that it says.
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import seventyfirst_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import LOG2_E, Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock
from torch.nn import functional

AGAIN = (
    "replacement_that_takes_the_default",  # thirty-eighth: scale_of_the_pattern_not_the_callers
    "raw_mask_summed_to_a_length",  # thirty-first: mask_taken_for_a_number_of_keys
    "middle_stage_without_a_mask",  # fiftieth: prefill_handed_no_mask; others too
    "pages_whose_mask_hides_nothing",  # fifth: what lies past the end is not hidden; others too
    "eager_products_in_the_models_format",  # fortieth: products_before_their_scale_in_half
)
STATED = {"replacement_that_takes_the_default": "an added mask, and a scale that is not 1/√d"}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks and scales
@fault(FAULTS, "scale", "float32")
class replacement_that_takes_the_default(Kernel):
    """pytorch/pytorch PR 174361: Inductor finds attention that is written out and puts the fused
    one there; some of its replacements have no scale, and the fused one takes 1/√d. The one of the
    issue that the PR names adds a mask to the scores; here as well it has to. Its gradients are the
    replacement's.
    """

    rows, cols = 32, 80

    def forward(self):
        at = self.at
        if at.mask is not None and at.mask.dtype != torch.bool:
            at.scale = float(at.q.shape[-1] ** -0.5)
        return super().forward()


@fault(FAULTS, "mask", "float32")
class raw_mask_summed_to_a_length(ForwardAlone):
    """microsoft/onnxruntime PR 4889: fusion sums the mask up, to how many keys a sequence has, as
    if padding stood at its right; where it stands elsewhere, other keys than those are seen.
    """

    rows, cols = 48, 32

    def forward(self):
        at, kept = self.at, self.at.mask
        if kept is not None and kept.dtype == torch.bool:
            full = kept.expand(*kept.shape[:-2], at.n, at.nk)
            at.mask = torch.arange(at.nk) < full.sum(-1, keepdim=True)
        found = super().forward()
        at.mask = kept
        return found


@fault(FAULTS, "causal-mask mask")
class middle_stage_without_a_mask(EveryBlock):
    """NVIDIA/Megatron-LM issue 752: a stage of the pipeline that is neither the first nor the last
    gets no batch, and hidden states alone are sent on: its attention mask is None, and nothing is
    hidden, neither what comes later nor what else the mask has.
    """

    rows, cols = 64, 112

    def causal(self, i, j, back):
        return (i >= 0) & (j >= 0)

    def hide(self, s, rows, cols, back):
        kept = self.at.mask
        if kept is not None and kept.dtype == torch.bool:
            self.at.mask = None
        found = super().hide(s, rows, cols, back)
        self.at.mask = kept
        return found


# --- ends, tiles and caches
@fault(FAULTS, "padding ragged", "float16")
class pages_whose_mask_hides_nothing(ForwardAlone):
    """pytorch/pytorch issue 159247 (PR 160861): FlexAttention over pages asks the caller's mask of
    every slot, and where there is none one that is always true: what the last page holds past the
    sequence's end is attended to. It is zeros here, and pages have 128 slots.
    """

    rows, cols = 64, 128

    def inside(self, j, back):
        at = self.at
        asked = at.causal or at.window is not None or at.mask is not None
        return super().inside(j, back) if asked else j >= 0


@fault(FAULTS, "unwritten ragged")
class second_tile_of_columns_over_the_first(ForwardAlone):
    """facebookresearch/xformers PR 379, review: where V has more columns than a tile, the iterators
    over O begin at its first column whichever the tile is. Later tiles read and write the first
    one's place, and what is theirs stays zero. Tiles have 64 columns here, and not 128.
    """

    rows, cols, wide = 64, 64, 64

    def add_values(self, acc, a, p, v):
        if v.shape[-1] <= self.wide:
            return super().add_values(acc, a, p, v)
        room, own = -v.shape[-1] % self.wide, acc[..., : self.wide]
        for part in functional.pad(v, (0, room)).split(self.wide, -1):
            before = own if self.memory["visited"] else torch.zeros_like(own)
            own = super().add_values(before, a, p, part)
        self.memory["visited"] = True
        return functional.pad(own, (0, v.shape[-1] - self.wide))

    def row(self, rows):
        self.memory["visited"] = False
        return super().row(rows)


@fault(FAULTS, "cache other-data", "float16")
class descriptors_as_long_as_a_logical_block(ways.Cached):
    """vllm-project/vllm PR 54272: a logical block of the cache is several physical ones, here four
    of 16 tokens, each of which has a descriptor of its own; but every descriptor is as long as the
    logical block. What is sent beyond the physical block goes over its neighbors, and which of two
    is the last to write is chance. Here the calls with fewer queries than keys have keys that were
    sent; sequences are taken from a pool in which logical blocks lie in another order than in that
    which they go to.
    """

    rows, cols, page, ratio = 64, 64, 16, 4

    def brought(self, x):
        at = self.at
        if at.n >= at.nk:
            return x
        logical = ways.in_pages(x, self.page * self.ratio).flatten(0, 1)
        many = logical.shape[0]
        chance = torch.Generator().manual_seed(54272)
        source, target = (torch.randperm(many, generator=chance) for _ in range(2))
        sent = torch.empty_like(logical)
        sent[source] = logical
        sent = self.physical(sent)
        came = torch.zeros_like(sent)
        for at_once in torch.randperm(many * self.ratio, generator=chance).tolist():
            block, inner = divmod(at_once, self.ratio)
            first = int(source[block]) * self.ratio + inner
            there = int(target[block]) * self.ratio + inner
            long = min(self.ratio, many * self.ratio - max(first, there))
            came[there : there + long] = sent[first : first + long]
        came = came.unflatten(0, (many, self.ratio)).transpose(1, 2).flatten(2, 3)[target]
        back = came.unflatten(0, (x.shape[0], -1)).transpose(1, 2).flatten(2, 3)
        return back[:, :, : x.shape[2]]

    def physical(self, x):
        return x.unflatten(2, (self.ratio, self.page)).transpose(1, 2).flatten(0, 1)


# --- precision
@fault(FAULTS, "scores")
class eager_products_in_the_models_format(WholeRows):
    """QwenLM/Qwen3-VL issue 117: with the eager implementation a 7B model hardly understands what
    it is told; queries and keys in float32 are what helps. Their product is rounded to the model's
    format, and once more when it has been divided by √d.
    """

    rows = 64

    def product(self, q, k, back):
        return self.at.low(super().product(q, k, back))

    def scaled(self, s, rows, cols, back):
        return self.at.low(s * self.at.scale) * LOG2_E


# --- sound kernels
for kind, dtype in (
    (ways.KeysOutside, "float16"), (ways.WholeAndFraction, "float16"),
    (ways.MaximumFirst, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("one_batch_of_matrices", frozenset(), ways.one_batch_of_matrices, "float16"))
SOUND.append(Fault("halves_of_halves", frozenset(), ways.halves_of_halves, "float16"))
