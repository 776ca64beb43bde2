"""The audit on the defect zoo: every planted fault is caught, and no sound or stock kernel raises
an alarm.
"""

import pytest

from halfulp.audit import Shape, audit, run
from halfulp.audit.choosing import TELLING
from halfulp.audit.probes import PROBES
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

pytestmark = pytest.mark.usefixtures("probes_alone", "no_lengths")


_ORDER = sorted(PROBES, key=lambda p: TELLING.index(p.name) if p.name in TELLING else len(TELLING))
_NAMES = [probe.name for probe in _ORDER]
PARTS = (*(_NAMES[i : i + 6] for i in range(0, len(_NAMES), 6)), ["relations"])
TESTS = 800  # of a whole quick audit, by which the level of each is divided


@pytest.mark.thorough(keep=8)
@pytest.mark.parametrize("kernel", FAULTY, ids=lambda k: k.name)
def test_a_planted_fault_is_caught(kernel, monkeypatch):
    """At the level of the whole audit, of which no more is run than catches it."""
    monkeypatch.setattr(run, "_count", lambda _: TESTS)
    shapes = () if kernel.name in NEED_SIZE else SMALL
    whole = kernel.name in CAUSES
    for part in [()] if whole else PARTS:
        report = audit(kernel.fn, explain=False, shapes=shapes, only=part)
        if report.verdict == "defect":
            break
    assert report.verdict == "defect", f"{kernel.fault}: {report.reason}"
    if whole:
        assert CAUSES[kernel.name] in [cause.key for cause in report.causes]


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("kernel", SOUND, ids=lambda k: k.name)
def test_a_kernel_without_a_fault_raises_no_alarm(kernel):
    report = audit(kernel.fn, explain=False, shapes=SMALL)
    assert report.verdict == kernel.expected, report.reason
    assert report.exit_code == 0


def test_the_zoo_is_large_enough():
    assert len(FAULTY) >= 20
    assert len(SOUND) >= 8
    assert sum(kernel.allclose for kernel in FAULTY) >= 10
