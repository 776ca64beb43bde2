"""What a pairing of heads is called in the backward pass."""

import pytest

from halfulp.recipes import BF16_FLASH2
from halfulp.reconstruct.emulating import Model, Twist, Way
from halfulp.reconstruct.naming import differences


@pytest.mark.parametrize(("in_dq", "cause"), [(True, "key-heads"), (False, "group-sum")])
def test_a_wrong_pairing_that_dq_has_is_no_sum_over_a_group(in_dq, cause):
    plain, paired = Way(BF16_FLASH2), Way(
        BF16_FLASH2, (Twist("heads-tile-value", "by turns", "key-heads", lambda t: t),)
    )  # fmt: skip
    model = Model(plain, (paired if in_dq else plain, paired, plain))
    assert [d.cause for d in differences(model, BF16_FLASH2)] == [cause]
