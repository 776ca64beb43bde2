"""The faults that `benchmarks.mutants` plants: one wrong line each, in what measures, judges and
reports.

A fault must be one that a reader could make and that changes what the laboratory says. Where a
verdict is named, that claim must lose or change it; else one of the tests must fail.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One fault: `old`, which stands in the file exactly once, becomes `new`."""

    room: str  # what kind of thing is broken
    what: str  # in words
    file: str  # inside src/halfulp
    old: str
    new: str
    tests: tuple[str, ...] = ()
    claim: str = ""  # whose verdict must change, where no test is to catch it


LEDGER, RUNS_A = "tests/papers/test_ledger.py", "tests/papers/test_runs_a.py"
FAILURE, FAULTS = "tests/experiments/test_failure.py", "tests/papers/test_planted_faults.py"
MEASURES, RUNNING = "tests/watch/test_measures.py", "tests/watch/test_running.py"
DIRECTIONS, CURVATURE = "tests/watch/test_directions.py", "tests/watch/test_curvature.py"
COMPARE, SWEEP = "tests/experiments/test_compare.py", "tests/experiments/test_sweep.py"
STATISTICS, RULE = "tests/audit/test_statistics.py", "tests/isolate/test_rule.py"
SUBSTITUTIONS, QUESTIONS = "tests/isolate/test_substitutions.py", "tests/isolate/test_questions.py"
MATCH, TWINS = "tests/papers/test_kernel_match.py", "tests/papers/test_twins.py"
IN_MODEL, CHANCES = "tests/papers/test_in_model.py", "tests/test_chances.py"

SLOW = (
    "tests/isolate/test_questions.py::test_a_kernel_is_emulated_and_that_is_said",
    "tests/papers/test_kernel_match.py::test_a_wrong_step_costs_the_bits_it_is_known_to_cost",
    "tests/experiments/test_failure.py::test_workers_give_the_numbers_of_one_process_in_order",
    "tests/experiments/test_failure.py::test_the_stock_recipe_walks_off_and_halfulp_and_fp32_do_not",
    "tests/watch/test_alarms.py::test_the_run_that_will_fail_is_named_and_its_repaired_twin_is_not",
    "tests/algorithms/test_golden.py::test_memory_grows_with_n_alone",
)
"""Tests that are not asked: they train or compute for ten seconds and more."""

GUARD = "tests/test_mutants.py::test_a_guard_lets_the_sound_module_pass"


def _guard(file: str) -> str:
    """The guard of a module; the other tests there look at this list, and would fail anyway."""
    return f"{GUARD}[{file}]"


_RUNGS = "experiments/failure_recipes.py"
_MECHANISM = "papers/claims/a_mechanism.py"

