"""Which ways are tried of a kernel of any operation, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from halfulp.operations import OperationCalls, Rounding
from halfulp.reconstruct.operation_blocks import block_mistakes
from halfulp.reconstruct.operation_numbers import further_ways
from halfulp.reconstruct.operation_operands import filled_up, operand_ways
from halfulp.reconstruct.operation_options import option_ways
from halfulp.reconstruct.operation_read import function_ways, read_ways
from halfulp.reconstruct.operation_regions import visible_regions
from halfulp.reconstruct.operation_rewritten import rewritten_ways
from halfulp.reconstruct.operation_sums import sum_ways
from halfulp.reconstruct.operation_trials import Trial
from halfulp.reconstruct.operation_ways import Natural, Way, rare_ways, ways


def common_ways(calls: OperationCalls) -> tuple[Way, ...]:
    """What is tried of every kernel: of ways that are alike the first is named."""
    return *option_ways(calls), *operand_ways(calls), *ways(calls), *sum_ways(calls)


def rarer_ways(
    trial: Trial, others: Sequence[Trial], bases: Sequence[Rounding], *, explained: bool
) -> Iterator[tuple[Rounding, Iterable[Way], Natural]]:
    """What is tried where no common way explains; where roundings do, though not wholly, other
    formulas alone.
    """
    base, calls = bases[0], trial.calls
    yield from ((of, block_mistakes(calls, of), Natural.COMMON) for of in bases)
    yield base, rewritten_ways(calls), Natural.FORMULA
    yield base, read_ways(trial, base, others), Natural.FORMULA
    if not explained:
        for part in (None, *visible_regions(trial)[:1]):
            yield from ((of, further_ways(trial, of, part), Natural.NUMBER) for of in bases)
        yield base, rare_ways(calls), Natural.RARE
        yield base, filled_up(calls), Natural.RARE
    yield base, function_ways(trial, base, others), Natural.RARE


def ways_of_results(trial: Trial, base: Rounding) -> Iterator[Iterable[Way]]:
    """What is tried of results alone, where gradients are another function's."""
    calls = trial.calls
    yield read_ways(trial, base)
    yield rewritten_ways(calls)
    yield filled_up(calls)
    yield common_ways(calls)
    yield rare_ways(calls)
    yield function_ways(trial, base)
