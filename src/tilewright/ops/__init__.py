"""The typed Python face of the kernels, one file per op family.

Shape suffixes: T packed tokens, D model width, H heads, G kv heads, K head width, B sequences, V vocabulary.
Every op checks its tensors in C++ and raises ValueError naming the tensor, what was expected and what came.
"""
