"""What cannot be computed is refused in one line that names the argument, what was given and what
is accepted.
"""

import math

import pytest
import torch

import halfulp
from halfulp import attention, attention_varlen, audit, emulate, explain_dispatch, golden

Q = torch.ones(1, 2, 8, 16, dtype=torch.bfloat16)
PACKED = torch.ones(10, 2, 16, dtype=torch.bfloat16)
ENDS = torch.tensor([0, 4, 10], dtype=torch.int32)
CALL = (Q, Q, Q)
VARLEN = (PACKED, PACKED, PACKED)


def like(*shape, dtype=torch.bfloat16):
    return torch.ones(shape, dtype=dtype)


def entered(**options):
    with halfulp.patch(**options):
        pass


BAD = {
    "query of type list": lambda: attention([1.0], Q, Q),
    "value of type NoneType": lambda: attention(Q, Q, None),
    "query of dtype torch.int32": lambda: attention(Q.int(), Q.int(), Q.int()),
    "key of dtype torch.float32": lambda: attention(Q, Q.float(), Q),
    "key of head dimension 32": lambda: attention(Q, like(1, 2, 8, 32), Q),
    "value of length 9": lambda: attention(Q, Q, like(1, 2, 9, 16)),
    "key of 2 heads": lambda: attention(like(1, 4, 8, 16), Q, Q),
    "query of shape (16,)": lambda: attention(like(16), Q, Q),
    "key on meta": lambda: attention(Q, Q.to("meta"), Q),
    "query is nested or sparse": lambda: attention(Q.to_sparse(), Q, Q),
    "attn_mask of type list": lambda: attention(*CALL, [[True]]),
    "attn_mask of shape (7, 7)": lambda: attention(*CALL, like(7, 7, dtype=torch.bool)),
    "attn_mask of dtype torch.int64": lambda: attention(*CALL, like(8, 8, dtype=torch.int64)),
    "is_causal=True": lambda: attention(*CALL, like(8, 8, dtype=torch.bool), is_causal=True),
    "is_causal='yes'": lambda: attention(*CALL, is_causal="yes"),
    "dropout_p=1.5": lambda: attention(*CALL, dropout_p=1.5),
    "dropout_p='half'": lambda: attention(*CALL, dropout_p="half"),
    "scale=inf": lambda: attention(*CALL, scale=math.inf),
    "scale='1/8'": lambda: attention(*CALL, scale="1/8"),
    "window=3": lambda: attention(*CALL, window=3),
    "window=(-2, 0)": lambda: attention(*CALL, window=(-2, 0)),
    "window=('a', 0)": lambda: attention(*CALL, window=("a", 0)),
    "softcap=-1.0": lambda: attention(*CALL, softcap=-1.0),
    "softcap='30'": lambda: attention(*CALL, softcap="30"),
    "sinks of type list": lambda: attention(*CALL, sinks=[0.0, 0.0]),
    "sinks of shape (5,)": lambda: attention(*CALL, sinks=like(5)),
    "causal_offset=0.5": lambda: attention(*CALL, is_causal=True, causal_offset=0.5),
    "recipe='stok'": lambda: attention(*CALL, recipe="stok"),
    "backend='gpu'": lambda: attention(*CALL, backend="gpu"),
    "backend='triton'": lambda: attention(*CALL, backend="triton"),
    "query of type int": lambda: explain_dispatch(1, Q, Q),
    "softcap=nan": lambda: explain_dispatch(*CALL, softcap=math.nan),
    "recipe='x'": lambda: entered(recipe="x"),
    "backend='x'": lambda: entered(backend="x"),
    "query of shape (1, 2, 8, 16)": lambda: attention_varlen(*CALL, ENDS),
    "cu_seqlens_q of type list": lambda: attention_varlen(*VARLEN, [0, 10]),
    "cu_seqlens_q of shape (3,) and torch.float32": lambda: attention_varlen(*VARLEN, ENDS.float()),
    "cu_seqlens_q=[0, 4]": lambda: attention_varlen(*VARLEN, ENDS[:2]),
    "cu_seqlens_k of 2 entries to 10": lambda: attention_varlen(*VARLEN, ENDS, ENDS[::2]),
    "value of length 12": lambda: attention_varlen(PACKED, PACKED, like(12, 2, 16), ENDS),
    "recipe=None": lambda: emulate(*CALL, recipe=None),
    "recipe='BF16_FLSH2'": lambda: emulate(*CALL, recipe="BF16_FLSH2"),
    "key of type str": lambda: emulate(Q, "key", Q),
    "scale='one'": lambda: emulate(*CALL, scale="one"),
    "query of type tuple": lambda: golden((1.0,), Q, Q),
    "grad_out of type float": lambda: golden(*CALL, 1.0),
    "grad_out of shape (1, 2, 8, 17)": lambda: golden(*CALL, like(1, 2, 8, 17)),
    "target='sdap'": lambda: audit("sdap"),
    "dtype='bf61'": lambda: audit("sdpa", dtype="bf61"),
    "depth='deep'": lambda: audit("sdpa", depth="deep"),
    "shapes=(1, 2, 3)": lambda: audit("sdpa", shapes=((1, 2, 3),)),
    "device='mars'": lambda: audit("sdpa", device="mars"),
}


@pytest.mark.parametrize("said", BAD)
def test_bad_input_is_refused_in_one_line(said):
    with pytest.raises(ValueError, match="accepted") as refused:
        BAD[said]()
    message = str(refused.value)
    assert message.startswith(said)
    assert "\n" not in message


def test_numbers_of_other_libraries_are_numbers():
    np = pytest.importorskip("numpy")
    for scale in (np.float32(0.25), torch.tensor(0.25)):
        assert attention(*CALL, scale=scale).equal(attention(*CALL, scale=0.25))