RUNGS_ = (
    Mutant(
        "rung",
        "dP ∘ P silently runs in full fp32",
        _RUNGS,
        '_replaced("dP∘P", "delta-dP.P"),',
        "type(_STOCK)(name='dP∘P', algorithm='flash2', **TILES),",
        (_guard(_RUNGS),),
    ),
    Mutant(
        "rung",
        "fp32 O for δ is dP ∘ P",
        _RUNGS,
        '_replaced("fp32 O for δ", "delta-exact-O"),',
        '_replaced("fp32 O for δ", "delta-dP.P"),',
        (_guard(_RUNGS),),
    ),
    Mutant(
        "rung",
        "O = PV in the backward pass is dP ∘ P",
        _RUNGS,
        '_replaced("O = PV in the backward pass", "delta-recomputed-O"),',
        '_replaced("O = PV in the backward pass", "delta-dP.P"),',
        (_guard(_RUNGS),),
    ),
    Mutant(
        "rung",
        "halfulp's rung is the stock recipe",
        _RUNGS,
        'BF16_HALFULP.with_(name="halfulp", **TILES),',
        '_STOCK.with_(name="halfulp"),',
        (_guard(_RUNGS),),
    ),
    Mutant(
        "rung",
        "the authors' recipe with its softmax fix is without it",
        _RUNGS,
        'BF16_PAPER_STABILIZED.with_(name="authors+softmax", **TILES),',
        'BF16_AUTHORS.with_(name="authors+softmax", **TILES),',
        (_guard(_RUNGS),),
    ),
    Mutant(
        "rung",
        "one tile of keys where two are said, so nothing is ever rescaled",
        _RUNGS,
        '"block_key": 16}',
        '"block_key": 32}',
        (_guard(_RUNGS),),
    ),
    Mutant(
        "rung",
        "isolation: O recomputed in the backward pass is dP ∘ P",
        "isolate/substitutions.py",
        '(("delta_from", "recomputed"),),',
        '(("delta_from", "probabilities"),),',
        (SUBSTITUTIONS, _guard("isolate/substitutions.py")),
    ),
    Mutant(
        "rung",
        "isolation: O in fp32 leaves O as it is and changes lse",
        "isolate/substitutions.py",
        '"the rounding of O", (("out", FP32),), "δ"',
        '"the rounding of O", (("lse", BF16),), "δ"',
        (SUBSTITUTIONS,),
    ),
    Mutant(
        "rung",
        "isolation: fp32 in the places that were asked to keep low precision",
        "isolate/substitutions.py",
        "place: choice if place in left else EXACT",
        "place: EXACT if place in left else choice",
        (SUBSTITUTIONS,),
    ),
    Mutant(
        "rung",
        "the byte GPT's changes are left out of its recipe",
        "papers/runs_a.py",
        'fields = {"out": "fp32" if bits is None else f"e8m{bits}", **changes}',
        'fields = {"out": "fp32" if bits is None else f"e8m{bits}"}',
        (RUNS_A,),
    ),
)

ARITHMETIC = (
    Mutant(
        "emulation",
        "golden computes in fp32",
        "algorithms/golden.py",
        "q, k, v = call.query.double(), call.key.double(), call.value.double()",
        "q, k, v = (x.double() * (1 + 2**-25) for x in (call.query, call.key, call.value))",
        ("tests/algorithms/test_golden.py",),
    ),
    Mutant(
        "emulation",
        "golden's δ is rounded to fp32",
        "algorithms/golden.py",
        "delta = (dp * p).sum(-1, keepdim=True)",
        "delta = (dp * p).sum(-1, keepdim=True).float().double()",
        ("tests/algorithms/test_golden.py",),
    ),
    Mutant(
        "emulation",
        "O recomputed in the backward pass is the forward's",
        "algorithms/backward.py",
        "                out = self._recomputed()\n",
        "                out = kept.out_for_delta\n",
        ("tests/algorithms/test_identities.py", "tests/test_recipes.py", LEDGER),
    ),
    Mutant(
        "emulation",
        "the published softmax fix is a no-op",
        "algorithms/stabilize.py",
        "return torch.where(repeated & r_m.isfinite(), factor * r_m, r_m)",
        "return torch.where(repeated & r_m.isfinite(), r_m, r_m)",
        ("tests/algorithms/test_stabilize.py",),
    ),
    Mutant(
        "emulation",
        "an integer shift rounds to nearest, so weights above 1 appear",
        "algorithms/stabilize.py",
        "return r_m.ceil()",
        "return r_m.round()",
        ("tests/algorithms/test_stabilize.py", "tests/algorithms/test_halfulp.py"),
    ),
    Mutant(
        "emulation",
        "repeated maxima are never seen: one of them is enough to count",
        "algorithms/stabilize.py",
        ") > 1",
        ") > 2",
        ("tests/algorithms/test_stabilize.py",),
    ),
)

