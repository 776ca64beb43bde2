"""What several tests of audits share."""

import pytest

from halfulp.audit import planning


@pytest.fixture
def probes_alone(monkeypatch):
    """Audits without the covering array, which has tests of its own and costs a second each."""
    monkeypatch.setattr(planning, "size_cases", lambda _: ())
