"""Where two computations part: planted faults are named, equal engines are not accused."""

import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfulp.diff import Setting, diff, floors
from halfulp.diff.local_gap import step_of
from halfulp.formats import round_to
from halfulp.interpose import Operation
from tests.diff import planted

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
ROUNDING = (planted.kernel,)  # another kernel in the same formats differs by rounding


@pytest.mark.parametrize(("fault", "kind", "dtype", "culprit"), planted.FAULTS)
def test_a_planted_fault_is_ranked_first(fault, kind, dtype, culprit):
    model = planted.language_model(kind, dtype)
    found = diff(model, fault(model), planted.batches())
    assert found.culprit == culprit
    first, *others = [x for x in found.groups if not x.layer]
    assert first.share > 0.9
    assert all(x.share is None or x.share < first.share for x in others)
    if fault in ROUNDING:
        assert (found.verdict, found.first) == ("within rounding", None)
        assert found.p > 0.05
    else:
        assert found.first is not None
        assert found.first.place.startswith(culprit.split("*")[0].split(" ")[0])
    if dtype == torch.float32 and fault not in ROUNDING:
        assert found.verdict == "beyond rounding"
        assert found.exit_code == 1


def test_an_fp8_cache_whose_tiles_differ_between_prefill_and_decode():
    model = planted.language_model("Llama", torch.bfloat16)
    prefill = Setting(model, "prefill", forward=planted.with_fp8_cache(8))
    decode = Setting(model, "decode", decode=20, forward=planted.with_fp8_cache(16))
    found = diff(prefill, decode, planted.batches())
    assert found.culprit == "model.layers.*.self_attn"
    assert found.groups[0].share > 0.9
    assert "self_attn" in found.first.place
    plain = diff(model, decode, planted.batches())
    assert plain.culprit == "model.layers.*.self_attn"
    assert "only B has" in plain.groups[0].why


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "how", [{"attention": "sdpa:math"}, {"pieces": 1}, {"pieces": 3}, {"decode": 21}]
)
def test_equal_engines_are_not_accused(how, dtype):
    model = planted.language_model("Llama", dtype)
    found = diff(model, Setting(model, "other", **how), planted.batches())
    assert found.verdict in ("identical", "within rounding")
    assert found.first is None
    assert found.exit_code == 0


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_compiled_model_is_not_seen_and_that_is_said():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    other = Setting(copy.deepcopy(model), "compiled")
    other = Setting(torch.compile(other.model, backend="eager"), "compiled")
    x = [torch.randn(8, 16)]
    found = diff(model, other, x)
    assert found.verdict == "identical"
    assert list(found.unseen.values()) == ["it is compiled (torch.compile)"]
    with torch.no_grad():
        other.model._orig_mod[1].weight.add_(1e-3)
    found = diff(model, other, x)
    assert found.verdict == "beyond rounding"
    assert "Not seen" in str(found)


def test_identical_is_bit_by_bit():
    model = planted.language_model("Llama", torch.float32)
    found = diff(model, model, planted.batches(1), gradients=True)
    assert (found.verdict, found.p, found.gap, found.exit_code) == ("identical", 1.0, 0.0, 0)
    assert all(x.same and not x.gap for x in found.operations)
    assert set(found.gradients.values()) == {(0.0, 0.0)}
    assert "identical, bit by bit, on 1 batch, 4 sequences" in str(found)


class TwoLayers(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, 8)

    def forward(self, x):
        return self.down(functional.gelu(self.up(x)))