MEASUREMENTS = (
    Mutant(
        "measurement",
        "e = δ_lp − δ_hp without its sign, so A10 is always positive",
        "watch/measures.py",
        "(call.out.to(exact.out.dtype) - exact.out)).sum(-1)\n",
        "(call.out.to(exact.out.dtype) - exact.out)).sum(-1).abs()\n",
        (MEASURES,),
    ),
    Mutant(
        "measurement",
        "e of the gradient with the wrong sign",
        "watch/measures.py",
        "return -along / (call.scale * mean.square().sum(-1))",
        "return along / (call.scale * mean.square().sum(-1))",
        (MEASURES,),
    ),
    Mutant(
        "measurement",
        "the mean score counts hidden pairs",
        "watch/measures.py",
        "visible = n * n_k - int(hidden.sum())",
        "visible = n * n_k",
        (MEASURES,),
    ),
    Mutant(
        "measurement",
        "a row ties with itself",
        "watch/measures.py",
        "return ((scores == scores.amax(-1, keepdim=True)).sum(-1) > 1)",
        "return ((scores == scores.amax(-1, keepdim=True)).sum(-1) > 0)",
        (MEASURES,),
    ),
    Mutant(
        "measurement",
        "equal signs are counted as unequal ones",
        "watch/measures.py",
        "return same / (same + other), products.sum((0, 2))",
        "return other / (same + other), products.sum((0, 2))",
        (MEASURES,),
    ),
    Mutant(
        "measurement",
        "the row sums of dS take δ_hp, so they are zero",
        "watch/measures.py",
        "delta = (grad_out * exact.out).sum(-1) + error",
        "delta = (grad_out * exact.out).sum(-1)",
        (MEASURES,),
    ),
    Mutant(
        "measurement",
        "every step counts as positive",
        "watch/running.py",
        "self.positive + (x > 0)",
        "self.positive + (x.abs() > 0)",
        (RUNNING,),
    ),
    Mutant(
        "measurement",
        "t without the correlation of neighbors",
        "watch/running.py",
        "(variance / n * (1 + rho) / (1 - rho)).sqrt()",
        "(variance / n).sqrt()",
        (RUNNING,),
    ),
    Mutant(
        "measurement",
        "A9 compares a step's terms with themselves",
        "watch/directions.py",
        "mean = past.to(matrix.dtype).mean(0)",
        "mean = matrix",
        (DIRECTIONS,),
    ),
    Mutant(
        "measurement",
        "A9's control across tokens is not shuffled",
        "watch/directions.py",
        "return x.gather(-1, (torch.arange(features, device=x.device) + by) % features)",
        "return x",
        (DIRECTIONS,),
    ),
    Mutant(
        "measurement",
        "A9's terms are also compared with themselves",
        "watch/directions.py",
        "return (total.square().sum((1, 2)) - count) / max(count * (count - 1), 1)",
        "return total.square().sum((1, 2)) / max(count * count, 1)",
        (DIRECTIONS,),
    ),
    Mutant(
        "measurement",
        "D9's second pass is not exact, so all of e is first order",
        "watch/curvature.py",
        "change[: self.entries] = exact - out[: self.entries]",
        "change[: self.entries] = 0 * exact",
        (CURVATURE,),
    ),
    Mutant(
        "measurement",
        "t of a mean without √n",
        "watch/curvature.py",
        "return samples.mean(0) * math.sqrt(count) / samples.std(0)",
        "return samples.mean(0) * count / samples.std(0)",
        (CURVATURE, "tests/watch/test_monitor.py"),
    ),
    Mutant(
        "measurement",
        "weights over tilings: the keys' order is not undone",
        "papers/claims/delta_mean.py",
        "restored[..., order] = found",
        "restored = found",
        (RUNS_A,),
    ),
    Mutant(
        "measurement",
        "B1 compares the kernel with itself",
        "papers/kernel_match.py",
        "matches.append(compare(real, emulated(*inputs, masked)))",
        "matches.append(compare(real, kernel(*inputs, masked)))",
        (MATCH,),
    ),
    Mutant(
        "measurement",
        "B1: what differs by less than an ulp is identical",
        "papers/kernel_match.py",
        "int((distance == 0).sum())",
        "int((distance <= 1).sum())",
        (MATCH,),
    ),
    Mutant(
        "measurement",
        "B6 compares every version with itself",
        "papers/in_model.py",
        "apart = (outs[version] - outs[against]).abs()",
        "apart = (outs[version] - outs[version]).abs()",
        (IN_MODEL,),
    ),
    Mutant(
        "measurement",
        "B6: weights that lost their bits keep them",
        "papers/in_model.py",
        "all(torch.equal(one[name], other[name]) for name in one)",
        "all(torch.allclose(one[name], other[name], atol=1e-2) for name in one)",
        (IN_MODEL,),
    ),
    Mutant(
        "measurement",
        "B2: the deviation from the baseline is the one from golden",
        "experiments/sweep.py",
        'yield _deviation(job, family + job.suffix, "baseline", out - base, recipe)',
        'yield _deviation(job, family + job.suffix, "baseline", out - truth, recipe)',
        (SWEEP,),
    ),
    Mutant(
        "measurement",
        "B2, B3: golden in fp32",
        "experiments/sweep.py",
        "truth = golden(query, key, value).out",
        "truth = golden(query, key, value).out.float().double()",
        (SWEEP,),
    ),
    Mutant(
        "measurement",
        "B5: exchanged blocks are the published ones",
        "experiments/sweep.py",
        'exchanged=order == "exchanged"',
        "exchanged=False",
        (SWEEP,),
    ),
    Mutant(
        "measurement",
        "B3: the factor upside down",
        "experiments/sweep.py",
        "ratios = [a / b for a, b in zip(this.max, base.max, strict=True) if b]",
        "ratios = [b / a for a, b in zip(this.max, base.max, strict=True) if b]",
        (SWEEP,),
    ),
    Mutant(
        "measurement",
        "B7: a distance of values that are not sorted",
        "experiments/compare.py",
        "apart = np.sort(one, axis=None) - np.sort(other, axis=None).astype(np.float64)",
        "apart = one.ravel() - other.ravel().astype(np.float64)",
        (COMPARE,),
    ),
    Mutant(
        "measurement",
        "B7: the largest difference without its sign",
        "experiments/compare.py",
        "float(np.abs(one.astype(np.float64) - other).max())",
        "float((one.astype(np.float64) - other).max())",
        (COMPARE,),
    ),
    Mutant(
        "measurement",
        "B7: the run repeated is the run itself",
        "papers/twins.py",
        'Pair(REPEATED, "baseline", "repeated")',
        'Pair(REPEATED, "baseline", "baseline")',
        (TWINS,),
    ),
    Mutant(
        "measurement",
        "D10: the mean is not removed",
        "papers/delta_changes.py",
        "return error - error.mean()",
        "return error",
        (RUNS_A,),
    ),
    Mutant(
        "measurement",
        "A20: the heaviest key is the lightest",
        "papers/claims/a_growth.py",
        "heaviest = m.argmax(-1, keepdim=True)",
        "heaviest = m.argmin(-1, keepdim=True)",
        (RUNS_A,),
    ),
)

