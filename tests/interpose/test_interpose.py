"""Operations of other people's models: seen where they are, in another arithmetic where that is
asked for, untouched elsewhere.
"""

import copy
from collections import Counter

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfulp.formats import is_representable, round_to
from halfulp.interpose import Operation, Swap, interpose, leaves

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
IDS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))


def language_model(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
        tokens = {"bos_token_id": 0, "eos_token_id": 0}
        config = transformers.GPT2Config(**sizes, **tokens)
        return transformers.GPT2LMHeadModel(config).to(dtype).train()
    more = {"num_local_experts": 4} if kind == "Mixtral" else {}
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more, use_cache=False)
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).train()


def step(model: nn.Module, autocast: bool = False) -> list[torch.Tensor]:
    """Loss, logits and gradients of one training step."""
    model.zero_grad()
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [out.loss.detach(), out.logits.detach(), *grads]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(left, right, strict=True))


def distance(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left.double() - right.double()).norm() / right.double().norm())


@pytest.mark.parametrize("checkpoint", [None, True, False])
@pytest.mark.parametrize(
    ("kind", "dtype", "autocast"),
    [
        ("gpt2", torch.float32, True),
        ("Llama", torch.bfloat16, False),
        ("Mixtral", torch.float32, True),
    ],
)
def test_seeing_changes_no_bit(kind, dtype, autocast, checkpoint):
    model = language_model(kind, dtype)
    if checkpoint is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint})
    alone = step(model, autocast)
    seen: list[Operation] = []
    grads: list[torch.Tensor] = []

    def observe(operation, result):
        seen.append(operation)
        for x in leaves(result):
            if x.requires_grad:
                x.register_hook(lambda grad: grads.append(grad.detach()))

    with interpose(model, observe) as interposed:
        assert same(step(model, autocast), alone)
    assert interposed.unseen == {}
    assert len(grads) > len([x for x in seen if not x.recomputed]) / 2
    assert any(x.recomputed for x in seen) == (checkpoint is not None)
    places = {x.place for x in seen if not x.recomputed}
    assert {x.place for x in seen if x.recomputed} <= places
    assert same(step(model, autocast), alone)


@pytest.mark.parametrize("checkpoint", [None, True, False])
@pytest.mark.parametrize("kind", ["Llama", "Mixtral"])
def test_all_in_fp32_is_the_fp32_model_forward_and_backward(kind, checkpoint):
    low = language_model(kind, torch.bfloat16)
    wide = step(copy.deepcopy(low).float())
    if checkpoint is not None:
        low.gradient_checkpointing_enable({"use_reentrant": checkpoint})
    stock = step(low)
    with interpose(low, swaps=[Swap("fp32")]) as seen:
        found = step(low)
    seen.check([Swap("fp32")])
    # a reentrant checkpoint hands over tensors of the model's own dtype
    bound = 2.0**-9 if checkpoint is not True else 2.0**-8
    assert distance(found[1], wide[1]) < min(bound, distance(stock[1], wide[1]))
    for mine, theirs in zip(found[2:], wide[2:], strict=True):
        assert distance(mine, theirs) < 2.4 * bound


def test_an_operation_in_fp32_has_its_backward_pass_in_fp32():
    layer = nn.Linear(64, 64, bias=False).bfloat16()
    x = torch.randn(512, 64).bfloat16().requires_grad_()
    grad = torch.randn(512, 64).bfloat16()

    def grads(swaps):
        layer.zero_grad()
        x.grad = None
        with interpose(layer, swaps=swaps):
            out = layer(x)
            assert out.dtype == torch.bfloat16
            (out * grad).sum().backward()
        return x.grad.clone(), layer.weight.grad.clone()

    seen = grads([Swap("fp64", kinds=("linear",))])
    exact = grad.double() @ layer.weight.double(), grad.double().T @ x.double()
    for mine, true in zip(seen, exact, strict=True):
        assert torch.equal(mine, true.detach().bfloat16())


def test_kinds_of_arithmetic_that_is_written_by_hand():
    kinds: dict[str, Counter[str]] = {}

    def observe(operation, result):
        kinds.setdefault(operation.path, Counter())[operation.kind] += 1

    model = language_model("Llama")
    with interpose(model, observe) as seen:
        model(input_ids=IDS)
    assert seen.classes["model.norm"] == "LlamaRMSNorm"
    assert kinds["model.layers.1.input_layernorm"] == {"norm": 8}
    assert kinds["model.layers.0.self_attn"] == {"rotary": 8, "attention": 1}
    assert kinds["model.rotary_emb"].keys() == {"rotary"}
    assert kinds["model.layers.0.mlp"] == {"elementwise": 1}
    assert kinds["model.layers.0.mlp.act_fn"] == {"activation": 1}
    assert kinds["lm_head"] == {"linear": 1}


