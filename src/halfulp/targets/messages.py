"""What a kernel's process and its auditor tell each other: JSON and safetensors, bytes that are
data whoever wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from halfulp.calls import Result
from halfulp.operations import OperationCalls, OperationResult
from halfulp.targets.target import Outcome

RESULTS = ("out", "lse", "grad_query", "grad_key", "grad_value")
_MOST_TEXT = 2**20  # bytes of JSON
_MOST_NOTES = 32


def send(connection: Connection, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Send plain data and tensors."""
    connection.send_bytes(json.dumps(plain).encode())
    # clones, since safetensors takes no two names of one memory
    whole = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    connection.send_bytes(save(whole))


def receive(connection: Connection, most_bytes: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What was sent; EOFError where the other side is gone, ValueError where it is no such thing or
    longer.
    """
    try:
        plain = json.loads(connection.recv_bytes(_MOST_TEXT))
        tensors = load(connection.recv_bytes(most_bytes))
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    # what follows on the connection cannot be read either: the same as an end
    except OSError as error:  # longer, or cut off in the middle
        raise EOFError(str(error)) from error
    if not isinstance(plain, dict):
        raise ValueError("expected an object")
    return plain, tensors


def outcome_of(
    plain: Mapping[str, Any], tensors: Mapping[str, Tensor], given: Mapping[str, Tensor]
) -> Outcome:
    """The outcome that the process of an attention kernel tells, held to what such a call can give.

    Raises ValueError for anything else.
    """
    told = _told(plain)
    if told.kind != "ok":
        return told
    query, value = given["query"], given["value"]
    like = {
        "out": ((*query.shape[:3], value.shape[3]), query.dtype),
        "lse": (tuple(query.shape[:3]), None),
        **{f"grad_{n}": (tuple(given[n].shape), given[n].dtype) for n in ("query", "key", "value")},
    }
    for name, x in tensors.items():
        shape, dtype = like.get(name, (None, None))
        if tuple(x.shape) != shape or (x.dtype != dtype if dtype else not x.is_floating_point()):
            raise ValueError(f"{name} of shape {tuple(x.shape)} and dtype {x.dtype}")
    if "out" not in tensors:
        raise ValueError("no out")
    result = Result(tensors["out"], *(tensors.get(name) for name in RESULTS[1:]))
    return replace(told, result=result)


def outcome_of_operation(
    plain: Mapping[str, Any], tensors: Mapping[str, Tensor], calls: OperationCalls
) -> Outcome:
    """The same of the process of another operation's kernel."""
    told = _told(plain)
    if told.kind != "ok":
        return told
    like = calls.expected()
    for name, x in tensors.items():
        dimensions, dtypes = like.get(name, (-1, ()))
        if x.ndim - 1 != dimensions or x.dtype not in dtypes or len(x) != calls.count:
            raise ValueError(f"{name} of shape {tuple(x.shape)} and dtype {x.dtype}")
    return replace(told, result=OperationResult(dict(tensors)))


def _told(plain: Mapping[str, Any]) -> Outcome:
    """What a process tells beside tensors."""
    kind, refusal, notes = plain.get("kind"), plain.get("refusal"), plain.get("notes")
    if kind not in ("ok", "unsupported", "refused", "error"):
        raise ValueError(f"kind={kind!r}")
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise ValueError(f"notes={notes!r}")
    # a kernel writes them too, and may write without end
    told = tuple(notes[:_MOST_NOTES])
    return Outcome(None, None if kind == "ok" else str(refusal), kind, told)