CLAIMS = (
    Mutant(
        "claim",
        "A10 counts the size of a sum as its sign",
        _MECHANISM,
        "positive = sum(x > 0 for x in values)",
        "positive = sum(abs(x) > 0 for x in values)",
        (FAULTS,),
    ),
    Mutant(
        "claim",
        "A10 takes the sums of the byte GPT without their sign",
        _MECHANISM,
        '_signs([sum(heads) for heads in run.measured("delta_error", 0)])',
        '_signs([abs(sum(heads)) for heads in run.measured("delta_error", 0)])',
        (FAULTS,),
    ),
    Mutant(
        "claim",
        "A9 reads the figure in the place of its control",
        _MECHANISM,
        "for heads in run.measured(figure + control, 0, since)",
        "for heads in run.measured(figure, 0, since)",
        (FAULTS,),
    ),
    Mutant(
        "claim",
        "A11: dO at the exact O is dO at the rounded one",
        _MECHANISM,
        '"exact": snapshot.exact_grad}',
        '"exact": snapshot.call.grad_out}',
        (RUNS_A,),
    ),
    Mutant(
        "claim",
        "D9: the share of curvature is taken of itself",
        _MECHANISM,
        'min(c.value / e.value for c, e in zip(parts["curvature"], parts["e"], strict=True))',
        'min(c.value / c.value for c, e in zip(parts["curvature"], parts["e"], strict=True))',
        (FAULTS,),
    ),
    Mutant(
        "claim",
        "A3 to A6: a loss or a σ alone is a failure",
        "papers/claims/a_cause.py",
        "excess(a, b) > EXCESS and sigma(a)",
        "excess(a, b) > EXCESS or sigma(a)",
        (RUNS_A,),
    ),
    Mutant(
        "claim",
        "A3 to A6: stable whatever σ does",
        "papers/claims/a_cause.py",
        "excess(a, b) <= CALM_EXCESS and sigma(a) <= CALM_GROWTH * sigma(b)",
        "excess(a, b) <= CALM_EXCESS",
        (FAULTS,),
    ),
    Mutant(
        "claim",
        "A3: the twin is held against itself",
        "papers/claims/a_cause.py",
        "return statistics.mean(mine[last:]) - statistics.mean(other[last:])",
        "return statistics.mean(mine[last:]) - statistics.mean(mine[last:])",
        (RUNS_A,),
    ),
    Mutant(
        "claim",
        "A12: the control is the row with weights of 1",
        "papers/claims/a_rounding.py",
        "error = _running_error(below, value)",
        "error = _running_error(weights, value)",
        claim="A12",
    ),
    Mutant(
        "claim",
        "A13: the result or the bits, either is enough",
        "papers/claims/a_rounding.py",
        '"same": float(same and bits),',
        '"same": float(same or bits),',
        (FAULTS,),
    ),
    Mutant(
        "claim",
        "A14: weights below 1 are weights of 1",
        "papers/claims/a_rounding.py",
        "torch.where(weights == 1, round_to(drawn, BF16), weights), value)",
        "weights, value)",
        claim="A14",
    ),
    Mutant(
        "claim",
        "A16: a fixed offset is none",
        "papers/claims/a_rounding.py",
        '**{f"{c:g}": Shift("offset", offset=c) for c in offsets}',
        '**{f"{c:g}": Shift() for c in offsets}',
        claim="A16",
    ),
    Mutant(
        "claim",
        "A19: a loss that never rises has an infinite lead",
        "papers/claims/a_growth.py",
        'math.isfinite(f["latest rise"]) and f["lead"] >= INTERVAL',
        'f["lead"] >= INTERVAL',
        (LEDGER,),
    ),
    Mutant(
        "claim",
        "A19: queries' growth over the run's own",
        "papers/claims/a_growth.py",
        'max(run.measured("query_rms")[-1]) / max(twin.measured("query_rms")[-1])',
        'max(run.measured("query_rms")[-1]) / max(run.measured("query_rms")[0])',
        (FAULTS,),
    ),
    Mutant(
        "claim",
        "D3: the softmax fix is a no-op",
        "papers/claims/weak_points.py",
        'weights = observed(BF16_PAPER_STABILIZED, scores, "weights")[-1]',
        'weights = observed(BF16_FLASH2, scores, "weights")[-1]',
        (FAULTS, LEDGER),
    ),
    Mutant(
        "claim",
        "D5: a tie is any maximum",
        "papers/claims/weak_points.py",
        "(scores[0] == scores[0].amax(-1, keepdim=True)).sum(-1) > 1",
        "(scores[0] == scores[0].amax(-1, keepdim=True)).sum(-1) > 0",
        claim="D5",
    ),
    Mutant(
        "claim",
        "D7: golden in fp32",
        "papers/claims/weak_points.py",
        "values.append(relative(_query_gradient(recipe, q, k, v, do), truth.grad_query))",
        "values.append(relative(_query_gradient(recipe, q, k, v, do), truth.grad_query.float()))",
        (FAULTS,),
    ),
    Mutant(
        "claim",
        "B7: the repeated run never drifts",
        "papers/claims/b_training.py",
        '"repeated": max(value for drift in repeated for value in drift.max_difference),',
        '"repeated": 0.0 * len(repeated),',
        (TWINS, FAULTS),
    ),
    Mutant(
        "claim",
        "B4: only the maximum has to grow",
        "papers/claims/b_deviation.py",
        "least = min(figures.values())",
        "least = max(figures.values())",
        (FAULTS,),
    ),
    Mutant(
        "claim",
        "a figure that is NaN holds",
        "papers/claim.py",
        "if any(math.isnan(x) for x in measured.figures.values()) or not claim.rule.holds(",
        "if not claim.rule.holds(",
        (LEDGER,),
    ),
    Mutant(
        "claim",
        "a mean's error without √n",
        "papers/claim.py",
        "float(x.std() / math.sqrt(x.numel()))",
        "float(x.std())",
        (LEDGER,),
    ),
)

