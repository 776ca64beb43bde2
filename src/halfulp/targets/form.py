"""The form a kernel is called in: which tensors it takes, in which order of dimensions, under which
names, and what it gives back. One line says it:

    qkv[T,3,H,D], cu_seqlens, max_seqlen, causal=causal_end -> out[T,H,D], lse[H,T]

Names are the function's own, a `name=role` says what one means that is not known here, a
`name=value` is passed as it is, and `under autocast` at the end calls it so. What a function's
parameters are called says most forms by itself.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from halfulp.complaints import meant
from halfulp.targets.signature import OPTIONAL, SPELLINGS, signature_of

DIMS = {
    "B": "sequences",
    "H": "heads",
    "G": "heads of keys, which several heads of queries share",
    "N": "tokens",
    "D": "features",
    "T": "tokens of all sequences, one sequence after the other",
    "S": "rows of a cache, more than are used",
    "P": "pages of a cache, of S rows each: 16, or a number in place of S",
    "2": "K and V",
    "3": "Q, K and V",
}
"""Dimensions by letter. Without B or H it is called for each; without N for one query."""

ROLES: dict[str, tuple[str, ...]] = {
    "query": ("query", "q"),
    "key": ("key", "k", "k_cache", "key_cache"),
    "value": ("value", "v", "v_cache", "value_cache"),
    "qkv": ("qkv",),
    "kv": ("kv",),
    "out": ("out", "output", "o"),
    "lse": ("lse", "softmax_lse"),
    "cu_seqlens": ("cu_seqlens", "cu_seq_lens", "cu_lens"),
    "cu_seqlens_q": ("cu_seqlens_q", "cu_seq_lens_q", "qo_indptr"),
    "cu_seqlens_k": ("cu_seqlens_k", "cu_seqlens_kv", "cu_seq_lens_k", "kv_indptr"),
    "max_seqlen": ("max_seqlen", "max_seq_len", "max_length"),
    "max_seqlen_q": ("max_seqlen_q", "max_seq_len_q", "max_length_q"),
    "max_seqlen_k": ("max_seqlen_k", "max_seqlen_kv", "max_seq_len_k", "max_length_k"),
    "lengths": ("cache_seqlens", "seq_lens", "context_lens", "kv_lens", "cache_lens"),
    "block_table": ("block_table", "block_tables", "page_table"),
    "new_key": ("new_key", "key_new", "k_new", "new_k"),
    "new_value": ("new_value", "value_new", "v_new", "new_v"),
}
"""Our name of what a form gives beside options: what kernels call it."""

PAGE = 16
"""Rows of a page where a form does not say them."""

TENSORS = ("query", "key", "value", "qkv", "kv")
NEW = ("new_key", "new_value")
"""What a kernel appends to its cache before it attends; k and v beside k_cache and v_cache."""

BUFFERS = ("out", "lse")
END = "causal_end"
"""A role: causality whose diagonal ends at the last query and the last key."""

_ITEM = re.compile(r"(\w+)\s*(?:\[([^\]]*)\])?\s*(?:=\s*(.+))?", re.DOTALL)
_AUTOCAST = "under autocast"


@dataclass(frozen=True)
class Argument:
    """One argument: `name` is the function's, `role` ours, or "" of a constant."""

    name: str
    role: str
    dims: tuple[str, ...] = ()
    constant: Any = None
    page: int = PAGE  # rows of a page, which a line may say in place of S

    def __str__(self) -> str:
        known = self.name in ROLES.get(self.role, ()) or self.name in SPELLINGS.get(self.role, ())
        dims = [str(self.page) if d == "S" and self.page != PAGE else d for d in self.dims]
        text = self.name + (f"[{','.join(dims)}]" if dims else "")
        if not self.role:
            return f"{text}={self.constant!r}"
        return text if known else f"{text}={self.role}"


