"""Inputs that expose what goes wrong in log-sum-exp."""

import torch

from halfulp.operations import OperationProbe as Probe

INDEPENDENT = ("T",)


def plain(sizes, generator):
    return {"input": torch.randn(sizes.shape("T V"), generator=generator)}


def near(mean):
    return lambda sizes, generator: {"input": plain(sizes, generator)["input"] + mean}


def ties(sizes, generator):
    return {"input": plain(sizes, generator)["input"].mul(4).round()}


def sure(sizes, generator):
    x = plain(sizes, generator)["input"]
    x[:, 3] += 30
    return {"input": x}


PROBES = (
    Probe("gaussian", "errors that any input shows", "torch.logsumexp", plain),
    Probe("near_20", "a result whose ulp is a part of one weight", "torch.logsumexp", near(20.0)),
    Probe("near_minus_200", "the same, where the ulp is 1", "torch.logsumexp", near(-200.0)),
    Probe("large", "an exponential that overflows", "pytorch issue 196678", near(300.0)),
    Probe("ties", "equal maxima", "Qiu & Yao, arXiv 2510.04212", ties),
    Probe("sure", "one weight near 1", "marin PR 8217", sure),
)