JUDGEMENT = (
    Mutant(
        "statistics",
        "bounds of half their width",
        "audit/statistics.py",
        "reach = student_beyond(level, n - 1) * error",
        "reach = student_beyond(level, n - 1) * error / 2",
        (STATISTICS,),
    ),
    Mutant(
        "statistics",
        "what rounding O may do is allowed where it is not asked for",
        "audit/statistics.py",
        "        if through_delta\n",
        "        if not through_delta\n",
        (STATISTICS,),
    ),
    Mutant(
        "statistics",
        "a random walk drifts: sums of sizes",
        "audit/statistics.py",
        "difference.double().cumsum(-1)",
        "difference.double().abs().cumsum(-1)",
        (STATISTICS,),
    ),
    Mutant(
        "statistics",
        "an interval of 90 % is called one of 95 %",
        "experiments/compare_summary.py",
        "student_beyond(0.025, count - 1)",
        "student_beyond(0.05, count - 1)",
        (COMPARE,),
    ),
    Mutant(
        "statistics",
        "B8's ratio upside down",
        "experiments/compare_summary.py",
        "return geometric_interval([a / b for a, b in pairs])",
        "return geometric_interval([b / a for a, b in pairs])",
        (COMPARE,),
    ),
    Mutant(
        "statistics",
        "a slope without its intercept",
        "experiments/compare_summary.py",
        "    x -= x.mean()\n    return float(x @ y / (x @ x))",
        "    return float(x @ y / (x @ x))",
        (COMPARE,),
    ),
    Mutant(
        "statistics",
        "alarms at the level of one head, whatever their number",
        "watch/alarms.py",
        "student_beyond(level / (2 * max(heads, 1)), measurements - 1)",
        "student_beyond(level / 2, measurements - 1)",
        ("tests/watch/test_alarms.py",),
    ),
    Mutant(
        "statistics",
        "the sign test is one-sided",
        "watch/running.py",
        "p = [2 * binomial_at_most(",
        "p = [binomial_at_most(",
        (RUNNING,),
    ),
    Mutant(
        "statistics",
        "the seed that was searched on counts as confirmed",
        "isolate/result.py",
        "return share_bound(held, tried, CONFIDENCE) if tried else None",
        "return share_bound(self.held, self.tried, CONFIDENCE) if tried else None",
        (QUESTIONS,),
    ),
    Mutant(
        "rule",
        "scores that run away downwards do not drift",
        "isolate/rule.py",
        'return ("drifting" if abs(moved) > rule.score_drift else "survived"), figures',
        'return ("drifting" if moved > rule.score_drift else "survived"), figures',
        (FAILURE,),
    ),
    Mutant(
        "rule",
        "a run is held against its own scores",
        "isolate/rule.py",
        "bound = max(1.0, twin.largest(step))",
        "bound = max(1.0, self.curves[name].largest(step))",
        (RULE,),
    ),
    Mutant(
        "rule",
        "one spike is a failure",
        "isolate/rule.py",
        "if step - self._since.setdefault(name, step) < self.patience:",
        "if step - self._since.setdefault(name, step) < 0:",
        (RULE,),
    ),
    Mutant(
        "rule",
        "a loss is held against its worst",
        "isolate/rule.py",
        "last, lowest = tenths[-1], min(tenths)",
        "last, lowest = tenths[-1], max(tenths)",
        (FAILURE,),
    ),
    Mutant(
        "rule",
        "the drift of a twin is not taken off",
        "isolate/rule.py",
        "return _moved(curve.values) - (0.0 if twin is None else twin.at(end) - twin.at(half))",
        "return _moved(curve.values)",
        (RULE,),
    ),
)