@dataclass(frozen=True)
class Form:
    """How a kernel is called."""

    arguments: tuple[Argument, ...]
    results: tuple[Argument, ...] = ()  # out and lse, where they are not shaped like the query
    autocast: bool = False

    @classmethod
    def parse(cls, text: str) -> Form:
        """Read a form's line, or one of `FORMS` by its name; ValueError, one line, for anything
        else.
        """
        return _parsed(" ".join(text.split()))

    def __str__(self) -> str:
        text = ", ".join(map(str, self.arguments))
        text += f" -> {', '.join(map(str, self.results))}" if self.results else ""
        return f"{text} {_AUTOCAST}" if self.autocast else text

    @property
    def name(self) -> str:
        """Its name among `FORMS`, else its line."""
        return next((name for name, line in FORMS.items() if line == str(self)), str(self))

    def of(self, role: str) -> Argument | None:
        """The argument that has a role."""
        return next((a for a in self.arguments if a.role == role), None)

    def dims(self, role: str) -> tuple[str, ...]:
        """The dimensions of query, key, value, or of the results out and lse."""
        given = next((a for a in (*self.results, *self.arguments) if a.role == role), None)
        if given is None and role != "lse":
            given = self.of("qkv") or (None if role in ("query", "out") else self.of("kv"))
        if given is not None and given.dims:
            return given.dims
        return self.dims("query") if role == "out" else ()

    @property
    def out_dims(self) -> tuple[str, ...]:
        """The dimensions of what it returns."""
        return tuple(d for d in self.dims("out") if d not in ("2", "3"))

    @property
    def tensors(self) -> tuple[Argument, ...]:
        """The operands."""
        return tuple(a for a in self.arguments if a.role in TENSORS)

    @property
    def options(self) -> dict[str, str]:
        """Our options by the function's names, as far as the form says them."""
        known = {a.role: a.name for a in self.arguments if a.role in SPELLINGS}
        end = self.of(END)
        return known if end is None else known | {"is_causal": end.name}

    @property
    def given(self) -> frozenset[str]:
        """The names of all that the form gives beside options."""
        return frozenset(a.name for a in self.arguments if a.role not in (*SPELLINGS, END))

    @property
    def plain(self) -> bool:
        """Whether query, key and value are dense tensors of whole batches of heads."""
        whole = all({"B", "N", "D"} <= {*a.dims} and {"H", "G"} & {*a.dims} for a in self.tensors)
        return whole and len(self.tensors) == 3

    @property
    def ends(self) -> bool:
        """Whether a causal mask's diagonal ends at the last key."""
        return self.of(END) is not None

    @property
    def ragged(self) -> bool:
        """Whether sequences of other lengths may lie beside those that are audited."""
        return bool({"T", "S"} & {d for a in self.tensors for d in a.dims})

    @property
    def page(self) -> int:
        """Rows of a cache's page."""
        return self.tensors[-1].page

    @property
    def appends(self) -> bool:
        """Whether it writes new rows into its cache."""
        return self.of("new_key") is not None

    @property
    def decodes(self) -> bool:
        """Whether it takes one query a sequence."""
        return not {"N", "T"} & set(self.dims("query"))

    @property
    def forward_only(self) -> str | None:
        """Why no gradients can be asked for; None: they can."""
        if any(a.role in BUFFERS for a in self.arguments):
            return "it writes into a tensor that it is given"
        return "it reads a cache" if "S" in self.dims("key") else None

    def accepts(self, declared: frozenset[str]) -> frozenset[str]:
        """Which options it takes in this form, of those that its signature declares."""
        taken = set(declared)
        if not self.plain:  # a mask, and which weights drop, go by sequence, head and token
            taken -= {"attn_mask", "dropout_p"}
        if "G" in self.dims("key"):
            taken.add("enable_gqa")
        if self.of("qkv"):
            taken.discard("enable_gqa")
        if self.ends:
            taken.add("causal_offset")
        return frozenset(taken)

    def others(self) -> tuple[Form, ...]:
        """Forms of the same names that a kernel may have meant: other orders of dimensions."""
        names = {a.role: a.name for a in self.arguments}
        if "qkv" in names and self.dims("qkv")[0] == "B":
            stacked = ("B,3,N,H,D", "3,B,H,N,D", "B,3,H,N,D", "B,N,H,3,D")
            turned = [replace(self, arguments=_with(self, "qkv", dims)) for dims in stacked]
            return tuple(replace(form, results=_result(form.dims("qkv"))) for form in turned)
        if set(names) != {"query", "key", "value"}:
            return ()
        known = ("B,N,H,D", "N,H,D", "H,N,D")
        return tuple(
            form
            for dims in known
            if (form := replace(self, arguments=_with(self, "", dims))) != self
        )


def _with(form: Form, role: str, dims: str) -> tuple[Argument, ...]:
    """The arguments with other dimensions of that tensor, or of all."""
    split = tuple(dims.split(","))
    return tuple(
        replace(a, dims=split) if a.role in ((role,) if role else TENSORS) else a
        for a in form.arguments
    )


def _result(dims: Sequence[str]) -> tuple[Argument, ...]:
    return (Argument("out", "out", tuple(d for d in dims if d != "3")),)


