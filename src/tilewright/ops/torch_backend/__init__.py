"""The ops in plain torch: the reference for testing kernels, and the implementation for devices without kernels.

Each file has the ops of its namesake in `ops/`, with the same signatures; those are documented there. Unless stated
otherwise, an op computes in fp32 and rounds once, at the end, like the kernels. Nothing here waits for the device:
tensors are created where the inputs are, and no value of a tensor decides what is called. So the contents of index
tensors are not checked.
"""