def test_swaps_choose_by_kind_path_name_and_order():
    model = language_model("Llama")
    one = {
        Swap("fp64", kinds=("attention",)): 2,
        Swap("fp64", paths=("model.layers.1",)): 36,
        Swap("fp64", kinds=("linear",), paths=("*.mlp",)): 6,
        Swap("fp64", names=("rsqrt",)): 5,
        Swap("fp64", names=("mul",), paths=("model.layers.0.self_attn",), orders=(0, 3)): 2,
    }
    for swap, count in one.items():
        with interpose(model, swaps=[swap]) as seen:
            model(input_ids=IDS)
        assert seen.chosen == [count], swap
    nothing = Swap("fp64", kinds=("conv",))
    with interpose(model, swaps=[nothing]) as seen:
        model(input_ids=IDS)
    with pytest.raises(ValueError, match="chooses no operation of this model"):
        seen.check([nothing])


@pytest.mark.parametrize(
    ("into", "message"),
    [
        ("fp23x", "into='fp23x': accepted is 'fp32', 'fp64'"),
        ("pf32", "did you mean 'fp32'"),
        (32, "into=32"),
    ],
)
def test_what_is_no_arithmetic(into, message):
    with pytest.raises(ValueError, match=message):
        Swap(into)
    with pytest.raises(ValueError, match="kinds='lineal'"):
        Swap("fp32", kinds=("lineal",))


def test_a_planted_mantissa_rounds_results_and_gradients():
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    x, came = torch.randn(8, 16), {}

    def observe(operation, result):
        result.register_hook(lambda grad: came.setdefault(operation.path, grad))
        came[f"result {operation.path}"] = result.detach()

    with interpose(model, observe, swaps=[Swap("e8m3", paths=("0",))]) as seen:
        out = model(x)
    assert seen.chosen == [1]
    (out * torch.randn_like(out)).sum().backward()
    assert is_representable(came["result 0"], "e8m3").all()
    assert not is_representable(came["result 1"], "e8m3").all()
    rounded = round_to(came["0"], "e8m3")  # on its way into the linear layer
    assert not torch.equal(rounded, came["0"])
    assert torch.equal(model[0].bias.grad, rounded.sum(0))


def test_attention_by_the_name_of_a_kernel_or_a_recipe():
    model = language_model("Llama", torch.bfloat16)
    with sdpa_kernel(SDPBackend.MATH):
        math = step(model)
    with interpose(model, swaps=[Swap("sdpa:math", kinds=("attention",))]) as seen:
        assert same(step(model), math)
    assert seen.chosen == [2]
    apart = []
    for accumulator in ("fp32", "e8m2"):
        recipe = f"BF16_FLASH2[weights={accumulator}]"
        with interpose(model, swaps=[Swap(recipe, kinds=("attention",))]):
            apart.append(distance(step(model)[1], math[1]))
    assert apart[1] > apart[0] > 0


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        x = torch.utils.checkpoint.checkpoint(
            lambda y: functional.gelu(self.inner(y)), x, use_reentrant=False
        )
        return Doubled.apply(x)


def test_custom_functions_are_seen_from_outside_and_lambdas_recomputed_in_place():
    model, seen = Mixed(), []
    x = torch.randn(2, 8, requires_grad=True)
    with interpose(model, lambda operation, result: seen.append(operation)):
        model(x).sum().backward()
    assert [(o.path, o.name, o.kind, o.recomputed) for o in seen] == [
        ("inner", "linear", "linear", False),
        ("(model)", "gelu", "activation", False),
        ("(model)", "Doubled", "custom", False),
        ("", "sum", "reduction", False),
        ("inner", "linear", "linear", True),
    ]  # the backward pass of gelu needs what it is given alone


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_not_seen_is_named_and_keeps_its_bits():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    scripted = torch.jit.trace(nn.Linear(16, 16), torch.randn(2, 16))
    compiled = torch.compile(nn.Linear(16, 16), backend="eager")
    in_place = nn.Linear(16, 16)
    in_place.compile(backend="eager")
    model = nn.Sequential(encoder, scripted, compiled, in_place, nn.Linear(16, 16))
    x = torch.randn(2, 4, 16)
    seen = []
    with torch.no_grad():
        alone = model(x)
        with interpose(model, lambda operation, result: seen.append(operation.path)) as found:
            assert torch.equal(model(x), alone)
    assert seen == ["4"]
    assert {path: why.split("(")[0].strip() for path, why in found.unseen.items()} == {
        "0": "it may take PyTorch's fused encoder path",
        "1": "it is TorchScript",
        "2": "it is compiled",
        "3": "it is compiled",
    }


def test_nothing_stays_behind():
    model = language_model("gpt2")
    stock = vars(torch.autograd.Function)["apply"], torch.autograd._engine_run_backward

    def fail(operation, result):
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"), interpose(model, fail):
        model(input_ids=IDS)
    assert (vars(torch.autograd.Function)["apply"], torch.autograd._engine_run_backward) == stock
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    assert not torch.overrides._get_current_function_mode()


def test_optimizers_are_left_alone():
    model, seen = nn.Linear(4, 4), []
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with interpose(model, lambda operation, result: seen.append(operation.name)):
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
    assert seen == ["linear", "square", "mean"]
