"""Faults of `benchmarks.mutant_list` that are planted in every run of the tests: three in each of
the modules that measure, judge and say most, each of which a short guard must catch. And the
command itself: where a fault no longer fits the sources it says so, and a copy is left as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import mutants
from benchmarks.mutant_list import MUTANTS, Mutant
from scipy.stats import t as student

from halfulp.audit.figures import Figure, Lean
from halfulp.audit.invariants import Relation
from halfulp.calls import Sees
from halfulp.isolate.rule import Rule
from halfulp.watch.taps import Observed

PACKAGE = mutants.ROOT / "src" / "halfulp"
Guard = Callable[[Any], None]


@pytest.fixture
def planted() -> Iterator[Callable[[str, str], ModuleType]]:
    """A module made of its own source with a fault in it, "" for none, beside the sound one."""
    before = set(sys.modules)

    def load(file: str, what: str) -> ModuleType:
        source = (PACKAGE / file).read_text(encoding="utf-8")
        if what:
            (mutant,) = (m for m in MUTANTS if (m.file, m.what) == (file, what))
            if source.count(mutant.old) != 1:
                raise LookupError(f"{file}: {what}: benchmarks/mutant_list.py is out of date")
            source = source.replace(mutant.old, mutant.new)
        name = f"planted_{len(sys.modules)}"
        sys.modules[name] = module = ModuleType(name)
        exec(compile(source, name, "exec"), module.__dict__)
        return module

    yield load
    for name in set(sys.modules) - before:
        if name.startswith("planted_"):
            del sys.modules[name]


def call_of(seed: int = 0) -> Observed:
    g = torch.Generator().manual_seed(seed)
    query, key, value, grad = torch.randn(4, 1, 2, 6, 4, generator=g, dtype=torch.float64)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.5
    )
    noise = 1e-3 * torch.randn(out.shape, generator=g, dtype=torch.float64)
    return Observed(query, key, value, Sees(True), 0.5, out=out + noise, grad_out=grad)


def guard_measures(module: Any) -> None:
    """Of the definition, row by row."""
    call = call_of()
    exact = module.exact_call(call)
    error = module.delta_error(call, exact)
    slow = [
        sum(float(a * b) for a, b in zip(call.grad_out[0, h, i], wrong[0, h, i], strict=True))
        for wrong in (call.out - exact.out,)
        for h in range(2)
        for i in range(6)
    ]
    assert error.flatten().tolist() == pytest.approx(slow)
    seen = [float(exact.scores[0, 0, i, j]) for i in range(6) for j in range(i + 1)]
    mean = float(module.score_figures(exact)["mean_score"][0])
    assert mean == pytest.approx(sum(seen) / len(seen))
    assert float(module.repetition_figures(exact)["tied_rows"].sum()) == 0
    agreement, _ = module.feature_signs(call, exact)
    products = (call.grad_out * (call.out - exact.out))[0, 0, :, 0]
    assert float(agreement[0, 0]) == pytest.approx(float((products > 0).double().mean()))


def guard_running(module: Any) -> None:
    """Signs, and a t that neighbors which are alike do not make larger."""
    known = module.Running.start((1,))
    for x in (1.0, -1.0, -1.0, -1.0):
        known.add(torch.tensor([x]))
    assert (int(known.positive), int(known.negative)) == (1, 3)
    assert float(known.sign_p) == pytest.approx(2 * 5 / 16)
    slow, fast = module.Running.start((1,)), module.Running.start((1,))
    values = [1.0] * 5 + [3.0] * 5
    for x, y in zip(values, values[::5] * 5, strict=True):
        slow.add(torch.tensor([x]))
        fast.add(torch.tensor([y]))
    assert float(slow.t) < 0.5 * float(fast.t)


def guard_summary(module: Any) -> None:
    """Against numbers that were worked out by hand."""
    found = module.interval_of([1.0, 2.0, 3.0])
    assert found.high - found.value == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
    assert module.slope_of([10, 20, 30], [5.0, 6.0, 7.0]) == pytest.approx(0.1)

    class Drift:
        def __init__(self, seed: int, slope: float) -> None:
            self.seed, self.slope = seed, slope

    drifts = [Drift(0, 8.0), Drift(1, 2.0)], [Drift(0, 1.0), Drift(1, 1.0)]
    ratio = module.ratio_by_seed(*drifts, lambda drift: drift.slope)
    assert ratio.value == pytest.approx(4)


def guard_statistics(module: Any) -> None:
    """Bounds as wide as Student's, slack where it belongs, and signs that cancel."""
    found = module.estimate(torch.tensor([1.0, 2.0, 3.0]), 0.025)
    assert found.upper - found.mean == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
    one = torch.ones(4, dtype=torch.float64)
    figure = Figure("dQ error", "grad_query", one, 1e-9 * one, 0.1 * one, 10 * one, one)
    sharp = module.error_ratio(figure, figure, 0.01, through_delta=False)
    assert sharp.mean == pytest.approx(1)
    assert module.error_ratio(figure, figure, 0.01, through_delta=True).mean < 0.2
    walk = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    assert module.drift_exponent(walk) < 0.6


