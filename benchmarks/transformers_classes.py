"""Holds every class of the installed transformers that can be built tiny to its own eager attention
with `attn_implementation="halfulp"`, and writes what came of it to docs/transformers.md.

Logits and all gradients, in float32, of a text, padded on either side, packed and in pieces with a
cache; `tests/attention/held_to_eager.py` says how. A minute on one core. With --bfloat16 the same
cases in bfloat16, where no budget is rigorous, a router's near-tie being another expert: the error
against eager in float32, over what eager's own bfloat16 makes, is listed where it is above 2, with
sdpa's beside it; no page is written. From the repository root:

    python -m benchmarks.transformers_classes [--json FILE] [--bfloat16]
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from tests.attention.held_to_eager import BUDGET, Held, cases, difference, hold
from tests.attention.tiny_transformers import built, classes

import halfulp

DOCUMENT = Path(__file__).parents[1] / "docs" / "transformers.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--bfloat16", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    halfulp.register_transformers()
    if asked.bfloat16:
        narrow()
        return
    found = [(kind, hold(name, model_type)) for kind, model_type, name in classes()]
    if asked.json:
        asked.json.write_text(json.dumps([asdict(held) | {"kind": kind} for kind, held in found]))
    DOCUMENT.write_text(document(found), encoding="utf-8")
    print(dict(Counter(held.verdict for _, held in found)))


def narrow() -> None:
    """Print how far bfloat16 is from eager's float32, over what eager's bfloat16 is."""
    warnings.simplefilter("ignore")
    ratios: list[float] = []
    names = set()
    for _, model_type, name in classes():
        try:
            exact = built(name, model_type, "eager")
            models = [
                built(name, model_type, how, exact.state_dict()).bfloat16()
                for how in ("eager", "halfulp", "sdpa")
            ]
            asked = cases(exact)
        except Exception:  # refused, or not to be built: the page has the reasons
            continue
        for case, run in asked.items():
            try:
                truth = run(exact)
                own, ours, sdpa = (
                    [difference(x, y) for x, y in zip(run(model), truth, strict=True)]
                    for model in models
                )
            except Exception:  # a case that the class does not take, in float32 or in bfloat16
                continue
            over, peer = (
                max(e / max(o, 1e-3) for e, o in zip(errors, own, strict=True))
                for errors in (ours, sdpa)
            )
            names.add(name)
            ratios.append(over)
            if over > 2:
                print(f"{name}, {case}: {over:.1f} × eager's bfloat16 error; sdpa {peer:.1f} ×")
    print(
        f"{len(names)} classes, {len(ratios)} cases: {statistics.median(ratios):.2f} × in the"
        f" median, {sum(r <= 2 for r in ratios)} within 2 ×"
    )


def document(found: list[tuple[str, Held]]) -> str:
    """The page, from what came of each class."""
    by = {verdict: [held for _, held in found if held.verdict == verdict] for verdict in VERDICTS}
    bad = by["wrong"] + by["crashed"]
    left_out = by["not built"] + by["eager fails"] + by["no call"]
    compared = len(by["equal"]) + len(by["refused"]) + len(bad)
    worst = max(max(held.cases.values()) for held in by["equal"])
    return f"""# transformers {transformers.__version__}, class by class

Every class that transformers lists for causal and masked language models, encoder–decoders,
vision, speech, audio and text with pictures, and one of each other model type, built tiny from its
default configuration, with `attn_implementation="halfulp"` and with its own eager attention, on the
same weights and inputs in float32: a plain text, padded left, padded right, packed (positions that
start again) and read in pieces with a cache, as far as the class takes each. Sliding windows, soft
caps and sinks are on wherever the configuration has them.

Of {len(found)} classes {compared} could be compared: **{len(by["equal"])} give eager's logits and
gradients** within {BUDGET:.0e} (the worst: {worst:.0e}), **{len(by["refused"])} are refused in one
line**, {len(bad)} are wrong. The other {len(left_out)} are unknown: {len(by["not built"])} did not
become small, {len(by["eager fails"])} do not run on such inputs, and
{len(by["no call"])} had no attention as built.
`python -m benchmarks.transformers_classes` writes this page.
{_section("Wrong", ("class", "what"), [(held.name, held.said) for held in bad]) if bad else ""}
{_section("Equal to eager", ("class", "kind", "cases", "worst error", "calls", ""), _equal(found))}
"As sdpa" marks a case in which transformers' own eager and sdpa differ, and halfulp gives what sdpa
gives.

{_section("Refused", ("class", "instead"), [(h.name, _instead(h.said)) for h in by["refused"]])}
{_section("Unknown", ("class", "why"), [(held.name, _short(held.said)) for held in left_out])}"""


VERDICTS = ("equal", "refused", "wrong", "crashed", "no call", "not built", "eager fails")
_LETTERS = {"plain": "t", "padded left": "l", "padded right": "r", "packed": "p", "cache": "c"}


def _equal(found: list[tuple[str, Held]]) -> Iterable[tuple[str, ...]]:
    for kind, held in found:
        if held.verdict == "equal":
            cases = "".join(_LETTERS[case] for case in held.cases)
            note = held.said.partition(", which")[0]
            worst = f"{max(held.cases.values()):.0e}"
            yield held.name, kind, cases, worst, str(held.calls), note


def _section(title: str, heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    key = "t a text, l and r padded left and right, p packed, c in pieces with a cache\n\n"
    lines = [f"| {' | '.join(row)} |" for row in (heads, ("---",) * len(heads), *rows)]
    return f"## {title}\n\n{key if 'cases' in heads else ''}" + "\n".join(lines) + "\n"


def _instead(said: str) -> str:
    return said.partition("for this one ")[2] or said.partition(": ")[2]


def _short(said: str) -> str:
    """The reason in a few words, without what would be markup."""
    if not said:
        return "no attention as built"
    plain = said.replace("|", "/").replace("`", "").replace("<", "(").replace(">", ")")
    return plain if len(plain) <= 70 else plain[:69] + "…"


if __name__ == "__main__":
    main()