FORMS = {
    "BHND": "q[B,H,N,D], k[B,H,N,D], v[B,H,N,D]",
    "BNHD": "q[B,N,H,D], k[B,N,H,D], v[B,N,H,D]",
    "packed": "qkv[B,N,3,H,D]",
    "varlen": "q[T,H,D], k[T,H,D], v[T,H,D], cu_seqlens_q, cu_seqlens_k, max_seqlen_q,"
    " max_seqlen_k, causal=causal_end",
    "decode": "q[B,H,D], k[B,N,H,D], v[B,N,H,D]",
    "cache": "q[B,N,H,D], k_cache[B,S,H,D], v_cache[B,S,H,D], cache_seqlens, causal=causal_end",
    "append": "q[B,N,H,D], k_cache[B,S,H,D], v_cache[B,S,H,D], k_new[B,N,H,D], v_new[B,N,H,D],"
    " cache_seqlens, causal=causal_end",
    "paged": "q[B,H,D], k_cache[P,S,H,D], v_cache[P,S,H,D], block_table, cache_seqlens",
}
"""Forms by name."""


@lru_cache(maxsize=256)
def _parsed(text: str) -> Form:
    line = FORMS.get(text, text)
    autocast = line.endswith(_AUTOCAST)
    line = line.removesuffix(_AUTOCAST).strip()
    before, arrow, after = line.partition("->")
    before = FORMS.get(before.strip(), before)
    if not before.strip():
        before = FORMS["BHND"]
    form = Form(_arguments(before, text), _arguments(after, text) if arrow else (), autocast)
    _check(form, text)
    return form


def _arguments(line: str, text: str) -> tuple[Argument, ...]:
    # commas outside of brackets alone: those inside are between dimensions
    found = [_argument(item.strip(), text) for item in re.split(r",(?![^\[]*\])", line)]
    cached = {a.role for a in found if "S" in a.dims}
    return tuple(
        replace(a, role=f"new_{a.role}") if a.role in cached and "S" not in a.dims else a
        for a in found
    )


def _argument(item: str, text: str) -> Argument:
    matched = _ITEM.fullmatch(item)
    if matched is None:
        raise _wrong(text, f"{item!r} is no argument")
    name, dims, value = matched.groups()
    letters = tuple(d.strip() for d in dims.split(",")) if dims is not None else ()
    page = next((int(d) for d in letters if d.isdecimal() and d not in DIMS), PAGE)
    if "P" in letters and 1 < page <= 4096:
        letters = tuple("S" if d == str(page) else d for d in letters)
    for letter in letters:
        if letter not in DIMS:
            raise _wrong(text, f"{name} has a dimension {letter!r}")
    known = {spelled: role for role, names in (ROLES | SPELLINGS).items() for spelled in names}
    if value is None:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f", such as {name}={known[near[0]]}" if near else f", such as {name}=is_causal"
            raise _wrong(text, f"what {name} means is not known: say it{hint}, or a value")
        return Argument(name, known[name], letters, page=page)
    if value in (*ROLES, *SPELLINGS, END):
        return Argument(name, value, letters, page=page)
    try:
        return Argument(name, "", (), ast.literal_eval(value))
    except (ValueError, SyntaxError):
        hint = meant(value, [*ROLES, *SPELLINGS, END])
        raise _wrong(text, f"{name}={value} is no role and no value{hint}") from None


def _check(form: Form, text: str) -> None:
    roles = [a.role for a in form.arguments if a.role]
    twice = next((role for role in roles if roles.count(role) > 1), None)
    if twice:
        raise _wrong(text, f"{twice} is given twice")
    held = [set(roles) & set(TENSORS)]
    if held[0] not in ({"query", "key", "value"}, {"qkv"}, {"query", "kv"}):
        raise _wrong(text, "it must hold q, k and v, or qkv, or q and kv")
    for a in (*form.tensors, *form.results):
        stacked = {"qkv": "3", "kv": "2"}.get(a.role)
        if not a.dims or ("D" not in a.dims and a.role != "lse"):
            raise _wrong(text, f"{a.name} needs its dimensions, such as {a.name}[B,N,H,D]")
        if len(set(a.dims)) < len(a.dims) or (stacked is not None and stacked not in a.dims):
            raise _wrong(text, f"{a.name}[{','.join(a.dims)}] is no order of dimensions")
    if any(a.role not in BUFFERS for a in form.results):
        raise _wrong(text, "results are out and lse")
    if form.appends or "new_value" in roles:
        told = [form.dims(role) for role in NEW]
        like = tuple(d for d in form.dims("query"))
        if "S" not in form.dims("key") or "lengths" not in roles or told[0] != told[1]:
            raise _wrong(
                text, "new rows are appended to a cache with cache_seqlens, k_new and v_new"
            )
        if {*told[0]} - {"G"} | {"H"} != {*like}:
            raise _wrong(text, "k_new and v_new have the dimensions of q, such as k_new[B,N,H,D]")
    letters = {d for a in form.tensors for d in a.dims}
    if "T" in letters and not any(role.startswith("cu_seqlens") for role in roles):
        raise _wrong(text, "T needs cu_seqlens; one sequence a call is N")
    if "P" in letters and "block_table" not in roles:
        raise _wrong(text, "P needs block_table")
    if len({a.page for a in form.tensors if a.role != "query"}) > 1:
        raise _wrong(text, "pages of keys and of values hold as many rows")
    if "S" in letters and "lengths" not in roles:
        raise _wrong(text, "rows S are more than are used, which cache_seqlens counts; else N")
    if {"S", "T"} <= letters:
        raise _wrong(text, "S and T go together in no form that is known here")


