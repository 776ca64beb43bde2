"""`attn_implementation="halfulp"` for transformers' models, beside its own "eager" and "sdpa".

A class of transformers is written for the implementations that it knows, and what it does with
another name is decided here: it is right, or it is refused in one line, when the model is built or
at its first call. `docs/transformers.md` holds every class of one version to that.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from halfulp.attention.attend import attention

NAME = "halfulp"
# What layers hand to every implementation and what does not change attention, or is in the mask.
_HARMLESS = frozenset(
    (
        *("cache_position", "deterministic", "grid_thw", "labels", "logits_to_keep"),
        *("max_length_k", "max_length_q", "num_items_in_batch", "output_hidden_states"),
        *("output_router_logits", "position_embeddings", "position_ids", "return_dict"),
        *("seq_idx", "token_type_ids", "use_cache"),
    )
)
_WITH_A_MASK = ("cu_seq_lens_q", "cu_seq_lens_k")  # packed, which a mask made from positions holds
_OWN_CLASSES = re.compile(r"_CLASSES\[[\w.]*attn_implementation\s*\]")


def register_transformers() -> None:
    """Give transformers' AttentionInterface the name "halfulp".

    Then `AutoModelForCausalLM.from_pretrained(..., attn_implementation="halfulp")` or
    `model.set_attn_implementation("halfulp")` run `halfulp.attention`. A class whose attention
    does not go through that interface raises ValueError there, as it does for "sdpa" where it has
    none. Calling it again changes nothing.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    stock = PreTrainedModel.get_correct_attn_implementation
    if getattr(stock, "__module__", "") == __name__:
        return

    @functools.wraps(stock, assigned=("__name__", "__qualname__", "__doc__"))
    def checked(model: Any, requested: str | None, *args: Any, **kwargs: Any) -> Any:
        if requested == NAME:
            _check_class(type(model))
        return stock(model, requested, *args, **kwargs)

    setattr(PreTrainedModel, "get_correct_attn_implementation", checked)  # noqa: B010  # mypy


