"""What a kernel of an operation does, found in its own error: the definition is computed in every
known way, and the one whose results are the kernel's explains it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from halfulp.operations import OperationCalls, OperationResult, Rounding, Tensors
from halfulp.reconstruct.operation_ways import Way, computed, first_calls, ways

EXPLAINS = 0.5  # share of the error from which on a way is named
ALL = 0.995  # share from which on no other case is looked at
WHOLLY = 0.9  # share from which on nothing more is looked for
FURTHER = 0.1  # share that a second way must add
CALLS = 1  # of a case, on which every way is tried
LARGEST = 2**15  # elements of a call that is computed some hundred times
OTHERWISE = frozenset({"option", "end", "neighbor", "factor", "term-missing", "exchanged"})
"""Causes that are no rounding: such a way computes the kernel's own function or it does not."""
LEFT = 0.05  # share of the error, beside what rounding makes, that such a way may leave
GROSS = 0.1  # relative error above which the question is which function it is


@dataclass(frozen=True)
class FoundWay:
    """Causes of an operation's errors, and how much of them they explain."""

    cause: str  # its key in `CAUSES`
    text: str
    share: float  # of the squared error of the tensor
    tensor: str


@dataclass(frozen=True)
class Failure:
    """A case that fails: its calls, what is exact, and the tensors that fail, the worst first."""

    calls: OperationCalls
    truth: Tensors
    failing: tuple[str, ...]


def of_operation(
    run: Callable[[OperationCalls], OperationResult | None], failures: Sequence[Failure]
) -> FoundWay | None:
    """The way that explains most of an error on any of these cases; where none explains enough, one
    that says so of the first. None where the kernel gives nothing.
    """
    found: list[FoundWay] = []
    for failure in failures:
        some = first_calls(failure.calls, CALLS)
        if sum(x.numel() for x in some.operands.values()) > LARGEST:
            continue
        result = run(some)
        if result is None:
            continue
        kernel = {n: x.double() for n, x in result.tensors.items() if n in failure.truth}
        exact = {n: failure.truth[n][:CALLS].double() for n in kernel}
        failing = tuple(name for name in failure.failing if name in kernel)
        if failing:
            found.append(_Judge(some, kernel, exact, failing).found())
            if found[-1].share >= ALL:
                break
    # where one case is off by no more than rounding may be, it is not another function
    return max(found, key=lambda w: (w.share, w.cause != "operation-function"), default=None)


@dataclass(frozen=True)
class _Judge:
    """One case: what the kernel gave, what is exact, and which tensors fail."""

    calls: OperationCalls
    kernel: Tensors
    exact: Tensors
    failing: tuple[str, ...]

    def found(self) -> FoundWay:
        """The best way, and a second beside it where the two explain more together."""
        operation, tried = self.calls.operation, tuple(ways(self.calls))
        bases = [operation.stock, operation.floor]
        if bases[0].steps == bases[1].steps:
            del bases[0]
        start = max(self.share(base, ()) for base in bases)
        found = [(self.share(base, (way,)), base, way) for base in bases for way in tried]
        best, base, first = max(found, key=lambda trial: trial[0])
        constant = self._constant()
        if constant is not None and best < WHOLLY:
            return constant
        text, causes = first.text, {first.cause}
        if FURTHER < best < WHOLLY:
            more = [(self.share(base, (first, way)), way) for way in tried if way is not first]
            share, second = max(more, key=lambda trial: trial[0])
            if share > best + FURTHER:
                best, text = share, f"{first.text}; {second.text}"
                causes.add(second.cause)
        most = max(LEFT, 4 * self._of_rounding()) if causes & OTHERWISE else 1.0
        if best < EXPLAINS or 1 - best > min(most, EXPLAINS * (1 - start)):
            return self._unexplained(best, first)
        return FoundWay(first.cause, text, best, self.failing[0])

    def share(self, base: Rounding, chosen: tuple[Way, ...]) -> float:
        """How much of the failing tensors' squared errors these ways explain, less what they make
        wrong of the others.
        """
        try:
            emulated = computed(self.calls, base, chosen)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
            return -1.0  # a definition has no value there
        shares, wrong = [], []
        for name, kernel in self.kernel.items():
            if not kernel.is_floating_point() or emulated[name].shape != kernel.shape:
                continue
            if bool((kernel.isfinite() & ~emulated[name].isfinite()).any()):
                return -1.0
            left = _power(kernel - emulated[name].double())
            error = _power(kernel - self.exact[name])
            if name in self.failing:
                shares.append(1 - left / max(error, 1e-300))
            else:  # in tenths of its size, so that what rounding makes counts for nothing
                wrong.append(min(1.0, 10 * left / max(_power(self.exact[name]), 1e-300)))
        return sum(shares) / len(shares) - sum(wrong) / max(1, len(wrong))

    def _of_rounding(self) -> float:
        """The share of the failing tensors' squared errors that the floor makes."""
        floor = computed(self.calls, self.calls.operation.floor, ())
        made = sum(_power(floor[name].double() - self.exact[name]) for name in self.failing)
        errors = sum(_power(self.kernel[name] - self.exact[name]) for name in self.failing)
        return made / max(errors, 1e-300)

    def _constant(self) -> FoundWay | None:
        """Where a tensor is so many times what it should be, up to what rounding makes."""
        name, floor = self.failing[0], computed(self.calls, self.calls.operation.floor, ())
        kernel, exact = self.kernel[name], self.exact[name]
        factor = float((kernel * exact).sum() / max(_power(exact), 1e-300))
        left, error = _power(kernel - factor * exact), _power(kernel - exact)
        rounding = _power(floor[name].double() - exact)
        most = min(max(4 * rounding, (1 - WHOLLY) ** 2 * error), (1 - WHOLLY) * error)
        if not abs(factor - 1) > 0.02 or left > most:
            return None
        if not bool((kernel != 0).any()):
            return FoundWay("term-missing", f"{name} is 0 throughout", 1.0, name)
        text = f"{name} is {factor:.4g} times what it should be"
        return FoundWay("factor", text, 1 - left / error, name)

    def _unexplained(self, best: float, way: Way) -> FoundWay:
        name = self.failing[0]
        exact, error = _power(self.exact[name]), _power(self.kernel[name] - self.exact[name])
        relative = (error / exact) ** 0.5 if exact else float("inf")
        key = "operation-function" if relative > GROSS else "operation-unexplained"
        nearest = f"; nearest is: {way.text} ({100 * best:.0f} %)" if best > FURTHER else ""
        off = f"is {100 * relative:.2g} % off" if exact else "is not 0"
        return FoundWay(key, f"{name} {off}{nearest}", 0.0, name)


def _power(x: Tensor) -> float:
    return float(x.nan_to_num(0.0, 0.0, 0.0).square().sum())
