"""QK-clip: whichever way a layer holds W_Q and W_K, scores beyond the bound come to it, and those
of other heads stay.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import halfulp
from halfulp.calls import Call, Sees
from halfulp.interpose import interpose, module_names
from halfulp.training import score_clip
from halfulp.training.score_clip import ScoreClip, largest_scores

HEADS, WIDTH = 4, 3


class Layer(nn.Module):
    """Attention whose projections are held in one of several ways."""

    def __init__(self, form, key_heads, bias):
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        inputs, rows = 8, [HEADS * WIDTH, key_heads * WIDTH, key_heads * WIDTH]
        self.form, self.rows = form, rows
        if form == "apart":
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(inputs, n, bias) for n in rows)
        elif form == "fused":
            self.qkv = nn.Linear(inputs, sum(rows), bias)
        elif form == "Conv1D":
            self.c_attn = Conv1D(sum(rows), inputs)
        else:
            self.in_proj_weight = nn.Parameter(torch.empty(sum(rows), inputs))
            self.in_proj_bias = nn.Parameter(torch.empty(sum(rows))) if bias else None
        self.double()
        with torch.no_grad():
            for x in self.parameters():
                x.normal_(generator=torch.Generator().manual_seed(x.numel()))

    def heads(self, x):
        if self.form == "apart":
            parts = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        elif self.form == "in_proj":
            parts = functional.linear(x, self.in_proj_weight, self.in_proj_bias)
            parts = parts.split(self.rows, -1)
        else:
            parts = (self.qkv if self.form == "fused" else self.c_attn)(x).split(self.rows, -1)
        return [y.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for y in parts]

    def forward(self, x):
        q, k, v = self.heads(x)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def scores_of(layer, x):
    query, key, _ = layer.heads(x)
    key = key.repeat_interleave(HEADS // key.shape[1], 1)
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    return (query @ key.mT / WIDTH**0.5).masked_fill(hidden, -torch.inf).detach()


@settings(max_examples=24, deadline=None)
@given(
    form=st.sampled_from(["apart", "fused", "Conv1D", "in_proj"]),
    key_heads=st.sampled_from([1, 2, 4]),
    bias=st.booleans(),
    share=st.floats(0.1, 1.2),
)
def test_scores_beyond_the_bound_come_to_it_and_others_stay(form, key_heads, bias, share):
    model = nn.Sequential(Layer(form, key_heads, bias))
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)).double()
    before = scores_of(model[0], x)
    most = share * before.amax((0, 2, 3)).max().item()
    clip = ScoreClip(most, dict(module_names(model)))
    with interpose(model, clip.saw):
        model(x)
    (factors,) = clip.clip().values()
    expected = before * (most / before.amax((0, 2, 3)).clamp_min(most)).view(-1, 1, 1)
    torch.testing.assert_close(scores_of(model[0], x), expected, rtol=1e-5, atol=1e-6)
    assert (factors < 1).equal(before.amax((0, 2, 3)).float() > most)
    assert clip.clip() == {}, "it begins anew"


def test_the_largest_score_is_one_that_a_query_may_see(monkeypatch):
    query, key = torch.tensor([[[[1.0], [0.1]]]]), torch.tensor([[[[1.0], [9.0]]]])
    monkeypatch.setattr(score_clip, "_AT_ONCE", 2)  # a row at a time
    for causal, largest in ((True, 1.0), (False, 9.0)):
        call = Call(query, key, key, Sees(causal), 1.0)
        assert largest_scores(call).tolist() == [pytest.approx(largest)]


class WrittenOut(Layer):
    def forward(self, x):
        query, key, value = self.heads(x)
        scores = query @ key.mT / WIDTH**0.5
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value


class Normed(Layer):
    def __init__(self):
        super().__init__("apart", HEADS, False)
        self.q_norm = nn.RMSNorm(WIDTH).double()


def test_attention_that_is_written_out_is_clipped_in_a_loop_of_ones_own():
    model, x = WrittenOut("fused", HEADS, True), torch.ones(1, 3, 8).double()
    before = scores_of(model, x).amax((0, 2, 3))
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    most = before.max().item() / 2
    with halfulp.planned(model, optimizer=sgd, most_score=most):
        model(x).sum().backward()
        sgd.step()
    torch.testing.assert_close(scores_of(model, x).amax(), torch.tensor(most).double())
    sgd.step()
    torch.testing.assert_close(scores_of(model, x).amax(), torch.tensor(most).double())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Normed, "queries and keys of (model) are normalized, whatever W_Q and W_K are"),
        (lambda: nn.Sequential(nn.Linear(8, 2).double()), "no call of attention is seen"),
    ],
)
def test_where_it_would_do_nothing_it_says_so(make, says):
    model = make()
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)

    def step():
        with halfulp.planned(model, optimizer=sgd, most_score=1.0):
            model(torch.ones(1, 3, 8).double()).sum().backward()
            sgd.step()

    with pytest.raises(ValueError, match="most_score=1: ") as raised:
        step()
    assert says in str(raised.value)
    assert not sgd._optimizer_step_post_hooks


@pytest.mark.parametrize(
    ("given_", "says"),
    [
        ({"most_score": 1.0}, "most_score=1.0: accepted with optimizer="),
        ({"operations": "optimizer: fp32"}, "operations='optimizer: fp32': accepted with optim"),
        ({"most_score": -1.0}, "most_score=-1.0: accepted is a number above 0"),
    ],
)
def test_a_bad_argument_is_one_line(given_, says):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters()) if given_.get("most_score") == -1 else None
    opened = halfulp.planned(model, optimizer=optimizer, **given_)
    with pytest.raises(ValueError, match="accepted") as raised:
        opened.__enter__()
    assert str(raised.value).startswith(says)