def guard_rule(module: Any) -> None:
    """What has failed, what drifts, and what is held against the twin."""
    calm = [1e-3] * 20
    assert module.judge(calm, [0.0] * 10 + [-0.5 * i for i in range(10)])[0] == "drifting"
    assert module.judge([*calm[:-2], 4e-3, 4e-3], [0.0] * 20)[0] == "failed"
    assert module.judge([1e-2, *calm[:-1]], [0.0] * 20)[0] == "survived"

    def rows(score: Callable[[int], float]) -> list[dict[str, float]]:
        return [{"step": i, "loss": 1e-3, "mean_score": score(i)} for i in range(1, 101)]

    twin = module.read_curves(rows(lambda i: 0.1 * i))
    along = module.judge_rows(rows(lambda i: 0.1 * i), module.Rule(**vars(Rule())), 100, twin)
    assert along.outcome == "survived"


def guard_text(module: Any) -> None:
    """As people read them."""
    assert module.number_text(1.234) == "1.23"
    assert module.number_text(12345.0) == "12345"
    assert module.percent_text(0.9999) == "> 99.9 %"
    assert module.percent_text(1.0) == "100 %"
    assert module.duration_text(130) == "2 min 10 s"


def guard_rungs(module: Any) -> None:
    """A rung is the stock recipe but for what its name says, and rounds what that rounds."""
    stock = module.RUNGS["stock"]
    changed = {
        "dP∘P": {"delta_from": "probabilities"},
        "fp32 O for δ": {"delta_from": "exact_out"},
        "O = PV in the backward pass": {"delta_from": "recomputed"},
    }
    for name, fields in changed.items():
        assert module.RUNGS[name] == stock.with_(name=name, **fields), name
    assert module.RUNGS["halfulp"].shift.kind == "integer"
    assert module.RUNGS["authors+softmax"].shift.kind == "stabilized"
    assert (stock.block_query, stock.block_key) == (None, 16)


def guard_substitutions(module: Any) -> None:
    """Every operation changes the fields that its name speaks of; `only` keeps what is kept."""
    fields = {one.name: dict(one.fields) for one in module.OPERATIONS}
    assert fields["delta-recomputed-O"] == {"delta_from": "recomputed"}
    assert set(fields["O-fp32"]) == {"out"}
    cells = {(0, 0): "torch:flash", (0, 1): "torch:flash"}
    assert module.only(cells, [(0, 1)]) == {(0, 0): module.EXACT, (0, 1): "torch:flash"}


def guard_verdict(module: Any) -> None:
    """Leans of either sign count, NaN outside its row always does, and the worst grade stands."""
    spread = 0.01 * torch.arange(8).double()
    case = SimpleNamespace(dtype="bfloat16", shape=SimpleNamespace(unit="heads"))
    stock = SimpleNamespace(stock=SimpleNamespace(leans=(Lean("out", spread),)))
    for lean, count in ((-1.0, 1), (1.0, 1), (0.05, 0)):
        measured = SimpleNamespace(leans=(Lean("out", spread + lean),))
        assert len(module._leans(case, measured, stock, 0.01)) == count, lean
    escaped = Relation("NaN confinement", "out", torch.zeros(2), 1.0, confined=False)
    assert module.judge_relation(escaped, None, 0.01, module.LIMITS["bfloat16"]) is not None
    grades = [SimpleNamespace(grade=grade) for grade in ("stock", "defect", "stock")]
    assert module.verdict_of(grades) == "defect"


