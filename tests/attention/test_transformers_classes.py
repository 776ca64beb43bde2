"""`attn_implementation="halfulp"` over classes of transformers: eager's logits and gradients, or a
line that refuses.

Every family that once gave something else, and one of each kind beside them;
`benchmarks/transformers_classes.py` runs all, and docs/transformers.md is its table.
"""

import re
from pathlib import Path

import pytest
import torch

import halfulp
from tests.attention.held_to_eager import BUDGET, cases, difference, hold
from tests.attention.tiny_transformers import built, classes

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")
PAGE = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text(encoding="utf-8")
TYPES = {name: model_type for _, model_type, name in classes()}
# Sparse attention, which was dense; a mask that is appended to, which lost its meaning.
WRONG_ONCE = (
    *("AXK2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "GlmMoeDsaForCausalLM"),
    *("HYV4ForCausalLM", "MistralLarge4TextModel"),
)
# Causality or padding lost, since they add sdpa's boolean mask to the scores.
CAUSAL_ONCE = (
    *("BloomForCausalLM", "CodeGenForCausalLM", "GPTNeoXJapaneseForCausalLM", "MptForCausalLM"),
    *("Inkling2ForCausalLM", "MegatronBertForCausalLM", "MvpForCausalLM", "RemBertForCausalLM"),
    *("RoFormerForCausalLM", "TrOCRForCausalLM", "XGLMForCausalLM", "BigBirdForMaskedLM"),
    *("ConvBertForMaskedLM", "IBertForMaskedLM", "LongformerForMaskedLM", "MPNetForMaskedLM"),
    *("NystromformerForMaskedLM", "SqueezeBertForMaskedLM", "TapasForMaskedLM", "CanineModel"),
    *("BigBirdPegasusForConditionalGeneration", "LEDForConditionalGeneration", "FlavaModel"),
    *("NllbMoeForConditionalGeneration", "PegasusXForConditionalGeneration", "SplinterModel"),
    *("ImageGPTForImageClassification", "SpeechT5ForSpeechToText", "VisualBertModel"),
    *("BlipForConditionalGeneration", "GPTJForCausalLM", "GPTNeoForCausalLM", "GitForCausalLM"),
)
# A table of their own, in which the name was a KeyError; sdpa is in it.
OWN_CLASSES = ("FalconForCausalLM", "Data2VecVisionForImageClassification", "SamVisionModel")
OF_EACH_KIND = (
    *("GptOssForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Qwen3NextForCausalLM"),
    *("BertForMaskedLM", "ModernBertForMaskedLM", "T5ForConditionalGeneration"),
    *("BartForConditionalGeneration", "ViTForImageClassification", "WhisperForCausalLM"),
    *(
        "Wav2Vec2ForCTC",
        "Qwen2VLForConditionalGeneration",
        "ChineseCLIPModel",
        "SwinForImageClassification",
    ),
)


@pytest.fixture(autouse=True, scope="module")
def registered():
    halfulp.register_transformers()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    yield
    transformers.logging.set_verbosity(transformers.logging.WARNING)


@pytest.mark.thorough(keep=8)
@pytest.mark.parametrize("name", [*WRONG_ONCE, *OF_EACH_KIND])
def test_as_eager(name):
    held = hold(name, TYPES[name])
    assert (held.verdict, held.said) == ("equal", "")
    assert held.calls >= len(held.cases)


@pytest.mark.parametrize("name", [*CAUSAL_ONCE, *OWN_CLASSES])
def test_refused_in_one_line(name):
    instead = "inside `with halfulp.patch" if name in OWN_CLASSES else "which nothing can replace"
    with pytest.raises(ValueError, match=rf"'halfulp' for {name}: accepted .*{instead}") as refused:
        built(name, TYPES[name], "halfulp")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", OWN_CLASSES)
def test_what_the_refusal_says_instead_is_right(name):
    eager = built(name, TYPES[name], "eager")
    sdpa = built(name, TYPES[name], "sdpa", eager.state_dict())
    for case, run in cases(eager).items():
        if case == "cache":  # halfulp's functions keep no state
            continue
        expected = run(eager)
        with halfulp.patch():
            got = run(sdpa)
        assert not all(torch.equal(a, b) for a, b in zip(got, run(sdpa), strict=True)), (
            "not reached"
        )
        assert max(difference(a, b) for a, b in zip(got, expected, strict=True)) <= BUDGET, case


def test_a_part_of_a_model_is_refused_by_its_own_name():
    with pytest.raises(ValueError, match="for SamVisionModel"):
        built("DeepseekVLHybridModel", "deepseek_vl_hybrid", "halfulp")


def test_registering_again_checks_once():
    before = transformers.PreTrainedModel.get_correct_attn_implementation
    halfulp.register_transformers()
    assert transformers.PreTrainedModel.get_correct_attn_implementation is before


def test_the_page_is_of_this_version_and_names_every_class():
    assert f"# transformers {transformers.__version__}, class by class" in PAGE, (
        "python -m benchmarks.transformers_classes"
    )
    rows = re.findall(r"^\| (\w+) \| (.*)\|$", PAGE, re.MULTILINE)
    assert {name for name, _ in rows} - {"class"} == set(TYPES)
    assert "## Wrong" not in PAGE
    refused = PAGE[PAGE.index("## Refused") : PAGE.index("## Unknown")]
    assert all(f"| {name} |" in refused for name in (*CAUSAL_ONCE, *OWN_CLASSES))
