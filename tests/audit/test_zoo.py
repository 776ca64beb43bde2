"""The audit on the defect zoo: every planted fault is caught, and no sound or stock kernel raises
an alarm.
"""

import pytest

from halfulp.audit import Shape, audit
from tests.audit.zoo import FAULTY, SOUND

CAUSES = {
    "published_fix": "underflow",
    "masked_row_nan": "masked-row",
    "exp_minus_lse": "exp-of-lse",
}
"""The key of the cause, where a fault makes NaN; of others the reconstruction names it."""


# Nearly all faults show on rows this short: as many heads, which are the sample, at a fifth of the
# time. `python -m benchmarks.zoo_rates` has the rates at the size that users audit at.
SMALL = (Shape(4, 4, 96, 96, 32),)
NEED_SIZE = ("tiles_skipped", "scale_low", "scale_of_padded_width", "dk_dv_sums_low", "dq_sums_low")

pytestmark = pytest.mark.usefixtures("probes_alone")


@pytest.mark.usefixtures("no_lengths")
@pytest.mark.parametrize("kernel", FAULTY, ids=lambda k: k.name)
def test_a_planted_fault_is_caught(kernel):
    shapes = () if kernel.name in NEED_SIZE else SMALL
    report = audit(kernel.fn, explain=False, shapes=shapes)
    assert report.verdict == "defect", f"{kernel.fault}: {report.reason}"
    if kernel.name in CAUSES:
        assert CAUSES[kernel.name] in [cause.key for cause in report.causes]


@pytest.mark.parametrize("kernel", SOUND, ids=lambda k: k.name)
def test_a_kernel_without_a_fault_raises_no_alarm(kernel):
    report = audit(kernel.fn, explain=False, shapes=SMALL)
    assert report.verdict == kernel.expected, report.reason
    assert report.exit_code == 0


def test_the_zoo_is_large_enough():
    assert len(FAULTY) >= 20
    assert len(SOUND) >= 8
    assert sum(kernel.allclose for kernel in FAULTY) >= 10
