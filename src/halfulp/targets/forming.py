"""One call in a kernel's own form: query, key and value `[B, H, N, D]` become the tensors that it
takes, and what it returns becomes out `[B, H, N, D]` and lse `[B, H, N]` again.

Where sequences of other lengths may lie beside each other, as in a packed batch or a cache, two
more are put among those that are audited, longer and shorter: a kernel that reads across a border
or takes one sequence's length for another's is then wrong in what is audited. Pages of a cache lie
in no order, and what no sequence uses is filled with numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from halfulp.targets.form import BUFFERS, NEW, PAGE, ROLES, Form
from halfulp.targets.manner import laid_out, memory_of
from halfulp.targets.target import UnsupportedError

Passed = tuple[str, Tensor, Tensor]
"""What a kernel is lent and may not write to: its name, itself, and its elements before."""

MISAPPENDED = "its rows are not those appended"
"""Of a cache, where a kernel was asked to append rows to it."""

# finite, so that what is read by mistake gives wrong numbers of its own and no NaN, which would be
# told as another fault
_FILLER = 3.0
BITS, _MARK = {2: torch.int16, 4: torch.int32, 8: torch.int64}, 0x25


@dataclass(frozen=True)
class FormedCall:
    """What one call of the kernel is given, and how its results are read."""

    tensors: tuple[Tensor, ...]  # by position
    named: dict[str, Any]
    form: Form
    lengths: tuple[int, ...]  # of the queries of all sequences
    audited: tuple[int, ...]  # which of them count
    heads: int
    value_dim: int
    buffers: dict[str, Tensor] = field(default_factory=dict)  # out, lse
    lent: tuple[Passed, ...] = ()
    before: FormedCall | None = None  # made first, its results not looked at

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the out that is expected."""
        return self._shape(self.form.out_dims)

    def _shape(self, dims: Sequence[str]) -> tuple[int, ...]:
        sizes = {"B": len(self.lengths), "H": self.heads, "N": self.lengths[0]}
        sizes |= {"T": sum(self.lengths), "D": self.value_dim}
        return tuple(sizes[d] for d in dims)

    def clear(self) -> None:
        """Fill what results are written into with a NaN that no arithmetic makes."""
        for x in self.buffers.values():
            # a payload of its own, since a kernel that computes NaN has written all the same
            x.fill_(math.nan).view(BITS[x.element_size()]).add_(_MARK)

    @property
    def unwritten(self) -> bool:
        """Whether some of it is as it was filled."""
        # bits are compared, since no NaN equals another
        marks = (torch.full_like(x, math.nan) for x in self.buffers.values())
        return any(
            bool((x.view(BITS[x.element_size()]) - _MARK == m.view(BITS[m.element_size()])).any())
            for x, m in zip(self.buffers.values(), marks, strict=True)
        )

    def returned(self, given: Any) -> Any:
        """What the kernel gives: what it wrote, where it returns nothing."""
        if given is not None or "out" not in self.buffers:
            return given
        return tuple(self.buffers.values())

    def read(self, out: Tensor) -> Tensor:
        """Out as `[B, H, N, D]` of the audited sequences."""
        return self._read(out, self.form.out_dims)

    def _read(self, x: Tensor, dims: Sequence[str]) -> Tensor:
        order = [d for d in ("B", "H", "N", "T", "D") if d in dims]
        x = x.permute([list(dims).index(d) for d in order])
        for place, d in enumerate("H" if "T" in order else "BHN"):
            if d not in order:
                x = x.unsqueeze(place)
        if "T" not in order:
            return x if len(self.audited) == len(self.lengths) else x[list(self.audited)]
        starts, rows = [sum(self.lengths[:i]) for i in self.audited], self.lengths[self.audited[0]]
        return torch.stack([x[:, start : start + rows] for start in starts])

    def read_lse(self, x: Any) -> Tensor | None:
        """Lse as `[B, H, N]`: in the form's dimensions, or in those that kernels have it in; None
        where it is none of these.
        """
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return None
        own = [d for d in self.form.out_dims if d != "D"]
        known = [self.form.dims("lse")] if self.form.dims("lse") else []
        known += [
            tuple(sorted(own, key="BHNT".index)),
            tuple(own),
            tuple(sorted(own, reverse=True)),
        ]
        known.append(tuple(d for d in ("B", "N", "H") if d in own))
        for column in (x, x.squeeze(-1) if x.ndim == len(own) + 1 else x):
            for dims in known:
                if tuple(column.shape) == self._shape(dims):
                    return self._read(column.unsqueeze(-1), (*dims, "D")).squeeze(-1)
        padded = (len(self.lengths), self.heads, max(self.lengths))
        if "T" in own and tuple(x.shape) == padded:  # FlashAttention before 2.6
            return torch.stack([x[i, :, : self.lengths[i]] for i in self.audited])
        return None

    def grad(self, grad_out: Tensor, memory: str) -> Tensor:
        """The gradient of what the kernel returns, of `grad_out [B, H, N, D]`."""
        dims = self.form.out_dims
        parts = _among(list(grad_out), self.audited, self.lengths)
        whole = _arranged(parts, dims)
        return laid_out(whole, memory, dims.index("N") if "N" in dims else None)


