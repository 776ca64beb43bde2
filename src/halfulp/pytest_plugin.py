"""pytest's plugin: the fixture `assert_sound`, `--halfulp-depth`, and a cache of what failed.

Installed with halfulp, it is known to every pytest run on the machine: it imports nothing, torch
least of all, until a test asks for the fixture.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from halfulp.audit import AuditReport

_DEPTHS = ("quick", "full")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that makes every audit deeper, or none."""
    parser.getgroup("halfulp", "soundness of kernels").addoption(
        "--halfulp-depth",
        choices=_DEPTHS,
        default=None,
        help="depth of every audit that the fixture assert_sound makes, in place of the test's own",
    )


@pytest.fixture
def assert_sound(request: pytest.FixtureRequest) -> Callable[..., AuditReport]:
    """Assert that a kernel is sound: `assert_sound(my_attention, like="stock")`, with the arguments
    of `halfulp.testing.assert_sound`.

    What failed in an earlier run is tried first, on its one input, which takes milliseconds; the
    figures of every audit become JUnit properties of the test.
    """
    from halfulp import testing

    depth = request.config.getoption("--halfulp-depth")
    cache = getattr(request.config, "cache", None)  # None under -p no:cacheprovider
    number = itertools.count(1)

    def check(target: Any, op: str = "attention", **options: Any) -> AuditReport:
        __tracebackhide__ = True
        if depth is not None:
            options["depth"] = depth
        name = f"{request.node.nodeid} {next(number)}"
        key = f"halfulp/{hashlib.sha256(name.encode()).hexdigest()[:32]}"
        failed = testing.Failing.of(cache.get(key, None)) if cache is not None else None
        if failed is not None:
            _try_again(target, failed, options)
        try:
            report = testing.assert_sound(target, op, **options)
        except testing.SoundnessError as error:
            if cache is not None:
                cache.set(key, error.failing.as_dict() if error.failing else None)
            if error.report is not None:
                _record(error.report, request.node)
            raise
        if failed is not None and cache is not None:
            cache.set(key, None)
        _record(report, request.node)
        return report

    return check


def _try_again(target: Any, failed: Any, options: dict[str, Any]) -> None:
    __tracebackhide__ = True
    from halfulp import testing

    asked = {name: options[name] for name in ("device", "forward") if name in options}
    try:
        bad = testing.replay(target, failed, **asked)
    except (ValueError, OSError, LookupError):
        # a captured file that is gone, a probe that is no more, or has other sizes
        return
    if bad > 1:
        case = failed.case
        raise testing.SoundnessError(
            f"still fails on the input that failed last time: {failed.property} on {case.probe}"
            f" {case.shape}, seed {case.seed}: {bad:.3g} × the limit of a defect. Nothing else was"
            " tried; without this input the whole audit runs (pytest --cache-clear)",
            failing=failed,
        )


def _record(report: AuditReport, node: pytest.Item) -> None:
    """The figures that a trend over commits needs, as properties of the test: what the fixture
    record_property does, which warns under pytest's default kind of JUnit file.
    """
    plain = report.as_dict()
    told = [("verdict", plain["verdict"])]
    if plain["cause"] is not None:
        told.append(("cause", f"{plain['cause']['code']} {plain['cause']['name']}"))
    rows = [(case, row) for case in plain["cases"] for row in case["rows"]]
    for against in ("times_stock", "times_floor"):
        known = [pair for pair in rows if pair[1][against] is not None]
        if known:
            case, row = max(known, key=lambda pair: pair[1][against])
            figure = f"{row[against]:.4g} ({row['property']} on {case['probe']})"
            told.append((f"worst {against.replace('_', ' ')}", figure))
    node.user_properties += [(f"halfulp {plain['target']}: {name}", text) for name, text in told]