def test_what_is_own_and_what_came_in_add_up_to_the_gap():
    torch.manual_seed(0)
    model = TwoLayers()
    x = torch.randn(16, 256)
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        rounded.up.weight.copy_(round_to(model.up.weight, "bf16"))
    found = diff(model, rounded, [x])
    rows = {row.place: row for row in found.operations}
    exact = functional.linear(x, rounded.up.weight, model.up.bias) - model.up(x)
    size = float(exact.detach().norm() / model.up(x).detach().norm())
    up = rows["up linear"]
    assert up.own == pytest.approx(size, rel=1e-4)
    assert up.gap == pytest.approx(size, rel=1e-4)
    assert up.inherited < 1e-6
    assert up.beyond
    for place in ("(model) gelu", "down linear"):
        assert rows[place].same
        assert rows[place].own == 0
        assert rows[place].inherited == rows[place].gap > 0
    assert found.culprit == "up"
    assert found.groups[0].into["outputs"][0] == pytest.approx(1, abs=1e-6)
    assert found.groups[0].out["outputs"][0] == pytest.approx(1, abs=1e-6)


def test_the_floor_is_one_rounding_of_operands_and_result():
    torch.manual_seed(0)
    model = TwoLayers()
    found = diff(model, Setting(model, autocast="bf16"), [torch.randn(64, 256)])
    row = next(row for row in found.operations if row.place == "up linear")
    assert row.formats == "bfloat16 for float32"
    assert row.over_floor == pytest.approx(1, abs=0.1)
    # two operands and the result
    assert row.floor == pytest.approx(step_of(torch.bfloat16) * math.sqrt(3), rel=0.1)
    assert found.verdict == "beyond rounding"
    assert found.p_formats > 0.05
    assert not row.beyond


def test_a_lean_is_told():
    torch.manual_seed(0)
    model = TwoLayers()

    def shrunk(operation):
        return operation.function(*operation.args, **operation.kwargs) * (1 - 2.0**-8)

    from halfulp.interpose import Swap

    other = Setting(model, swaps=(Swap(shrunk, paths=("up",)),))
    found = diff(model, other, [torch.randn(64, 256)])
    row = next(row for row in found.operations if row.place == "up linear")
    assert row.lean == pytest.approx(-(2.0**-8), rel=1e-3)
    assert row.lean_t < -100
    assert found.first.place == "up linear"


def test_gradients_and_what_carries_their_gap():
    model = planted.language_model("Llama", torch.float32).train()
    found = diff(model, planted.epsilon(model), planted.batches(), gradients=True)
    assert found.groups[0].into["gradients"][0] == pytest.approx(1, abs=0.01)
    assert found.groups[0].out["gradients"][0] == pytest.approx(1, abs=0.01)
    assert max(gap for gap, _ in found.gradients.values()) > 1e-4
    assert any(row.gradient for row in found.operations)


def test_modules_of_other_names_are_matched_by_shape():
    torch.manual_seed(0)
    model = TwoLayers()

    class Renamed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = model.up, model.down

        def forward(self, x):
            return self.second(functional.gelu(self.first(x)))

    found = diff(model, Renamed(), [torch.randn(8, 256)])
    assert found.verdict == "identical"
    assert found.renamed == {"first": "up", "second": "down"}
    assert "matched by shape" in str(found)


def test_experts_in_one_module_are_no_finding_beside_experts_one_by_one():
    separate = planted.Experts()
    draw = torch.Generator().manual_seed(1)
    x = [torch.randn(4, 24, 32, generator=draw).bfloat16() for _ in range(2)]
    fused = planted.Fused(separate)
    for a, b in ((separate, fused), (fused, separate)):
        found = diff(a, b, x, attribute=False)
        assert not [row.place for row in found.operations if row.beyond]
        assert (found.verdict, found.exit_code) == ("within rounding", 0)
    for fault, place in (("router", "mixture.router linear"), ("activation", "(model) to")):
        found = diff(separate, planted.Fused(separate, fault), x, attribute=False)
        assert found.first.place == place


def test_a_context_counts_as_part_of_a_setting():
    model = planted.language_model("Llama", torch.bfloat16)
    math_only = Setting(model, "math", context=lambda: sdpa_kernel(SDPBackend.MATH))
    found = diff(model, math_only, planted.batches())
    assert found.culprit == "model.layers.*.self_attn attention"
    assert {row.kind for row in found.operations if row.own} == {"attention"}