def attention_mask(
    *,
    kv_length: int,
    q_length: int | None = None,
    cache_position: Tensor | None = None,
    config: Any = None,
    allow_is_causal_skip: bool = True,
    **asked: Any,
) -> Tensor | None:
    """The mask of a layer: none where `is_causal` says it all, else sdpa's boolean one, or an
    additive one for classes that are not written for sdpa.

    Arguments are those of transformers' own `sdpa_mask`: `q_length` since transformers 5, before
    that the positions of the queries.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    rows: dict[str, Any] = {"q_length": q_length}
    if cache_position is not None:
        rows, q_length = {"cache_position": cache_position}, cache_position.shape[0]

    # With more keys than queries "causal" would say less than the mask does; a layer that comes
    # without a mask all the same has changed its keys or queries since, and is refused.
    skip = allow_is_causal_skip and q_length == kv_length
    given = rows | {"kv_length": kv_length, "config": config} | asked
    mask: Tensor | None = sdpa_mask(allow_is_causal_skip=skip, **given)
    own: Any = type(config)
    if mask is None or config is None or _written_for_sdpa(own):
        return mask
    additive: Tensor = eager_mask(**given)
    return additive


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention as a transformers layer calls it.

    Args:
        module: the layer; its `is_causal` counts where the argument is None.
        query: `[B, H, N, D]`.
        key: `[B, H_k, N_k, D]`.
        value: `[B, H_k, N_k, D_v]`.
        attention_mask: broadcastable to `[B, H, N, N_k]`, bool or additive; None where `is_causal`
            says it all.
        dropout: share of the weights that is dropped.
        scaling: softmax scale; 1/√D if None.
        is_causal: whether a layer without a mask hides the future; a single query sees every key of
            its cache.
        softcap: c: scores become c·tanh(S / c).
        s_aux: `[H]`, sinks.
        position_bias: broadcastable to `[B, H, N, N_k]`, added to the scaled scores.
        indices: `[B, N, top k]` integers, sparse attention: the keys that each query may see, of
            those that the mask leaves; negative ones stand for none.
        sliding_window: its length, which the mask holds.
        more: what does not change attention.

    Returns:
        out `[B, N, H, D_v]`, and None for the weights, which never exist.

    Raises:
        ValueError: a keyword that is not None and not known here, a paged cache, weights asked for,
            or a causal layer without a mask whose keys are not its queries'.
    """
    queries, keys = query.shape[2], key.shape[2]
    _check_keywords(more, attention_mask, sliding_window, keys)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    hides_future = bool(causal) and attention_mask is None and queries > 1
    if hides_future and keys > queries:
        raise ValueError(
            f"attention_mask=None with {queries} queries and {keys} keys: accepted is a mask, since"
            f" {type(module).__name__} is causal and does not say which keys are the future"
        )
    mask = attention_mask if indices is None else _sparse(indices, attention_mask, query, keys)
    if hides_future and (indices is not None or position_bias is not None):
        past = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
        mask, hides_future = _both(mask, past), False
    out = attention(
        query,
        key,
        value,
        _both(mask, position_bias),
        dropout,
        hides_future,
        scaling,
        True,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return out.transpose(1, 2).contiguous(), None


def _check_keywords(
    more: dict[str, Any], mask: Tensor | None, sliding_window: int | None, keys: int
) -> None:
    """Raise ValueError for what asks for something else than attention under this mask."""
    for name, asked in more.items():
        if asked is None or name in _HARMLESS or (name == "output_attentions" and not asked):
            continue
        if name in _WITH_A_MASK and (mask is not None or asked.numel() <= 2):
            continue
        if name == "output_attentions":
            raise ValueError(
                f"output_attentions=True with {NAME!r}: accepted is False, since the weights never"
                ' exist; attn_implementation="eager" has them'
            )
        why = "paged caches are not read" if name == "cache" else f"{NAME!r} does not know it"
        raise ValueError(f'{name} is given: accepted is None, since {why}; see "sdpa" or "eager"')
    if mask is None and sliding_window is not None and keys > sliding_window:
        raise ValueError(
            f"sliding_window={sliding_window} for {keys} keys without attention_mask: accepted is a"
            " mask, which holds the window"
        )


def _sparse(indices: Tensor, mask: Tensor | None, query: Tensor, keys: int) -> Tensor | None:
    """The mask with only the chosen keys left."""
    # a column more, for negative indices, which is cut off
    chosen = torch.zeros(*indices.shape[:2], keys + 1, dtype=torch.bool, device=query.device)
    kept = torch.where(indices < 0, keys, indices).long()
    return _both(chosen.scatter(-1, kept, True)[:, None, :, :keys], mask)


def _both(mask: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Two masks in one, each bool or additive; −inf where a bool one hides a key of an additive
    one.
    """
    if mask is None or other is None:
        return other if mask is None else mask
    if other.dtype == torch.bool:
        mask, other = other, mask
    if mask.dtype != torch.bool:
        return mask + other
    return mask & other if other.dtype == torch.bool else torch.where(mask, other, -torch.inf)


@functools.cache
def _written_for_sdpa(config_class: Hashable) -> bool:
    """Whether a model of this configuration takes sdpa's boolean masks."""
    from transformers import PreTrainedModel

    found, left = [], [PreTrainedModel]
    while left:
        cls = left.pop()
        left += cls.__subclasses__()
        if cls.config_class is config_class:
            found.append(bool(cls._supports_sdpa))
    return any(found) or not found


def _check_class(cls: Any) -> None:
    """Raise ValueError for a class whose attention is not reached by the name."""
    through = bool(cls._supports_sdpa or cls._supports_attention_backend)
    module = sys.modules.get(cls.__module__)
    try:
        source = inspect.getsource(module) if module is not None else ""
    except (OSError, TypeError):  # a class made where no file is
        source = ""
    if through and not _OWN_CLASSES.search(source):
        return
    instead = (
        'attn_implementation="sdpa" inside `with halfulp.patch():`'
        if cls._supports_sdpa
        else 'attn_implementation="eager", which nothing can replace'
    )
    raise ValueError(
        f"attn_implementation={NAME!r} for {cls.__name__}: accepted are classes whose attention"
        f" goes through transformers' AttentionInterface; for this one {instead}"
    )
