"""`assert_sound`: an audit as an assertion, whose failure says what is wrong, why, where it is
worst, and on which smallest input.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from halfulp.audit import AuditReport, Case, Shape, audit
from halfulp.audit.against import Change, Comparison, audit_of, compare, read_audits
from halfulp.audit.run import runner
from halfulp.audit.shrink import severity
from halfulp.audit.verdict import Finding
from halfulp.operations import Sizes
from halfulp.report.audit_summary import meaning
from halfulp.runs.threads import own_thread
from halfulp.targets import CallLimits, Form, Target, resolve, target_of

GOOD = ("sound", "stock", "forward sound", "forward stock")
_WIDTH = 96


@dataclass(frozen=True)
class Failing:
    """The input on which a target failed, and what failed there: enough to try it again."""

    case: Case
    kind: str
    property: str
    tensor: str
    form: str | None = None  # that the target is called in

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for a cache."""
        return {
            "case": vars(self.case) | {"shape": asdict(self.case.shape)},
            "kind": self.kind,
            "property": self.property,
            "tensor": self.tensor,
            "form": self.form,
        }

    @classmethod
    def of(cls, plain: Any) -> Failing | None:
        """From plain data; None where it is none of these."""
        try:
            case = dict(plain["case"])
            size = case.pop("shape")
            # of attention, or of another operation by its symbols
            shape = (
                Sizes.given(size["calls"], **dict(size["of"])) if "of" in size else Shape(**size)
            )
            kind, tested, tensor = (str(plain[name]) for name in ("kind", "property", "tensor"))
            form = None if plain["form"] is None else str(Form.parse(plain["form"]))
            return cls(Case(shape=shape, **case), kind, tested, tensor, form)
        except (TypeError, KeyError, AttributeError, ValueError):
            return None


class SoundnessError(AssertionError):
    """A target is not as good as it was asserted to be."""

    def __init__(
        self, message: str, report: AuditReport | None = None, failing: Failing | None = None
    ) -> None:
        super().__init__(message)
        self.report = report  # the whole audit; None where one input was tried again
        self.failing = failing  # None: nothing that one input shows


def assert_sound(
    target: str | Target | Callable[..., Any],
    op: str = "attention",
    *,
    like: str | Path | Callable[..., Any] = "stock",
    dtype: str | torch.dtype = "bfloat16",
    depth: Literal["quick", "full"] = "quick",
    shapes: Sequence[Shape] = (),
    captured: Sequence[str] = (),
    seed: int = 0,
    device: str | torch.device = "cpu",
    forward: bool = False,
    form: str | None = None,
    isolate: bool | CallLimits = False,
) -> AuditReport:
    """Audit a kernel and raise unless it is sound: for tests.

    Args:
        target: as `halfulp.audit` takes it: a function `f(query, key, value, *, is_causal, scale)`
            on `[B, H, N, D]` tensors, or a name.
        op: the operation: "attention", another of `halfulp ls operations`, or a folder that
            defines one.
        like: how good it must be. "stock": as good as FlashAttention-2's recipe, whose gradient has
            a known bias. "sound": free of bias, within the budget of the format. Or another
            kernel, a function or a name, or a saved audit, FILE.json: no figure may be
            significantly worse than there, whatever the verdict.
        dtype: bfloat16, float16 or float32, by name or as torch has it.
        depth: "quick" or "full".
        shapes: sizes to use instead of the depth's own.
        captured: safetensors files with real activations to audit on as well.
        seed: of the inputs.
        device: where it runs.
        forward: ask for no gradients, of a kernel that has no backward pass.
        form: how a function takes its tensors, as `halfulp.audit` takes it.
        isolate: make the calls in a process of their own; the target must be named then.

    Returns:
        The audit.

    Raises:
        SoundnessError: it is not; an AssertionError whose text is for reading. So it is where a
            call failed, a gradient is missing or inputs were written to: what was not seen is not
            sound.
        ValueError: an argument is none of these.
    """
    __tracebackhide__ = True
    options: dict[str, Any] = {
        "op": op,
        "dtype": dtype,
        "depth": depth,
        "shapes": shapes,
        "captured": captured,
        "seed": seed,
        "device": device,
        "forward": forward,
    }
    # first, so that a name or a file that does not exist is told before the target is audited
    before = None if like in ("stock", "sound") else _before(like, target, options)
    report = audit(target, isolate=isolate, form=form, **options)
    if before is not None:
        comparison = compare(before, report.as_dict())
        if comparison.change == "worse":
            raise SoundnessError(_worse_text(comparison, report), report, _failing(report))
        return report
    wanted = [v for v in GOOD if like == "stock" or v.endswith("sound")]
    if report.exit_code or report.verdict not in wanted:
        raise SoundnessError(failure_text(report, str(like)), report, _failing(report))
    return report