def test_a_model_in_another_dtype_is_given_its_batch_in_it():
    model, batch = nn.Linear(4, 2), torch.randn(8, 4)
    found = diff(model, Setting(model, dtype="bf16"), [batch])
    assert found.first is not None
    assert "bfloat16 for float32" in str(found)
    assert diff(model, Setting(model, dtype="fp32"), [batch]).verdict == "identical"


def test_the_report_is_plain_data(tmp_path):
    model = planted.language_model("Llama", torch.float32)
    found = diff(model, planted.epsilon(model), planted.batches())
    plain = json.loads(found.to_json(tmp_path / "found.json"))
    assert plain == json.loads((tmp_path / "found.json").read_text())
    assert plain["verdict"] == "beyond rounding"
    said = str(found)
    assert "1e-05 for 1e-06" in said
    assert "model.layers.*.post_attention_layernorm carries 100% of it" in said.replace("\n", " ")


def test_a_setting_takes_dtypes_as_torch_and_the_field_have_them():
    own, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert Setting(own, dtype=torch.bfloat16).dtype == Setting(own, dtype="bfloat16").dtype
    assert Setting(other, autocast=torch.half).autocast == "fp16"
    with pytest.raises(ValueError, match="autocast='fp32': accepted are bf16, fp16"):
        Setting(other, autocast="fp32")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: diff(m, m, []), "batches is empty"),
        (lambda m: diff(3, m, [1]), "a is a int: accepted are an nn.Module"),
        (lambda m: diff(m, m, [torch.ones(2, 4)], most=0), "most=0"),
        (lambda m: diff(Setting(m, pieces=1), m, [torch.ones(2, 4)]), "a runs in pieces"),
        (lambda m: Setting(m, dtype="bf61"), "dtype='bf61': accepted are bf16"),
        (lambda m: Setting(m, pieces=0), "pieces=0"),
        (lambda m: Setting(m, attention="sdpa:mth"), "did you mean 'sdpa:math'"),
        (lambda m: diff(m, m, ["text"]), "batch holds no tensor"),
    ],
)
def test_what_cannot_be_compared(call, message):
    with pytest.raises(ValueError, match=message):
        call(nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (functional.gelu, [(4, 64, 512)]),
        (torch.mul, [(8, 32, 512), (512,)]),
        (functional.layer_norm, [(64, 1024), (1024,)]),
        (functional.scaled_dot_product_attention, [(2, 8, 64, 64)] * 3),
        (torch.matmul, [(4, 8, 64, 64)] * 2),
        (torch.softmax, [(8, 64, 256)]),
    ],
)
def test_a_floor_of_few_numbers_is_that_of_all(monkeypatch, function, shapes):
    generator = torch.Generator().manual_seed(0)
    args = [torch.randn(shape, generator=generator) for shape in shapes]
    if function is functional.layer_norm:
        args.insert(1, (1024,))
    args += [-1] if function is torch.softmax else []
    name = function.__name__
    operation = Operation("elementwise", name, "", 0, function, tuple(args), {})
    entry = SimpleNamespace(coarsest=torch.bfloat16, dtype=torch.bfloat16)
    few = floors.sampled(operation)
    assert max(x.numel() for x in few.tensors()) <= 2 * floors.FEW
    assert few.tensors()[0].numel() < args[0].numel()
    found = floors.floors_of([entry], operation)
    monkeypatch.setattr(floors, "FEW", 2**40)
    assert floors.sampled(operation).tensors()[0].numel() == args[0].numel()
    assert found == pytest.approx(floors.floors_of([entry], operation), rel=0.15)


def test_attention_written_out_is_no_finding_beside_a_kernel_of_its_formats():
    by_hand, kernel = (planted.language_model("GPT2", torch.bfloat16) for _ in range(2))
    by_hand.set_attn_implementation("eager")
    found = diff(by_hand, kernel, planted.batches(), attribute=False)
    lone = [row for row in found.operations if row.answer is None and row.kind == "attention"]
    assert lone
    assert not any(row.beyond for row in lone)
    assert found.verdict == "within rounding"
    assert found.exit_code == 0
