"""The audit on the defect zoo: every planted fault is caught, and no sound or stock kernel raises
an alarm.
"""

import pytest

from halfulp.audit import audit, planning
from tests.audit.zoo import FAULTY, SOUND

CAUSES = {
    "out_cut": "O is truncated",
    "published_fix": "underflows",
    "masked_row_nan": "nothing become NaN",
    "gqa_wrong_head": "wrong key heads",
    "tail_dropped": "sizes off the block",
    "causal_sees_next": "causal mask",
    "mask_first_head": "masks are applied",
    "backward_scores_fp16": "recomputed more coarsely",
    "backward_key_prescaled": "recomputed more coarsely",
    "exp_minus_lse": "exp(−lse)",
    "delta_sum_low": "δ, or the difference",
    "dk_dv_sums_low": "accumulated in low precision",
    "dq_sums_low": "accumulated in low precision",
    "scores_low": "scores are rounded",
    "max_from_zero": "maximum is not tracked",
}
"""What the likeliest cause must say, where a fault has a telling signature."""


@pytest.fixture(autouse=True)
def _probes_alone(monkeypatch):
    """The zoo is the probes' test; the covering array has its own."""
    monkeypatch.setattr(planning, "size_cases", lambda _: ())


@pytest.mark.parametrize("kernel", FAULTY, ids=lambda k: k.name)
def test_a_planted_fault_is_caught(kernel):
    report = audit(kernel.fn, explain=False)
    assert report.verdict == "defect", f"{kernel.fault}: {report.reason}"
    if kernel.name in CAUSES:
        assert any(CAUSES[kernel.name] in cause.name for cause in report.causes), [
            c.name for c in report.causes
        ]


@pytest.mark.parametrize("kernel", SOUND, ids=lambda k: k.name)
def test_a_kernel_without_a_fault_raises_no_alarm(kernel):
    report = audit(kernel.fn, explain=False)
    assert report.verdict == kernel.expected, report.reason
    assert report.exit_code == 0


def test_the_zoo_is_large_enough():
    assert len(FAULTY) >= 20
    assert len(SOUND) >= 8
    assert sum(kernel.allclose for kernel in FAULTY) >= 10