def _before(
    like: str | Path | Callable[..., Any],
    target: str | Target | Callable[..., Any],
    options: Mapping[str, Any],
) -> Mapping[str, Any]:
    if isinstance(like, Path) or (isinstance(like, str) and like.endswith(".json")):
        name = target if isinstance(target, str) else getattr(target, "name", "a function")
        return audit_of(read_audits(str(like), "like"), str(like), name, "like")
    if isinstance(like, str):
        try:
            like = resolve(like, "like", str(options["op"])).name
        except ValueError as error:
            raise ValueError(f"{error}; or 'stock' or 'sound'") from None
    return audit(like, explain=False, **options).as_dict()


@own_thread()
def replay(
    target: str | Target | Callable[..., Any],
    failing: Failing,
    *,
    device: str | torch.device = "cpu",
    forward: bool = False,
) -> float:
    """How far a target fails on one input, 1 being the limit of a defect."""
    found = target_of(target, failing.case.operation, failing.form)
    kind: Any = failing.kind
    finding = Finding("defect", kind, failing.property, failing.tensor, failing.case, "", 0.0)
    return severity(runner(found, str(device), forward), failing.case, finding)


def _failing(report: AuditReport) -> Failing | None:
    worst = next((f for f in report.findings if f.grade == "defect"), None)
    if worst is None or report.smallest is None:
        return None
    return Failing(report.smallest, worst.kind, worst.property, worst.tensor, report.form)


def failure_text(report: AuditReport, like: str) -> str:
    """What a reader of a failed test wants to know, in lines."""
    plain = report.as_dict()
    if report.verdict in GOOD:
        verdict = f"is {report.verdict.upper()}, {like!r} was asked for"
    else:
        verdict = "has a DEFECT" if report.verdict == "defect" else report.verdict.upper()
    lines = [f"{report.target}: {verdict}: {meaning(plain)}"]
    if report.verdict.startswith("forward") and not report.forward:
        lines += _told("why", "it gave no gradients; forward=True asks for none")
    if report.verdict in ("error", "incomplete"):
        return "\n".join([*lines, *_told("why", report.reason)])
    if report.cause is not None:
        code = report.cause.code
        lines += _told("cause", f"{report.cause.name} ({code}: halfulp explain {code})")
        lines += _told("evidence", report.evidence[0])
        lines += _told("resembles", report.cause.resembles)
        lines += _told("in training", report.cause.effect)
    graded = [f for f in report.findings if f.grade == "defect"] or list(report.findings)
    for name, kinds in (("worst", ("error", "lean", "non-finite", "relation")), ("", ("element",))):
        worst = next((f for f in graded if f.kind in kinds), None)
        if worst is not None:
            where = "" if worst.case is None else f" on {_name(worst.case)}"
            lines += _told(name or "element", f"{worst.property}{where}: {worst.figure}")
    lines += _told("findings", f"{len(graded)} of {report.tests} tests")
    if report.smallest is not None:
        lines += _told("smallest", _name(report.smallest))
        lines += _told("again", "the program below, or halfulp.testing.replay")
    if report.script is not None:
        lines += ["", textwrap.indent(report.script.rstrip("\n"), "    ")]
    return "\n".join(lines)


def _worse_text(comparison: Comparison, report: AuditReport) -> str:
    before, after = comparison.verdicts
    lines = [f"{report.target} is WORSE than {comparison.before} ({before} → {after})"]
    lines += [f"  {line}" for text in comparison.worse[:5] for line in textwrap.wrap(text, _WIDTH)]
    if len(comparison.worse) > 5:
        lines.append(f"  and {len(comparison.worse) - 5} more")
    changes: tuple[Change, ...] = ("worse", "same", "better")
    figures = ", ".join(f"{comparison.counted(change)} {change}" for change in changes)
    return "\n".join(
        [*lines, f"  of {len(comparison.pairs)} figures on the same inputs: {figures}"]
    )


def _name(case: Case) -> str:
    return f"{case.probe} {case.shape}, seed {case.seed}"


def _told(name: str, text: str) -> list[str]:
    first, *rest = textwrap.wrap(text, _WIDTH - 14) or [""]
    return [f"  {name:<11} {first}", *(f"  {'':<11} {line}" for line in rest)]
