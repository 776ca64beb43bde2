"""How a complaint ends, and which become one."""

from halfulp.complaints import alike, meant


def test_the_nearest_name_is_told_however_it_is_capitalized():
    assert meant("bf16_flash", ["BF16_FLASH2", "FP32"]) == "; did you mean 'BF16_FLASH2'?"
    assert meant("Make", ["make"]) == "; did you mean 'make'?"
    assert meant("torch.half", ["bf16", "fp16"]) == "; did you mean 'fp16'?"
    assert meant("bf16", ["float16", "bfloat16"]) == "; did you mean 'bfloat16'?"
    assert meant("make", ["make"]) == meant("zzz", ["make"]) == ""


def test_reasons_that_differ_in_numbers_alone_become_the_first_of_them():
    said = alike(["size 64 is not 96", "refuses", "size 8 is not 12", "size 8 is not 12"])
    one = "size 64 is not 96 (and 1 with other numbers)"
    assert said == [one, "refuses", one, one]
