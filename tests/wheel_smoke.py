"""What an installed wheel can do in an environment that has nothing but what it asks for: run as
`python wheel_smoke.py [--native]` outside the sources; the second also asks for the native library.
"""

import sys

import torch

import halfulp
from halfulp import native
from halfulp.audit import Shape


class Layer(torch.nn.Module):
    """Attention, and nothing else."""

    def forward(self, query, key, value):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def wrong(query, key, value, *, is_causal, scale):
    """A planted defect."""
    return halfulp.attention(query, key, value, is_causal=is_causal, scale=scale) * 1.02


def main() -> None:
    """Call each public function once."""
    if "--native" in sys.argv:
        assert native.missing() is None, native.missing()
    query, key, value = (
        torch.randn(1, 2, 48, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    halfulp.attention(query, key, value, is_causal=True).sum().backward()
    halfulp.emulate(query, key, value, recipe="BF16_FLASH2").sum().backward()
    halfulp.golden(query, key, value, torch.ones_like(query))
    halfulp.round_to(torch.ones(3), "bf16")
    layer = Layer()
    with halfulp.patch(), halfulp.watch(layer, every=1) as watcher:
        for _ in range(12):
            layer(query, key, value).float().square().sum().backward()
            watcher.step()
    print(watcher.report())
    shapes = [Shape(2, 4, 64, 64, 16)]
    report = halfulp.audit(wrong, shapes=shapes, only=["gaussian"], explain=False)
    assert repr(report) == f"<AuditReport {report}>"
    print(report)
    assert report.verdict == "defect"


if __name__ == "__main__":
    main()
