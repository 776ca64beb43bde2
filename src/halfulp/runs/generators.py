"""The states of all random generators that a training draws from, as tensors of integers, and the
way back.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

_GAUSS = 2  # words that hold Python's next Gauss number: whether there is one, and its bits


def generator_states() -> dict[str, Tensor]:
    """The states by name: "cpu" and "cuda:0" and so on (PyTorch's own bytes, uint8), "python" and
    "numpy" (int64).
    """
    import torch

    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{i}": x for i, x in enumerate(torch.cuda.get_rng_state_all())}
    version, words, gauss = random.getstate()
    assert version == 3
    states["python"] = torch.tensor([*words, *_packed(gauss)], dtype=torch.int64)
    kind, keys, place, has, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    assert kind == "MT19937"
    numbers = [place, *_packed(float(cached) if has else None)]
    states["numpy"] = torch.tensor([*map(int, keys), *numbers], dtype=torch.int64)
    return states


def set_generator_states(states: Mapping[str, Tensor]) -> None:
    """Put generators back to states that `generator_states` gave; devices that are not here stay
    out.

    Raises:
        ValueError: a state is not one of its generator's.
    """
    import torch

    for name, state in states.items():
        try:
            if name == "cpu":
                torch.set_rng_state(state)
            elif name.startswith("cuda:"):
                number = int(name.removeprefix("cuda:"))
                if torch.cuda.is_available() and number < torch.cuda.device_count():
                    torch.cuda.set_rng_state(state, number)
            elif name == "python":
                words = state.tolist()
                random.setstate((3, tuple(words[:-_GAUSS]), _unpacked(words[-_GAUSS:])))
            elif name == "numpy":
                *keys, place, has, bits = state.tolist()
                cached = _unpacked([has, bits])
                known = ("MT19937", np.array(keys, np.uint32), place, has, cached or 0.0)
                np.random.set_state(known)  # noqa: NPY002
            else:
                raise ValueError("accepted are cpu, cuda:N, python and numpy")
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"generators: {name}: {' '.join(str(error).split())}") from None


def _packed(number: float | None) -> list[int]:
    # its bits, so that nothing is rounded on the way through integers
    return [0, 0] if number is None else [1, int(np.float64(number).view(np.int64))]


def _unpacked(words: list[int]) -> float | None:
    return float(np.int64(words[1]).view(np.float64)) if words[0] else None