def guard_evidence(module: Any) -> None:
    """Errors that are alike, opposite, and half as large."""
    exact = torch.randn(1, 2, 32, 4, generator=torch.Generator().manual_seed(0)).double()
    error = 1e-3 * torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).double()
    seen = module.Observed.of(exact + error, exact)
    same, opposite, half = (seen.against(exact + f * error) for f in (1.0, -1.0, 0.5))
    assert (same.left, same.cosine) == (pytest.approx(0), pytest.approx(1))
    assert (opposite.left, opposite.cosine) == (pytest.approx(4, rel=1e-3), pytest.approx(-1))
    assert (half.left, half.cosine) == (pytest.approx(0.25, rel=1e-3), pytest.approx(1))


def guard_noise(module: Any) -> None:
    """Gaps below the margin, far above it, and of one sign."""
    g = torch.Generator().manual_seed(0)
    noise = [[torch.randn(12, 64, generator=g).double() for _ in range(3)]]
    drawn = {f: f * torch.randn(12, 64, generator=g).double() for f in (1, 1.8, 9)}
    found = {f: module.chance([gap], noise) for f, gap in drawn.items()}
    assert found[1].p > 0.9
    assert found[1].ratio == pytest.approx(1, rel=0.2)
    assert found[9].p < 1e-6
    assert found[9].ratio == pytest.approx(9, rel=0.2)
    assert module.speaks_for_rounding(found[1.8])
    means = torch.linspace(-1, 2, 8).double()
    leaning = module.chance([means[:, None].expand(8, 2)], [])
    t = float(means.mean() / means.std() * 8**0.5)
    assert leaning.lean_t == pytest.approx(t)
    assert leaning.lean_p == pytest.approx(2 * float(student.sf(t, 7)))


GUARDS: dict[str, Guard] = {
    "watch/measures.py": guard_measures,
    "watch/running.py": guard_running,
    "experiments/compare_summary.py": guard_summary,
    "audit/statistics.py": guard_statistics,
    "isolate/rule.py": guard_rule,
    "report/text.py": guard_text,
    "experiments/failure_recipes.py": guard_rungs,
    "isolate/substitutions.py": guard_substitutions,
    "audit/verdict.py": guard_verdict,
    "reconstruct/evidence.py": guard_evidence,
    "diff/noise.py": guard_noise,
}
KEPT = [
    ("watch/measures.py", "e = δ_lp − δ_hp without its sign, so A10 is always positive"),
    ("watch/measures.py", "the mean score counts hidden pairs"),
    ("watch/measures.py", "a row ties with itself"),
    ("watch/measures.py", "equal signs are counted as unequal ones"),
    ("watch/running.py", "every step counts as positive"),
    ("watch/running.py", "t without the correlation of neighbors"),
    ("watch/running.py", "the sign test is one-sided"),
    ("experiments/compare_summary.py", "an interval of 90 % is called one of 95 %"),
    ("experiments/compare_summary.py", "B8's ratio upside down"),
    ("experiments/compare_summary.py", "a slope without its intercept"),
    ("audit/statistics.py", "bounds of half their width"),
    ("audit/statistics.py", "what rounding O may do is allowed where it is not asked for"),
    ("audit/statistics.py", "a random walk drifts: sums of sizes"),
    ("isolate/rule.py", "scores that run away downwards do not drift"),
    ("isolate/rule.py", "a loss is held against its worst"),
    ("isolate/rule.py", "the drift of a twin is not taken off"),
    ("report/text.py", "numbers with two digits for three"),
    ("report/text.py", "a share below one reads 100 %"),
    ("report/text.py", "minutes are rounded and seconds kept"),
    ("experiments/failure_recipes.py", "dP ∘ P silently runs in full fp32"),
    ("experiments/failure_recipes.py", "fp32 O for δ is dP ∘ P"),
    ("experiments/failure_recipes.py", "halfulp's rung is the stock recipe"),
    ("isolate/substitutions.py", "isolation: O recomputed in the backward pass is dP ∘ P"),
    ("isolate/substitutions.py", "isolation: O in fp32 leaves O as it is and changes lse"),
    (
        "isolate/substitutions.py",
        "isolation: fp32 in the places that were asked to keep low precision",
    ),
    ("audit/verdict.py", "a lean counts along one sign alone"),
    ("audit/verdict.py", "what is as good as stock hides a defect"),
    (
        "audit/verdict.py",
        "NaN that leaves its row is no defect where a kernel repeats its bits",
    ),
    ("reconstruct/evidence.py", "reconstruct: errors that point the other way are alike"),
    ("reconstruct/evidence.py", "reconstruct: what is left of an error is held against itself"),
    ("reconstruct/evidence.py", "reconstruct: a candidate's result is its error"),
    ("diff/noise.py", "diff: rounding alone is given no margin"),
    ("diff/noise.py", "diff: a lean is tested on one side"),
    ("diff/noise.py", "diff: the gap over its margin is called the gap over rounding"),
]


