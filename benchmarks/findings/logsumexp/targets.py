"""Log-sum-exp of PyTorch is in pytorch_options.py and pytorch_compiled.py."""

TARGETS = ()