def formed(
    form: Form,
    operands: Sequence[Tensor],
    memory: str,
    parameters: frozenset[str],
    causal: bool,
) -> list[FormedCall]:
    """The calls that give attention on query, key and value `[B, H, N, D]`: one, or one for each
    sequence or head where the form holds a single one.

    `parameters` are those that the kernel takes by name. Raises UnsupportedError for operands that
    the form cannot hold.
    """
    query, key, value = operands
    _check(form, query, key, value, causal)
    dims = form.dims("query")
    calls = []
    for b in (
        [slice(None)] if {"B", "T"} & {*dims} else [slice(b, b + 1) for b in range(len(query))]
    ):
        if "H" in dims:
            calls.append(_one(form, (query[b], key[b], value[b]), memory, parameters))
            continue
        groups = query.shape[1] // key.shape[1]
        for h in range(query.shape[1]):
            own = (slice(h, h + 1), slice(h // groups, h // groups + 1))
            parts = (query[b, own[0]], key[b, own[1]], value[b, own[1]])
            calls.append(_one(form, parts, memory, parameters))
    return calls


def joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """The results of several calls as of one on `[B, H, N, D]`, or `[B, H, N]`."""
    if len(parts) == 1:
        return parts[0]
    if len(parts) == like.shape[0]:
        return torch.cat(list(parts))
    heads = like.shape[1]
    rows = [torch.cat(list(parts[i : i + heads]), 1) for i in range(0, len(parts), heads)]
    return torch.cat(rows)


def _check(form: Form, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> None:
    queries, keys = query.shape[2], key.shape[2]
    packed, paired = form.of("qkv") is not None, form.of("kv") is not None
    one_length = form.of("cu_seqlens") is not None
    why = None
    if form.decodes and queries != 1:
        why = f"takes one query a sequence, not {queries}"
    elif (packed or one_length) and queries != keys:
        why = "holds as many keys as queries"
    elif (packed or paired) and value.shape[3] != key.shape[3]:
        why = "holds values as wide as its keys"
    elif packed and query.shape[1] != key.shape[1]:
        why = "holds as many heads of keys as of queries"
    elif form.appends and queries > keys:
        why = "appends as many rows as it has queries, of which there are more than keys"
    elif causal and form.decodes and keys != 1:
        why = "takes one query a sequence, which sees all keys"
    if why is not None:
        raise UnsupportedError(f"in the form {form}: {why}")


def _one(
    form: Form, operands: Sequence[Tensor], memory: str, parameters: frozenset[str]
) -> FormedCall:
    query, key, _ = operands
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    audited, q_lengths, k_lengths = tuple(range(batch)), (queries,) * batch, (keys,) * batch
    new = 0 if not form.appends else queries
    if form.ragged:
        audited = (1, *range(3, batch + 2))  # a longer one first, a shorter one after the first
        if "T" in form.dims("query"):
            # other lengths before and between the audited ones: a kernel that takes one length for
            # all of them reads the wrong rows
            q_lengths = (queries + 13, queries, max(1, queries // 2), *q_lengths[1:])
        else:
            q_lengths += (queries,) * 2
        k_lengths = (keys + 13, keys, max(1, new, keys // 2), *k_lengths[1:])
    lengths = {"query": q_lengths, "key": k_lengths, "value": k_lengths}
    sequences = {
        name: _among(list(x), audited, lengths[name])
        for name, x in zip(lengths, operands, strict=True)
    }
    table = _table(k_lengths, form.page) if form.of("block_table") else None
    whole = _Whole(form, sequences, q_lengths, k_lengths, audited, table)
    if not new:
        built = _tensors(form, sequences, table, memory)
        lent = tuple((a.role, built[a.name], built[a.name].detach().clone()) for a in form.tensors)
        return whole.call(built, parameters, k_lengths, lent)
    return _appending(whole, new, memory, parameters)


@dataclass(frozen=True)
class _Whole:
    """All sequences of a call, before they are laid out for a kernel."""

    form: Form
    sequences: dict[str, list[Tensor]]  # of query, key and value `[H, N, D]`
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    audited: tuple[int, ...]
    table: Tensor | None

    def call(
        self,
        built: dict[str, Tensor],
        parameters: frozenset[str],
        k_lengths: Sequence[int],
        lent: tuple[Passed, ...],
    ) -> FormedCall:
        """The call on operands by the function's names, told these lengths of its keys."""
        form, query, value = self.form, self.sequences["query"][0], self.sequences["value"][0]
        heads, width = query.shape[0], value.shape[2]
        call = FormedCall((), {}, form, self.q_lengths, self.audited, heads, width)
        given: dict[str, Any] = {}
        for argument in form.arguments:
            if argument.name in built:
                given[argument.name] = built[argument.name]
            elif argument.role in BUFFERS:
                shape = call._shape(form.dims(argument.role) or _lse_dims(form))
                kind = query.dtype if argument.role == "out" else torch.float32
                given[argument.name] = torch.empty(shape, dtype=kind, device=query.device)
                call.buffers[argument.role] = given[argument.name]
            elif not argument.role:
                given[argument.name] = argument.constant
            elif argument.role in ROLES:
                given[argument.name] = _about(
                    argument.role, self.q_lengths, k_lengths, self.table, query.device
                )
        operands = frozenset(a.name for a in form.tensors)
        by_place, named = _passed(given, parameters - operands)
        return replace(call, tensors=by_place, named=named, lent=lent)


def _appending(whole: _Whole, new: int, memory: str, parameters: frozenset[str]) -> FormedCall:
    """The call that appends its sequences' last rows, and before it one that appends those before
    them: what the second reads is what the first has written.
    """
    form, total = whole.form, whole.k_lengths
    earlier = min(new, min(total) - new)
    # what is appended is not there before, so a kernel that does not write it reads fillers
    blank = {name: list(parts) for name, parts in whole.sequences.items()}
    for name in ("key", "value"):
        blank[name] = [x.clone() for x in blank[name]]
        for x in blank[name]:
            x[:, x.shape[1] - new - earlier :] = _FILLER
    built = _tensors(form, blank, whole.table, memory)
    filled = _tensors(form, whole.sequences, whole.table, memory)
    caches = {a.name: a.role for a in form.tensors if a.role != "query"}
    lent = tuple((f"{n} ({MISAPPENDED})", built[n], filled[n]) for n in caches)

    def step(rows: int, after: int) -> FormedCall:
        given = dict(built)
        for role in ("query", *NEW):
            argument, parts = form.of(role), whole.sequences[role.removeprefix("new_")]
            assert argument is not None
            if role == "query":
                parts = [x[:, :rows] for x in parts] if after else parts
            else:
                parts = [x[:, x.shape[1] - after - rows : x.shape[1] - after] for x in parts]
            given[argument.name] = laid_out(
                _arranged(parts, argument.dims), memory_of(memory, role), None)  # fmt: skip
        sizes = replace(whole, q_lengths=(rows,) * len(total)) if after else whole
        return sizes.call(given, parameters, [n - after - rows for n in total], lent)

    last = step(new, 0)
    return replace(last, before=step(earlier, new)) if earlier else last


def _lse_dims(form: Form) -> tuple[str, ...]:
    return tuple(sorted((d for d in form.out_dims if d != "D"), key="BHNT".index))


def _passed(
    given: dict[str, Any], parameters: frozenset[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """By position as long as no name of the form's is a parameter's, then by name."""
    by_place = []
    for name, x in given.items():
        if name in parameters:
            break
        by_place.append(x)
    named = dict(list(given.items())[len(by_place) :])
    return tuple(by_place), named


def _among(parts: list[Tensor], audited: Sequence[int], lengths: Sequence[int]) -> list[Tensor]:
    """Sequences `[H, N, D]` in their places, and in the others the first one's elements in another
    order, as long as is asked.
    """
    if len(audited) == len(lengths):
        return parts
    given = dict(zip(audited, parts, strict=True))
    first = parts[0].detach()
    rows = [torch.arange(n, device=first.device) % first.shape[1] for n in lengths]
    return [given.get(i, first[:, rows[i]].flip(-1)) for i in range(len(lengths))]


def _tensors(
    form: Form, sequences: dict[str, list[Tensor]], table: Tensor | None, memory: str
) -> dict[str, Tensor]:
    """The operands by the function's names."""
    held = {"qkv": ("query", "key", "value"), "kv": ("key", "value")}
    built = {}
    for argument in form.tensors:
        parts = [sequences[role] for role in held.get(argument.role, (argument.role,))]
        inner = tuple(d for d in argument.dims if d not in ("2", "3"))
        arranged = [_arranged(part, inner, table, form.page) for part in parts]
        axis = next((i for i, d in enumerate(argument.dims) if d in ("2", "3")), None)
        x = arranged[0] if axis is None else torch.stack(arranged, axis)
        built[argument.name] = laid_out(x, memory_of(memory, argument.role), None)
    return built


def _arranged(
    parts: Sequence[Tensor], dims: Sequence[str], table: Tensor | None = None, page: int = PAGE
) -> Tensor:
    """Sequences `[H, N, D]` as one tensor of these dimensions."""
    if "T" in dims:
        x, have = torch.cat(list(parts), 1), "HTD"
    elif "P" in dims:
        assert table is not None
        x, have = _paged(parts, table, page), "PHSD"
    elif "S" in dims:
        # room beyond the longest, so that reading past a length meets fillers
        capacity = -(-max(p.shape[1] for p in parts) // PAGE) * PAGE + PAGE
        x, have = torch.stack([_filled(p, capacity) for p in parts]), "BHSD"
    else:
        x, have = torch.stack(list(parts)), "BHND"
    named = ["H" if d == "G" else d for d in dims]
    for place in reversed(range(len(have))):
        if have[place] not in named:  # one sequence, one head, or one query
            x, have = x.squeeze(place), have.replace(have[place], "")
    return x.permute([have.index(d) for d in named])


def _filled(part: Tensor, rows: int) -> Tensor:
    """A sequence `[H, N, D]` and numbers beyond it, up to so many rows."""
    beyond = part.new_full((part.shape[0], rows - part.shape[1], part.shape[2]), _FILLER)
    return torch.cat([part, beyond], 1)


def _table(lengths: Sequence[int], page: int) -> Tensor:
    """Which page holds which rows of which sequence `[B, most pages]`: none where its neighbor's
    is, page 0 nobody's.
    """
    counts = [-(-n // page) for n in lengths]
    # in a random order, or a kernel that ignores the table would find the right pages
    order = 1 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(5))
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for i, count in enumerate(counts):
        table[i, :count] = order[sum(counts[:i]) :][:count]
    return table


def _paged(parts: Sequence[Tensor], table: Tensor, page: int) -> Tensor:
    """The pages `[P, H, S, D]` of sequences `[H, N, D]`."""
    first = parts[0]
    free = first.new_full((first.shape[0], page, first.shape[2]), _FILLER)
    pages, order = [free], [0]
    for part, row in zip(parts, table.tolist(), strict=True):
        count = -(-part.shape[1] // page)
        pages += list(torch.chunk(_filled(part, count * page), count, 1))
        order += row[:count]
    places = torch.argsort(torch.tensor(order, device=first.device))
    return torch.stack(pages)[places]


def _about(
    role: str,
    q_lengths: Sequence[int],
    k_lengths: Sequence[int],
    table: Tensor | None,
    device: torch.device,
) -> Any:
    """What a kernel wants to know beside its operands."""
    lengths = k_lengths if role.endswith("_k") or role == "lengths" else q_lengths
    if role.startswith("cu_seqlens"):
        ends = torch.tensor([0, *lengths]).cumsum(0)
        return ends.to(device, torch.int32)
    if role.startswith("max_seqlen"):
        return max(lengths)
    if role == "lengths":
        return torch.tensor(lengths, dtype=torch.int32, device=device)
    assert role == "block_table", role
    assert table is not None
    return table.to(device)