REPORTS = (
    Mutant(
        "report",
        "the ledger's line counts every claim as the papers'",
        "report/ledger_page.py",
        'own = [str(v["verdict"]) for v in verdicts if v["source"] == source]',
        'own = [str(v["verdict"]) for v in verdicts if v["source"] or source]',
        ("tests/report/test_html.py", FAULTS),
    ),
    Mutant(
        "report",
        "altered arithmetic has the sign of what is reproduced",
        "report/tables.py",
        '"reproduced with altered arithmetic": ("warn", "≈"),',
        '"reproduced with altered arithmetic": ("good", "✓"),',
        (FAULTS,),
    ),
    Mutant(
        "report",
        "the ladder shows the best of the seeds",
        "isolate/result.py",
        "return min(rung.runs.values())",
        "return max(rung.runs.values())",
        (QUESTIONS,),
    ),
    Mutant(
        "report",
        "a range of seeds: the median is drawn as its upper end",
        "experiments/failure.py",
        "high = tuple(max(column) for column in columns) if several else None",
        "high = median if several else None",
        (FAILURE,),
    ),
    Mutant(
        "report",
        "numbers with two digits for three",
        "report/text.py",
        'return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"',
        'return f"{value:.2g}" if abs(value) < 1000 else f"{value:.0f}"',
        ("tests/report/test_terminal.py", "tests/report/test_html.py"),
    ),
    Mutant(
        "report",
        "a share below one reads 100 %",
        "report/text.py",
        'return "> 99.9 %" if 0.999 < fraction < 1 else f"{100 * fraction:.3g} %"',
        'return f"{100 * fraction:.3g} %"',
        ("tests/report/test_audit_report.py", "tests/report/test_terminal.py"),
    ),
    Mutant(
        "report",
        "minutes are rounded and seconds kept",
        "report/text.py",
        'f"{seconds // 60:.0f} min {seconds % 60:.0f} s"',
        'f"{seconds / 60:.0f} min {seconds:.0f} s"',
        (_guard("report/text.py"),),
    ),
    Mutant(
        "report",
        "fig. 5: the cumulative sum of sizes",
        "papers/figures_a.py",
        "Series(label, steps, _running([h[0] for h in run.measured(n, 0, since)]))",
        "Series(label, steps, _running([abs(h[0]) for h in run.measured(n, 0, since)]))",
        (RUNS_A,),
    ),
    Mutant(
        "report",
        "lines of a figure lose their logarithmic axis",
        "report/curves.py",
        'axes.set_xscale("log")\n    if figure["y_log"]:',
        'axes.set_xscale("log")\n    if figure["x_log"] and figure["y_log"]:',
        ("tests/report/test_figures.py",),
    ),
)

MUTANTS: tuple[Mutant, ...] = (
    *RUNGS_,
    *ARITHMETIC,
    *MEASUREMENTS,
    *CLAIMS,
    *JUDGEMENT,
    *REPORTS,
)