def _wrong(text: str, why: str) -> ValueError:
    return ValueError(
        f"form={text!r}: {why}; accepted are {', '.join(FORMS)}, or a line such as"
        f" '{FORMS['BNHD']} -> out[B,N,H,D], lse[B,H,N]' (dimensions {', '.join(DIMS)})"
    )


def recognized(function: Callable[..., Any]) -> Form | None:
    """The form that a function's parameters say; None where they say nothing but q, k and v."""
    try:
        parameters = list(signature_of(function).parameters.values())
    except (TypeError, ValueError):  # of C
        return None
    placed = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    roles = _roles([p.name for p in placed])
    first = [roles.get(p.name) for p in placed[:3]]
    operands: tuple[str, ...] = ("query", "key", "value")
    if first[:1] == ["qkv"]:
        operands = ("qkv",)
    elif first[1:2] == ["kv"]:
        operands = ("query", "kv")
    elif len(placed) < 3:
        return None
    named = dict(zip((p.name for p in placed), operands, strict=False))
    if {*operands} <= {*roles.values()}:  # in whatever order
        named = {name: role for name, role in roles.items() if role in operands}
    rest = {
        p.name: roles[p.name]
        for p in placed
        if p.name in roles
        and roles[p.name] not in operands
        # an optional table would make pages of a cache, an optional out a forward pass
        and (p.default is p.empty or roles[p.name].startswith(("cu_", "max_", "lengths")))
    }
    if "lengths" not in rest.values():  # where rows are appended is not known
        rest = {name: role for name, role in rest.items() if role not in NEW}
    if operands == ("query", "key", "value") and not rest:
        return None
    dims = _dims_by(frozenset(rest.values()), operands)
    causal = next((p.name for p in placed if p.name in SPELLINGS["is_causal"]), None)
    told = named | rest
    told = {p.name: told[p.name] for p in placed if p.name in told}  # in their order
    arguments = [Argument(name, role, dims.get(role, ())) for name, role in told.items()]
    if causal is not None and {"T", "S"} & set(dims["key"]):
        arguments.append(Argument(causal, END))
    return Form(tuple(arguments))


def _roles(names: Sequence[str]) -> dict[str, str]:
    """What parameters mean by their names: keys beside a cache of keys are appended to it."""
    known = {spelled: role for role, spelled_so in ROLES.items() for spelled in spelled_so}
    roles = {name: known[name] for name in names if name in known}
    caches = {roles[name] for name in roles if "cache" in name}
    return {
        name: f"new_{role}" if role in caches - {"lengths"} and "cache" not in name else role
        for name, role in roles.items()
    }


def _dims_by(rest: frozenset[str], operands: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Dimensions of queries and keys, by what else a kernel wants."""
    stacked = {"qkv": ",3", "kv": ",2"}.get(operands[-1], "")
    if any(role.startswith("cu_seqlens") for role in rest):
        query, key = "T,H,D", f"T{stacked},H,D"
    elif "block_table" in rest:
        query, key = "B,H,D", "P,S,H,D"
    elif "lengths" in rest:
        query, key = "B,N,H,D", f"B,S{stacked},H,D"
    else:
        plain = "B,N,H,D" if stacked else "B,H,N,D"
        query, key = plain, plain.replace(",H", f"{stacked},H") if stacked else plain
    given = dict.fromkeys(("query", *NEW), query) | dict.fromkeys(
        ("key", "value", "qkv", "kv"), key
    )
    return {role: tuple(dims.split(",")) for role, dims in given.items()}


BHND = Form.parse("BHND")
"""The form in which halfulp's own kernels and PyTorch's are called."""

assert set(OPTIONAL) < set(SPELLINGS)
