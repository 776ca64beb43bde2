"""Fast attention kernels: a native library for CPUs, Triton for GPUs. Each speaks the contract of
`options`.
"""
