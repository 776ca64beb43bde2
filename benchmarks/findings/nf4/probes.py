"""Inputs that expose what goes wrong in NF4."""

import torch

from halfulp.operations import OperationProbe as Probe

INDEPENDENT = ("T",)


def plain(sizes, generator):
    return {"input": torch.randn(sizes.shape("T D"), generator=generator)}


def ranges(sizes, generator):
    x = plain(sizes, generator)["input"]
    return {"input": x * torch.exp2((torch.arange(sizes["D"]) // 64 % 9 - 4).float())}


def zeros(sizes, generator):
    x = plain(sizes, generator)["input"]
    x[:, :64] = 0
    return {"input": x}


def outlier(sizes, generator):
    x = plain(sizes, generator)["input"]
    x[:, 5] *= 400
    return {"input": x}


PROBES = (
    Probe("gaussian", "codes and their borders", "QLoRA, arXiv 2305.14314", plain),
    Probe("ranges", "a scale of another block", "DeepGEMM 189", ranges),
    Probe("zeros", "blocks of zeros", "torchao PR 4798", zeros),
    Probe("outlier", "one number that sets its block's scale", "LLM.int8(), 2208.07339", outlier),
)
