"""A small model as others write them: nothing in it knows of halfulp. And a kernel with a planted
error of δ.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, LAYERS, LENGTH, WORDS = 32, 4, 2, 24, 17
BIASED_LAYER, BIASED_HEAD = 1, 2


class Attention(nn.Module):
    def __init__(self, function=None, key_heads=HEADS):
        super().__init__()
        self.function, self.key_heads = function, key_heads
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, WIDTH // HEADS * key_heads) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        query, key, value = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        if self.function is not None:
            out = self.function(query, key, value, is_causal=True)
        else:
            shared = self.key_heads != HEADS
            out = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=shared
            )
        return self.out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, function=None, key_heads=HEADS):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(function, key_heads)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)
        )

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class GPT(nn.Module):
    """`reentrant`: None for no checkpoints, or their kind."""

    def __init__(self, functions=(None,) * LAYERS, reentrant=None, key_heads=HEADS):
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(function, key_heads) for function in functions)
        self.last = nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        x = self.words(words) + self.places.weight
        for block in self.blocks:
            x = (
                block(x)
                if self.reentrant is None
                else checkpoint(block, x, use_reentrant=self.reentrant)
            )
        return self.last(x)


def batch(step: int, entries: int = 4) -> tuple[Tensor, Tensor]:
    """Words that count up, and the next ones."""
    first = torch.randint(WORDS, (entries, 1), generator=torch.Generator().manual_seed(step))
    words = (first + torch.arange(LENGTH + 1) * 3) % WORDS
    return words[:, :-1], words[:, 1:]


def train(model, steps, *, call=None, accumulation=1, autocast=True, after=lambda loss: None):
    """Losses of a training of `call` (the model, wrapped) with AdamW."""
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    torch.manual_seed(7)
    for step in range(steps):
        for part in range(accumulation):
            words, following = batch(step * accumulation + part)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = (model if call is None else call)(words)
                out = out if isinstance(out, Tensor) else out.logits
                loss = functional.cross_entropy(out.flatten(0, 1), following.flatten())
            loss.backward()
            losses.append(loss.item())
        adam.step()
        adam.zero_grad()
        after(loss)
    return losses


class _Biased(torch.autograd.Function):
    """Exact attention in bf16 whose δ is too large by a share of its size, in one head, in the
    backward pass.
    """

    @staticmethod
    def forward(ctx, query, key, value):
        q, k, v = (x.double() for x in (query, key, value))
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        weights = (q @ k.mT / q.shape[3] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        return (weights @ v).to(query.dtype)

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, weights = ctx.saved_tensors
        grad = grad_out.double()
        delta = (grad * (weights @ v)).sum(-1, keepdim=True)
        delta[:, BIASED_HEAD] += 0.02 * grad[:, BIASED_HEAD].norm(dim=-1, keepdim=True)
        grad_scores = weights * (grad @ v.mT - delta) / q.shape[3] ** 0.5
        grads = (grad_scores @ k, grad_scores.mT @ q, weights.mT @ grad)
        return tuple(x.to(grad_out.dtype) for x in grads)


def biased(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """The planted kernel, called like PyTorch's."""
    assert is_causal
    assert attn_mask is None
    assert scale is None
    return _Biased.apply(*(x.bfloat16() for x in (query, key, value)))


def calls_biased(query: Tensor, key: Tensor, value: Tensor, **options) -> Tensor:
    """It is found in this module's globals, as a model's own kernel is in its file's."""
    return biased(query, key, value, **options)
