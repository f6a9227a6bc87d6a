"""The ops in plain torch: what every kernel is tested against, and what runs where there are no kernels.

Each file has the ops of the file of its name in `ops/`, with the same signatures; what an op does is said there. Unless
one says otherwise, it computes in fp32 and rounds once, at the end, as the kernels do. Nothing here waits for the
device: tensors are made where the inputs are, and no value of a tensor decides what is called. So the contents of index
tensors are not checked.
"""