@pytest.mark.parametrize("file", GUARDS)
def test_a_guard_lets_the_sound_module_pass(file: str, planted: Any) -> None:
    GUARDS[file](planted(file, ""))


@pytest.mark.parametrize(("file", "what"), KEPT)
def test_a_guard_catches_the_planted_fault(file: str, what: str, planted: Any) -> None:
    with pytest.raises(AssertionError):
        GUARDS[file](planted(file, what))


def test_three_faults_stay_in_every_guarded_module() -> None:
    files = [file for file, _ in KEPT]
    assert min(files.count(file) for file in GUARDS) >= 3


def test_the_list_is_long_enough_and_says_each_thing_once() -> None:
    said = [(m.file, m.what) for m in MUTANTS]
    assert len(set(said)) == len(said) >= 36


def test_a_fault_that_does_not_fit_is_told() -> None:
    fits = MUTANTS[0]
    gone = Mutant("rung", "gone", fits.file, "no such line", "x", ("tests",))
    twice = Mutant("rung", "twice", fits.file, "import", "x", ("tests",))
    idle = Mutant("rung", "idle", fits.file, fits.old, fits.old, ("tests",))
    said = mutants.misfits([gone, twice, idle])
    assert [line.split(": ")[1] for line in said] == ["gone", "twice", "idle"]
    assert not mutants.misfits([fits])


def test_a_fault_is_planted_found_and_taken_out_again(tmp_path: Path) -> None:
    """In a package of one function and one test of it."""
    (tmp_path / "src" / "halfulp").mkdir(parents=True)
    (tmp_path / "test_it.py").write_text(
        "from halfulp.it import twice\n\n\ndef test_twice():\n    assert twice(2) == 4\n"
    )
    sound = "def twice(x):\n    return 2 * x\n"
    (tmp_path / "src" / "halfulp" / "__init__.py").write_text("")
    (tmp_path / "src" / "halfulp" / "it.py").write_text(sound)
    copy = mutants.Copy(tmp_path)
    faults = [
        Mutant("one", "thrice", "it.py", "2 * x", "3 * x", ("test_it.py",)),
        Mutant("one", "squared", "it.py", "2 * x", "x * x", ("test_it.py",)),
        Mutant("one", "no python", "it.py", "2 * x", "2 *", ("test_it.py",)),
    ]
    found = [mutants.outcome(fault, copy, {}) for fault in faults]
    assert [one.result for one in found] == ["caught", "survived", "broken"]
    assert found[0].by == "test_it.py::test_twice"
    assert (tmp_path / "src" / "halfulp" / "it.py").read_text() == sound
    assert mutants.table(found).endswith("1 of 3 caught: one 1 of 3")
