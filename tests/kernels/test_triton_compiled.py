"""The kernels compiled for chips that are not at hand: no spills, and the table of what they take
is that of this code.

A few rows are compiled; `python -m benchmarks.gpu_attention --compile` makes the whole table, in
minutes.
"""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")

from benchmarks import triton_compile as compiling  # noqa: E402

from halfulp.kernels.triton_configs import Config, config_for  # noqa: E402

SHIPPED = compiling.shipped_rows()
SOME = [
    ("sm_90", 128, "forward", "halfulp", False, ""),
    ("sm_90", 64, "key", "halfulp", True, ""),
    ("sm_80", 64, "query", "stock", False, ""),
    ("sm_100", 64, "key", "stock", False, ""),
    ("sm_90", 64, "key", "halfulp", False, "all"),
    ("sm_80", 64, "forward", "halfulp", False, "sinks"),
    ("gfx942", 64, "query", "halfulp", False, "dropout"),
]


def test_the_table_is_whole_and_of_these_tiles() -> None:
    assert set(SHIPPED) == {compiling.row_name(*row) for row in compiling.rows()} | {"triton"}
    for row in compiling.rows():
        target, dim, kind, _, causal, variant = row
        chip = compiling.TARGETS[target]
        capability = chip.arch if chip.backend == "cuda" else 0
        options = {"": 0, "sinks": 0, "all": 3}.get(variant, 1)
        expected = config_for(kind, capability, dim, causal, options=options)
        assert Config(*SHIPPED[compiling.row_name(*row)]["config"]) == expected


def test_nothing_spills_and_everything_fits() -> None:
    # KiB a block may have
    memory = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "gfx942": 64}
    for row in compiling.rows():
        found = SHIPPED[compiling.row_name(*row)]
        assert found["spills"] == 0, row
        assert found["registers"] <= (512 if row[0] == "gfx942" else 255), row
        assert found["shared"] <= memory[row[0]] * 1024, row


@pytest.mark.filterwarnings("ignore::UserWarning:triton")
@pytest.mark.parametrize("row", SOME, ids=lambda row: compiling.row_name(*row))
def test_compiled_now(row: tuple[str, int, str, str, bool, str]) -> None:
    now, shipped = compiling.row(*row), SHIPPED[compiling.row_name(*row)]
    assert now["spills"] == 0
    if triton.__version__ == SHIPPED["triton"]["version"]:
        assert now == shipped


@pytest.mark.filterwarnings("ignore::UserWarning:triton")
def test_what_the_table_leaves_out_compiles_too() -> None:
    """Row statistics, δ over P, and tiles by tensor descriptors."""
    planned = compiling.launches("exact_delta", 64)
    assert compiling.measure(planned["rows"], "sm_90").spills == 0
    assert compiling.measure(planned["delta"], "sm_90").spills == 0
    plain, described = (Config(128, 64, 8, 2, descriptors) for descriptors in (False, True))
    by_pointer, by_descriptor = (
        compiling.measure(
            compiling.launches("halfulp", 64, causal=True, config=config)["query"], "sm_90"
        )
        for config in (plain, described)
    )
    assert by_descriptor.spills == 0
    assert by_descriptor.instructions["total"] < by_pointer.instructions["total"]


def test_the_overhead_of_the_recipe_in_instructions() -> None:
    """Per score and thread, against the stock recipe in the same source: what the repair costs
    before any clock.
    """
    for dim in (64, 128):
        for kind, most in (("forward", 1.0), ("query", 2.0), ("key", 5.0)):
            names = (
                compiling.row_name("sm_90", dim, kind, recipe, False)
                for recipe in ("halfulp", "stock")
            )
            ours, stock = (SHIPPED[name]["instructions"] for name in names)
            assert ours["exp2"] <= stock["exp2"]
            assert ours["total"] - stock["total"] <= most
            assert ours != stock  # two kernels, not one compiled twice
            # one at a time, rounding takes the slow unit; packed it takes half an instruction a
            # score
            assert ours["convert"] <= stock["convert"] + 0.5


LOOP = """
        /*0100*/                   LDG.E R1, [R2.64] ;
        /*0110*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0120*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0130*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0140*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0150*/              @!P0 MUFU.EX2 R5, R5 ;
        /*0160*/                   MUFU.EX2 R5, R5 ;
        /*0170*/                   MUFU.EX2 R5, R5 ;
        /*0180*/                   MUFU.EX2 R5, R5 ;
        /*0190*/                   F2FP.BF16.F32.PACK_AB R6, R5, R5 ;
        /*01a0*/               @P1 BRA 0x100 ;
        /*01b0*/                   EXIT ;
        /*01c0*/                   BRA 0x1c0;
"""


def test_the_inner_loop_is_read_from_assembly() -> None:
    counts = compiling.inner_loop(LOOP)
    assert counts == {"memory": 1, "mma": 4, "exp2": 4, "convert": 1, "other": 1, "total": 11}
    masked = LOOP.replace("/*0190*/", "/*0188*/ FSEL R5, R5, R6, P2 ;\n /*0190*/")
    assert compiling.inner_loop(masked)["float"] == 1
    assert (
        compiling.inner_loop(masked + LOOP.replace("*01", "*11").replace("0x100", "0x1110"))[
            "total"
        ]
        == 10
    )
    with pytest.raises(ValueError, match="without a loop"):
        compiling.inner_loop(LOOP.replace("@P1 BRA 0x100", "NOP"))
