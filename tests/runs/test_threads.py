"""A kernel is judged on the threads it runs on; what it is held against takes one."""

import pytest
import torch

from halfulp import audit
from halfulp.audit import Shape, gathering
from halfulp.runs.threads import as_outside, one_thread, own_thread

SMALL = {"shapes": [Shape(1, 2, 16, 16, 8)], "only": ["gaussian"], "explain": False}


@pytest.fixture
def three_threads():
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("three_threads")
def test_a_kernel_has_the_threads_of_the_audits_caller_and_our_work_one(monkeypatch):
    kernels, ours = set(), set()

    def kernel(query, key, value, *, is_causal, scale):
        kernels.add(torch.get_num_threads())
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale
        )

    def measured(*args, **options):
        ours.add(torch.get_num_threads())
        return own(*args, **options)

    own = gathering.references
    monkeypatch.setattr(gathering, "references", measured)
    audit(kernel, **SMALL)
    assert (kernels, ours) == ({3}, {1})
    assert torch.get_num_threads() == 3


KERNEL = """
import torch
def softmax(input, dim):
    assert torch.get_num_threads() == 3, torch.get_num_threads()
    return torch.softmax(input, dim)
"""


@pytest.mark.usefixtures("three_threads")
def test_in_a_process_of_its_own_too(tmp_path):
    (tmp_path / "kernel.py").write_text(KERNEL)
    asked = {"op": "softmax", "only": ["gaussian"], "explain": False, "isolate": True}
    with own_thread():
        report = audit(f"{tmp_path / 'kernel.py'}:softmax", **asked)
    assert report.verdict != "error", report.reason


@pytest.mark.usefixtures("three_threads")
def test_blocks_may_stand_in_each_other():
    with own_thread(), own_thread():
        with as_outside():
            assert torch.get_num_threads() == 3
            with one_thread():
                assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    with one_thread(), as_outside():  # a job's: the kernel has one thread as well
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
