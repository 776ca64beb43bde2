"""What a reconstruction says in one line."""

from dataclasses import replace

from halfulp.recipes import BF16_FLASH2
from halfulp.reconstruct.emulating import FORWARD, Model
from halfulp.reconstruct.evidence import Cosine
from halfulp.reconstruct.found import Explained, Reconstruction
from halfulp.reconstruct.places import Place
from halfulp.reconstruct.twists import scales


def test_a_way_that_explains_nothing_of_o_is_not_said_of_what_others_do():
    (scale,) = (t for t in scales() if t.key == "scale-half")
    model = Model.of(BF16_FLASH2).with_ways(
        frozenset(FORWARD), lambda way: replace(way, twists=(scale,))
    )
    own = {"out": 0.96, "grad_query": 0.01, "grad_key": 0.01, "grad_value": 0.01}
    explained = tuple(Explained(n, Cosine(0.0, 0.0, left, 8), Cosine(0.0, 0.0, 1.0, 8), 9.0, 9.0)
                      for n, left in own.items())  # fmt: skip
    place = Place("out", "plain", "keys 0-14 get no weight", "other-data", 1.0, 9.0)
    found = Reconstruction(
        "kernel", "bfloat16", model, BF16_FLASH2, None, explained, (), (), (), (), (place,), (),
        {}, (), unsteady=False, tried=1, seconds=0.0, complete=True,
    )  # fmt: skip
    assert scale.text in found.text
    assert scale.text not in found.sentence
    assert found.sentence == (
        "is BF16_FLASH2 as far as dQ, dK, dV go: explains 99 % of dQ's error, 99 % of dK's error,"
        " 99 % of dV's error; unexplained: O (keys 0-14 get no weight)"
    )
