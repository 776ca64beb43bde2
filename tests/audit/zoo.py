"""The zoo: kernels with one planted fault each, and kernels without one. `python -m
tests.audit.zoo` lists them.

One kernel by name for the command line: `halfulp audit tests.audit.zoo:kernels.out_cut`.
"""

from types import SimpleNamespace

from tests.audit.zoo_faults import FAULTY
from tests.audit.zoo_kernel import TEXTBOOK, ZooKernel
from tests.audit.zoo_sound import SOUND

__all__ = ["FAULTY", "SOUND", "TEXTBOOK", "ZooKernel", "kernels"]

kernels = SimpleNamespace(**{each.name: each.fn for each in (*FAULTY, *SOUND)})


def main() -> None:
    print(f"{len(FAULTY)} faulty kernels (* passes torch.allclose at 1e-2 on Gaussian input)")
    for each in FAULTY:
        star = "*" if each.allclose else " "
        print(
            f"  {star} {each.name:24} {each.direction:9} {each.fault} [{each.resembles};"
            f" {each.shows_on.__name__}]"
        )
    print(f"{len(SOUND)} kernels without a fault")
    for each in SOUND:
        print(f"    {each.name:24} {each.expected}")


if __name__ == "__main__":
    main()
